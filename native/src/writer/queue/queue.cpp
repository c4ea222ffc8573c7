#include "writer/queue/queue.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>

namespace dsh {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// A longer timeout is none: the clock's own range ends at 292 years.
constexpr double longest_timeout_s = 1e9;

// The time between two looks at whether a waiting thread is to leave.
constexpr std::chrono::milliseconds interrupt_interval{50};

IoError closed(const WriteJob &job) {
    return {"close of the writer, before all was prepared,", job.path(), 0, ECANCELED};
}

} // namespace

// Wait until `ready`, with a look at `interrupt` now and then; it throws with the mutex held again.
template <class Ready> void WriteQueue::wait_for(Lock &lock, const CheckInterrupt &interrupt, Ready ready) {
    if (!interrupt) {
        changed_.wait(lock, ready);
        return;
    }
    while (!changed_.wait_for(lock, interrupt_interval, ready)) {
        look_for(interrupt, lock);
    }
}

// Call `interrupt` without the mutex, which is held again when this returns or throws.
void WriteQueue::look_for(const CheckInterrupt &interrupt, Lock &lock) {
    if (!interrupt) {
        return;
    }
    lock.unlock();
    try {
        interrupt();
    } catch (...) {
        lock.lock();
        throw;
    }
    lock.lock();
}

std::shared_ptr<WriteJob> WriteQueue::start(std::shared_ptr<const WritePlan> plan, std::string path,
                                            std::shared_ptr<Faults> faults, const CheckInterrupt &interrupt) {
    if (block_bytes_ % plan->align() != 0) {
        throw std::invalid_argument("blocks of " + std::to_string(block_bytes_) +
                                    " bytes can't hold a plan aligned to " + std::to_string(plan->align()) +
                                    ": block_bytes must be a multiple of it");
    }
    {
        Lock lock(mutex_);
        if (stopping_) {
            throw std::runtime_error("the writer is closed: nothing was written to " + path);
        }
    }
    std::vector<Block> blocks = plan->blocks(block_bytes_);
    auto job = std::make_shared<WriteJob>(std::move(plan), std::move(blocks), std::move(path), std::move(faults));
    auto portions = job->portions();
    Lock lock(mutex_);
    // The job is in no list yet, so the backend leaves its eager blocks to this thread, which copies them before it
    // returns.
    job->busy = true;
    try {
        while (job->eager_block() && stage_next(job, lock, interrupt)) {
        }
    } catch (...) {
        // What is staged is dropped, and the file goes with the last reference to the job.
        fail_locked(*job, {"start, which was interrupted,", job->path(), 0, ECANCELED});
        throw;
    }
    job->busy = false;
    job->eager_s = seconds_since(job->started);
    if (!job->prepared() && stopping_) {
        fail_locked(*job, closed(*job));
    }
    if (!job->prepared() && !job->error) {
        open_.push_back(job);
        hashing_.add(job, std::move(portions));
    }
    tell(*job);
    return job;
}

double WriteQueue::release(const std::shared_ptr<WriteJob> &job, const CheckInterrupt &interrupt) {
    const auto start = std::chrono::steady_clock::now();
    Lock lock(mutex_);
    // From here on the backend prepares nothing more of this job, so no new write from live memory is submitted; this
    // thread takes over as the one that prepares.
    bool preparing = false;
    try {
        job->releasing = true;
        wait_for(lock, interrupt, [&] { return !job->busy; });
        // Once more: another thread at this barrier, interrupted meanwhile, has cleared it.
        job->releasing = job->busy = preparing = true;
        // What is left is copied into slots. Copying waits for slots, but is all the barrier needs: those writes read
        // the slot, and may complete after it.
        while (!job->live_prepared() && stage_next(job, lock, interrupt)) {
        }
        job->busy = preparing = false;
        tell(*job);
        auto looked = std::chrono::steady_clock::now();
        while (auto portion = hashing_.take_portion(*job)) {
            hash(*portion, lock);
            if (std::chrono::steady_clock::now() - looked >= interrupt_interval) {
                look_for(interrupt, lock);
                looked = std::chrono::steady_clock::now();
            }
        }
        // What was submitted from live memory has to complete: the device reads the memory until it answers.
        wait_for(lock, interrupt, [&] { return job->live_pending == 0 && job->live_unhashed == 0; });
    } catch (...) {
        job->releasing = false;
        job->busy = job->busy && !preparing;
        hashing_.wake();
        tell(*job);
        throw;
    }
    forget_prepared();
    const double waited = seconds_since(start);
    job->stall_s += waited;
    return waited;
}

