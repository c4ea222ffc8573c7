// The heart of the writer: decides what is written next, and keeps the promise of the barrier.
//
// Invariants
//   1. Blocks of a job are prepared in file order, by one thread at a time (`busy`).
//   2. A slot is held only while its block is being composed, filled by its feeder, queued or in flight. Composing
//   needs
//      nothing but memory, a feeder nothing but copies that always end, and queued blocks go out before any new block
//      is prepared; so as long as the devices answer, every slot comes back, and a job that waits for one waits for
//      copies and writes only, its own or another job's. No holder of a slot ever waits for a second one: a feeder that
//      has one is told at once that there is no other. Hence no deadlock, with one slot as with a hundred.
//   3. After `release`, no thread reads, and no request in flight refers to, live memory of that job. Fed blocks have
//      none.
//   4. A failed job prepares nothing more, and its queued blocks are dropped; what is in flight is still waited for. A
//      slot that its feeder holds is nobody else's until the feeder gives it back, for a copy may still write into it.
//   5. A feeder takes no slot while `start` or `release` waits for one: those hold up a training.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "writer/job.hpp"
#include "writer/staging_pool.hpp"

namespace dsh {

struct WriteStats {
    double bytes_direct, bytes_copied, write_s, stall_s, eager_s, direct;
};

class WriteQueue {
  public:
    WriteQueue(std::uint64_t budget_bytes, std::uint64_t block_bytes)
        : staging_(budget_bytes, block_bytes), block_bytes_(block_bytes) {}

    // For users' threads.
    std::shared_ptr<WriteJob> start(std::shared_ptr<const WritePlan> plan, std::string path,
                                    std::shared_ptr<Faults> faults);
    double release(const std::shared_ptr<WriteJob> &job);
    bool released(const WriteJob &job);
    // False on timeout (negative: none); throws the job's IoError.
    bool wait(const WriteJob &job, double timeout_s);
    void fail(const std::shared_ptr<WriteJob> &job, IoError error);
    // Throws IoError when the job has failed, std::logic_error when its data is not all written.
    void require_written(const WriteJob &job);
    // The next fed block in file order, with a slot for its bytes. Nothing when all have been handed out; or when none
    // is free while the feeder holds another: only without one it waits. Throws the job's IoError.
    std::optional<Feed> feed_next(const std::shared_ptr<WriteJob> &job);
    // The slot is filled: hash it and queue its write; of a failed job it just comes back. In the order handed out,
    // else std::logic_error, and the feed is still the feeder's.
    void fed(const std::shared_ptr<WriteJob> &job, const Feed &feed);
    // Give the slot back unfilled, which fails the job.
    void drop(const std::shared_ptr<WriteJob> &job, const Feed &feed);
    WriteStats stats(WriteJob &job);
    std::uint64_t free_bytes();
    // How many threads in `start` and `release` wait for a slot now.
    std::size_t urgent();
    // No more writes are handed out once the pending ones are done; unblocks workers.
    void stop();
    // Give the budget back to the host: for a queue that is stopped and has no workers any more.
    void drop_staging();

    // For the backend's threads: the next write, or nothing when there is none (wait = false) or never will be.
    std::optional<Write> next(bool wait);
    void completed(Write &&write, int code);

    StagingPool &staging() { return staging_; }
    std::uint64_t block_bytes() const { return block_bytes_; }

  private:
    using Lock = std::unique_lock<std::mutex>;

    std::optional<Write> pop_staged();
    std::optional<Write> prepare_lazily(Lock &lock);
    bool stage_next(const std::shared_ptr<WriteJob> &job, Lock &lock);
    std::optional<Write> prepare(const std::shared_ptr<WriteJob> &job, std::optional<Slot> slot, Lock &lock);
    void fail_locked(WriteJob &job, IoError error);
    void forget_prepared();
    void give_back(WriteJob &job, const Feed &feed);

    StagingPool staging_;
    std::uint64_t block_bytes_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Write> staged_;
    std::deque<std::shared_ptr<WriteJob>> open_; // jobs with blocks to prepare, oldest first
    std::size_t urgent_ = 0;                     // threads in `start` and `release` that wait for a slot
    bool stopping_ = false;
};

} // namespace dsh
