// The heart of the writer: decides what is written next, and keeps the promise of the barrier.
//
// Invariants
//   1. The live blocks of a job are prepared in file order, by one thread at a time (`busy`).
//   2. A slot has one owner at a time: the thread that composes a block in it, or the feeder it is lent to, then the
//      queue while the write is staged, then the backend until it calls `completed`. The slot of a fed block is shared
//      meanwhile with the threads that hash it, which only read it, as the backend does. It goes back to the pool when
//      the last one has let it go.
//   3. Barrier: once `release` has returned, no thread reads, and no request in flight refers to, live memory of that
//      job. What is not hashed by then is hashed there, by the caller too.
//      `release` must wait for submitted writes to complete, not only to be submitted: the device reads the memory at
//      any time until it answers, and the caller overwrites that memory next. Fed blocks have no live memory.
//   4. A failed job prepares nothing more, and its staged writes are dropped; what is in flight is still waited for.
//   5. No deadlock, with one slot as with a hundred: composing a block needs only memory, feeding one needs only
//      copies that always end, and staged writes go out before any new block is prepared. As long as the devices
//      answer, every slot comes back, and a job that waits for one waits only for copies and writes, its own or another
//      job's. No holder of a slot ever waits for a second one.
//   6. `start` and `release` go before feeders, because they hold up a training.
//
// Locks: one mutex guards the queue, the pool, what is to be hashed and the fields of jobs marked (queue). One
// condition variable tells of every change to them, another one of the end of a job, and one of what can be hashed.
// Hashing and copying run without the mutex. No other lock is taken while it is held, and nobody holds the GIL while
// waiting for it to change: backend threads call only into this class and never take the GIL, so a Python thread that
// waits here can't be what they wait for.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "writer/queue/hashing_work.hpp"
#include "writer/queue/job.hpp"
#include "writer/queue/staging_pool.hpp"

namespace dsh {

// The stats of one job, as the users of a writer see them; `direct` is 1 for O_DIRECT, 0 for buffered.
struct WriteStats {
    double bytes_direct, bytes_copied, write_s, stall_s, eager_s, direct;
};

// A user's thread calls this now and then while it waits, without the mutex. It may throw, which ends the wait.
using CheckInterrupt = std::function<void()>;

class WriteQueue {
  public:
    WriteQueue(std::uint64_t budget_bytes, std::uint64_t block_bytes)
        : staging_(budget_bytes, block_bytes), block_bytes_(block_bytes) {}

    // For users' threads.
    // Create the file, copy the eager extents into slots, and open the job for the backend. Throws IoError when there
    // can be no file, std::runtime_error when the queue is stopped; later failures are the job's. What `interrupt`
    // throws leaves no job and no file.
    std::shared_ptr<WriteJob> start(std::shared_ptr<const WritePlan> plan, std::string path,
                                    std::shared_ptr<Faults> faults, const CheckInterrupt &interrupt = {});
    // The barrier. Returns the seconds waited; never throws for a failed job. After what `interrupt` throws the barrier
    // is not passed, and the job goes on as if this had not been called.
    double release(const std::shared_ptr<WriteJob> &job, const CheckInterrupt &interrupt = {});
    bool released(const WriteJob &job);
    // True once all data bytes are written, false on timeout (negative: none). Throws the job's IoError.
    bool wait(const WriteJob &job, double timeout_s);
    // Fail the job unless it has failed already, and wait until nothing of it is pending.
    void fail(const std::shared_ptr<WriteJob> &job, IoError error);
    // Throws IoError when the job has failed, std::logic_error when its data is not all written.
    void require_written(const WriteJob &job);
    WriteStats stats(WriteJob &job);
    std::uint64_t free_bytes();
    // The number of threads in `start` and `release` that wait for a slot now.
    std::size_t urgent();
    // Fail what is not prepared yet, and let the backend's threads end once the pending writes are done.
    void stop();
    // Give the budget back to the host. Only when the queue is stopped and the backend's threads have ended.
    void drop_staging();

    // For the backend's threads.
    // The next write; nothing when there is none now (wait = false) or there will be none any more.
    std::optional<Write> next(bool wait);
    // Hash some live memory, or a part of a fed block. False when there is none that can be now (wait = false) or there
    // will be none any more. For the hashing threads.
    bool hash_next(bool wait);
    // The device is done with the write's bytes; `code` is 0 or errno. Exactly once for each write.
    void completed(Write &&write, int code);

    StagingPool &staging() { return staging_; }
    std::uint64_t block_bytes() const { return block_bytes_; }

  private:
    friend class FeedLender;
    using Lock = std::unique_lock<std::mutex>;

    std::optional<Write> pop_staged();
    void hash(HashingWork::Item &item, Lock &lock);
    void settle(WriteJob &job);
    void tell(WriteJob &job);
    void look_for(const CheckInterrupt &interrupt, Lock &lock);
    std::optional<Write> prepare_lazily(Lock &lock);
    template <class Ready> void wait_for(Lock &lock, const CheckInterrupt &interrupt, Ready ready);
    bool stage_next(const std::shared_ptr<WriteJob> &job, Lock &lock, const CheckInterrupt &interrupt);
    std::optional<Write> prepare(const std::shared_ptr<WriteJob> &job, std::optional<Slot> slot, Lock &lock);
    void fail_locked(WriteJob &job, IoError error);
    void forget_prepared();

    StagingPool staging_;
    std::uint64_t block_bytes_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::condition_variable ended_; // a job has settled
    std::deque<Write> staged_;      // composed in slots, not yet taken by the backend
    HashingWork hashing_;
    std::deque<std::shared_ptr<WriteJob>> open_; // jobs with blocks to prepare, oldest first
    std::size_t urgent_ = 0;                     // threads in `start` and `release` that wait for a slot
    bool stopping_ = false;
};

} // namespace dsh
