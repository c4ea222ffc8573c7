// Fed blocks: lent to a feeder with a slot for their bytes, and taken back filled.
//
// A feeder is whoever copies bytes that are not in this process's memory, such as those of an accelerator. A fed block
// passes through two states, strictly in file order: lent (its slot belongs to the feeder), and pending, when it is
// hashed and written side by side and the slot comes back after both. Invariants:
//   1. A feeder that holds a slot never waits for a second one: it learns at once that none is free, and so goes on to
//      fill and return the one it has. Without this, two feeders with one slot each could wait for each other.
//   2. A feeder gets no slot while `start` or `release` waits for one, because those hold up a training.
//   3. The slot of a lent block belongs to its feeder until it is given back, also when the job has failed or the
//      writer is closed, because a copy may still be writing into it.
// The state of the blocks is kept in the job and the slots in the queue, both guarded by the queue's mutex: this class
// is the part of the write queue that feeders call.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include "writer/queue/staging_pool.hpp"

namespace dsh {

class WriteJob;
class WriteQueue;

// A block on loan to its feeder.
struct Feed {
    std::size_t index; // of the block in the job
    Slot slot;
};

class FeedLender {
  public:
    explicit FeedLender(WriteQueue &queue) : queue_(queue) {}

    // Lend the next fed block in file order, with a slot for its bytes. Nothing when all have been lent, or when no
    // slot is free while the feeder holds another; without one it waits. Throws the job's IoError.
    std::optional<Feed> next(const std::shared_ptr<WriteJob> &job);
    // Take a filled block back: queue its write and its hashing; when the job has failed, only its slot comes back.
    // Never waits. Throws std::logic_error unless blocks come back in the order lent, and the feed is then still the
    // feeder's.
    void fed(const std::shared_ptr<WriteJob> &job, const Feed &feed);
    // Take a block back unfilled, which fails the job.
    void drop(const std::shared_ptr<WriteJob> &job, const Feed &feed);

  private:
    void give_back(WriteJob &job, const Feed &feed);

    WriteQueue &queue_;
};

} // namespace dsh