bool WriteQueue::released(const WriteJob &job) {
    Lock lock(mutex_);
    return !job.busy && job.live_pending == 0 && job.live_unhashed == 0 && (job.live_prepared() || job.error);
}

bool WriteQueue::wait(const WriteJob &job, double timeout_s) {
    Lock lock(mutex_);
    const auto settled = [&] { return job.settled(); };
    if (timeout_s < 0 || timeout_s > longest_timeout_s) {
        ended_.wait(lock, settled);
    } else if (!ended_.wait_for(lock, std::chrono::duration<double>(timeout_s), settled)) {
        return false;
    }
    if (job.error) {
        throw *job.error;
    }
    return true;
}

void WriteQueue::fail(const std::shared_ptr<WriteJob> &job, IoError error) {
    Lock lock(mutex_);
    fail_locked(*job, std::move(error));
    ended_.wait(lock, [&] { return job->settled(); });
    forget_prepared();
}

void WriteQueue::require_written(const WriteJob &job) {
    Lock lock(mutex_);
    if (job.error) {
        throw *job.error;
    }
    if (!job.settled()) {
        throw std::logic_error("the data is not all written yet: call wait() first");
    }
}

WriteStats WriteQueue::stats(WriteJob &job) {
    Lock lock(mutex_);
    return {static_cast<double>(job.bytes_direct),
            static_cast<double>(job.bytes_copied),
            job.write_s,
            job.stall_s,
            job.eager_s,
            job.file().direct() ? 1.0 : 0.0};
}

std::uint64_t WriteQueue::free_bytes() {
    Lock lock(mutex_);
    return staging_.free_bytes();
}

std::size_t WriteQueue::urgent() {
    Lock lock(mutex_);
    return urgent_;
}

void WriteQueue::stop() {
    Lock lock(mutex_);
    stopping_ = true;
    forget_prepared();
    for (const auto &job : open_) {
        fail_locked(*job, closed(*job));
    }
    changed_.notify_all();
    hashing_.end();
}

void WriteQueue::drop_staging() {
    Lock lock(mutex_);
    staging_.drop();
}

std::optional<Write> WriteQueue::next(bool wait) {
    Lock lock(mutex_);
    for (;;) {
        if (auto write = pop_staged()) {
            return write;
        }
        if (auto write = prepare_lazily(lock)) {
            return write;
        }
        if (!wait || stopping_) {
            return std::nullopt;
        }
        changed_.wait(lock);
    }
}

bool WriteQueue::hash_next(bool wait) {
    // Let go without the mutex: it may be the job's last holder.
    std::optional<HashingWork::Item> item;
    Lock lock(mutex_);
    while (!(item = hashing_.take())) {
        if (!wait || (stopping_ && hashing_.empty())) {
            return false;
        }
        hashing_.wait(lock);
    }
    hash(*item, lock);
    return true;
}

void WriteQueue::hash(HashingWork::Item &item, Lock &lock) {
    WriteJob &job = std::visit([](auto &taken) -> WriteJob & { return *taken.job; }, item);
    HashingWork::Turn turn = hashing_.hash(item, lock);
    if (turn.slot) {
        staging_.give(*turn.slot);
    }
    if (turn.error) {
        fail_locked(job, std::move(*turn.error));
    }
    if (turn.ended) {
        settle(job);
    }
}

void WriteQueue::completed(Write &&write, int code) {
    Lock lock(mutex_);
    WriteJob &job = *write.job;
    --job.pending;
    // Also after a failure: only now is the kernel done with the memory.
    if (write.slot) {
        staging_.give(*write.slot);
    } else {
        --job.live_pending;
    }
    if (code == 0) {
        (write.slot ? job.bytes_copied : job.bytes_direct) += write.nbytes;
    } else {
        fail_locked(job, job.failure(write, code));
    }
    settle(job);
}

// Tell that something of the job has ended, and note the time when it was the last.
void WriteQueue::settle(WriteJob &job) {
    if (job.settled()) {
        job.write_s = seconds_since(job.started);
    }
    tell(job);
}

