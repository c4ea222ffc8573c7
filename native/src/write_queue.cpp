#include "write_queue.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace dsh {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

} // namespace

std::shared_ptr<WriteJob> WriteQueue::start(std::shared_ptr<const WritePlan> plan, std::string path,
                                            std::shared_ptr<Faults> faults) {
    std::vector<Block> blocks = plan->blocks(block_bytes_);
    auto job = std::make_shared<WriteJob>(std::move(plan), std::move(blocks), std::move(path), std::move(faults));
    Lock lock(mutex_);
    job->busy = true;
    while (job->eager_block() && stage_next(job, lock)) {
    }
    job->busy = false;
    job->eager_s = seconds_since(job->started);
    if (!job->prepared() && !job->error) {
        lazy_.push_back(job);
    }
    changed_.notify_all();
    return job;
}

double WriteQueue::release(const std::shared_ptr<WriteJob> &job) {
    const auto start = std::chrono::steady_clock::now();
    Lock lock(mutex_);
    job->releasing = true;
    changed_.wait(lock, [&] { return !job->busy; });
    job->busy = true;
    while (!job->prepared() && stage_next(job, lock)) {
    }
    job->busy = false;
    changed_.notify_all();
    changed_.wait(lock, [&] { return job->live_pending == 0; });
    forget_prepared();
    const double waited = seconds_since(start);
    job->stall_s += waited;
    return waited;
}

bool WriteQueue::released(const WriteJob &job) {
    Lock lock(mutex_);
    return !job.busy && job.live_pending == 0 && (job.prepared() || job.error);
}

bool WriteQueue::wait(const WriteJob &job, double timeout_s) {
    Lock lock(mutex_);
    const auto settled = [&] { return job.settled(); };
    if (timeout_s < 0) {
        changed_.wait(lock, settled);
    } else if (!changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), settled)) {
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
    changed_.wait(lock, [&] { return job->settled(); });
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

void WriteQueue::stop() {
    Lock lock(mutex_);
    stopping_ = true;
    for (const auto &job : lazy_) {
        fail_locked(*job, IoError("close of the engine", job->file().path(), 0, ECANCELED));
    }
    changed_.notify_all();
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

void WriteQueue::completed(Write &&write, int code) {
    Lock lock(mutex_);
    WriteJob &job = *write.job;
    --job.pending;
    if (write.slot) {
        staging_.give(*write.slot);
        job.bytes_copied += write.nbytes;
    } else {
        --job.live_pending;
        job.bytes_direct += write.nbytes;
    }
    if (code != 0) {
        fail_locked(
            job, IoError("write of " + std::to_string(write.nbytes) + " bytes", job.file().path(), write.offset, code));
    }
    if (job.settled()) {
        job.write_s = seconds_since(job.started);
    }
    changed_.notify_all();
}

// A queued block of a job that has not failed.
std::optional<Write> WriteQueue::pop_staged() {
    while (!staged_.empty()) {
        Write write = std::move(staged_.front());
        staged_.pop_front();
        if (!write.job->error) {
            return write;
        }
        staging_.give(*write.slot);
        --write.job->pending;
        changed_.notify_all();
    }
    return std::nullopt;
}

// Prepare the next block of the oldest job that may be read lazily. Gives the mutex up while bytes are hashed or
// copied.
std::optional<Write> WriteQueue::prepare_lazily(Lock &lock) {
    forget_prepared();
    for (const auto &candidate : lazy_) {
        if (candidate->busy || candidate->releasing) {
            continue;
        }
        const std::shared_ptr<WriteJob> job = candidate;
        const Block &block = job->block();
        const bool live = block.direct();
        std::optional<Slot> slot;
        if (!live) {
            slot = staging_.take(block.nbytes);
            if (!slot) {
                continue;
            }
        }
        job->busy = true;
        lock.unlock();
        if (live) {
            job->hash_live();
        } else {
            job->compose(slot->data);
        }
        lock.lock();
        job->busy = false;
        ++job->next;
        const auto *data = live ? reinterpret_cast<const std::byte *>(block.source) : slot->data;
        ++job->pending;
        job->live_pending += live ? 1 : 0;
        changed_.notify_all();
        return Write{job, data, block.offset, block.nbytes, slot};
    }
    return std::nullopt;
}

// Compose the job's next block in a slot, waiting for one, and queue it. The caller holds `busy`. False when the job
// has failed.
bool WriteQueue::stage_next(const std::shared_ptr<WriteJob> &job, Lock &lock) {
    const Block &block = job->block();
    std::optional<Slot> slot;
    changed_.wait(lock, [&] { return job->error || (slot = staging_.take(block.nbytes)); });
    if (job->error) {
        if (slot) {
            staging_.give(*slot);
        }
        return false;
    }
    lock.unlock();
    job->compose(slot->data);
    lock.lock();
    ++job->next;
    ++job->pending;
    staged_.push_back(Write{job, slot->data, block.offset, block.nbytes, slot});
    changed_.notify_all();
    return true;
}

void WriteQueue::fail_locked(WriteJob &job, IoError error) {
    if (!job.error) {
        job.error = std::move(error);
        changed_.notify_all();
    }
}

void WriteQueue::forget_prepared() {
    std::erase_if(lazy_, [](const auto &job) { return job->prepared() || job->error; });
}

} // namespace dsh