// Tell those who wait for the queue that something of the job has changed. Those who wait for its end are woken only by
// that: a thread that wakes for each block takes a core from the training each time.
void WriteQueue::tell(WriteJob &job) {
    if (job.settled()) {
        ended_.notify_all();
    }
    changed_.notify_all();
}

// Return the next staged write whose job has not failed; drop the others and give their slots back.
std::optional<Write> WriteQueue::pop_staged() {
    while (!staged_.empty()) {
        Write write = std::move(staged_.front());
        staged_.pop_front();
        if (!write.job->error) {
            return write;
        }
        staging_.give(*write.slot);
        --write.job->pending;
        tell(*write.job);
    }
    return std::nullopt;
}

// Prepare the next block of the oldest job whose live memory may still be read, and return it as a write. This is where
// the backend's thread reads a training's memory at its own pace. A job whose block needs a slot is passed over while
// none is free: the backend must not wait for a slot here, since only its own completions bring slots back.
std::optional<Write> WriteQueue::prepare_lazily(Lock &lock) {
    forget_prepared();
    for (std::size_t i = 0; i < open_.size();) {
        const std::shared_ptr<WriteJob> job = open_[i++];
        if (job->busy || job->releasing || job->live_prepared()) {
            continue;
        }
        std::optional<Slot> slot;
        if (!job->block().direct()) {
            slot = staging_.take(job->block().nbytes);
            if (!slot) {
                continue;
            }
        }
        job->busy = true;
        auto write = prepare(job, slot, lock);
        job->busy = false;
        tell(*job);
        if (write) {
            return write;
        }
        // The mutex was unlocked meanwhile, so the list may have changed.
        forget_prepared();
        i = 0;
    }
    return std::nullopt;
}

// Compose the job's next block in a slot and stage it, waiting for a slot as long as it takes. While it waits it counts
// as urgent, so feeders take no slot. The caller holds `busy`. Returns false when the job has failed.
bool WriteQueue::stage_next(const std::shared_ptr<WriteJob> &job, Lock &lock, const CheckInterrupt &interrupt) {
    std::optional<Slot> slot;
    // A job that is just being started is in no list, so `stop` can't fail it; `stopping_` ends its wait instead.
    const auto taken = [&] { return job->error || stopping_ || (slot = staging_.take(job->block().nbytes)); };
    if (!taken()) {
        ++urgent_;
        try {
            wait_for(lock, interrupt, taken);
        } catch (...) {
            --urgent_;
            changed_.notify_all();
            throw;
        }
        --urgent_;
        changed_.notify_all();
    }
    if (stopping_) {
        fail_locked(*job, closed(*job));
    }
    if (job->error) {
        return false;
    }
    auto write = prepare(job, slot, lock);
    if (write) {
        staged_.push_back(std::move(*write));
        changed_.notify_all();
    }
    return write.has_value();
}

// Compose the job's next block in a slot if there is one, and return it as a write; nothing when the job fails
// meanwhile. The mutex is unlocked while bytes are copied. The caller holds `busy`, which keeps the block and the
// running checksum of what is copied its own in that time.
std::optional<Write> WriteQueue::prepare(const std::shared_ptr<WriteJob> &job, std::optional<Slot> slot, Lock &lock) {
    const Block &block = job->block();
    std::optional<IoError> error;
    if (slot) {
        lock.unlock();
        try {
            job->compose(slot->data);
        } catch (const IoError &caught) {
            error = caught;
        }
        lock.lock();
    }
    if (error || stopping_) {
        fail_locked(*job, error ? std::move(*error) : closed(*job));
    }
    if (job->error) {
        if (slot) {
            staging_.give(*slot);
        }
        changed_.notify_all();
        return std::nullopt;
    }
    ++job->next;
    ++job->pending;
    job->live_pending += slot ? 0 : 1;
    const auto *data = slot ? slot->data : reinterpret_cast<const std::byte *>(block.source);
    return Write{job, data, block.offset, block.nbytes, slot};
}

void WriteQueue::fail_locked(WriteJob &job, IoError error) {
    if (!job.error) {
        job.error = std::move(error);
        hashing_.forget(job); // the caller holds the job
        tell(job);
    }
}

void WriteQueue::forget_prepared() {
    std::erase_if(open_, [](const auto &job) { return job->prepared() || job->error; });
}

} // namespace dsh
