// What is to be hashed, of all jobs: portions of live memory, and parts of fed blocks.
//
// The mutex of the write queue guards it, and is held by whoever calls it. Hashing threads wait here and not with the
// rest of the queue, so that they are woken by what can be hashed and not by each block that is written: a thread that
// wakes takes a core from the training each time.
//
// A portion whose job is at its barrier goes first, because it holds up a training. Otherwise portions and parts are
// taken in turn: a part keeps a slot, for which its feeder may be waiting until all live memory is hashed.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include <vector>

#include "base/files/io_error.hpp"
#include "writer/queue/fed_checksums.hpp"
#include "writer/queue/live_checksums.hpp"
#include "writer/queue/staging_pool.hpp"

namespace dsh {

class WriteJob;

class HashingWork {
  public:
    using Lock = std::unique_lock<std::mutex>;

    // A portion of a job's live memory.
    struct Portion {
        std::shared_ptr<WriteJob> job;
        LiveChecksums::Portion portion;
    };

    // A part of a fed block, and the slot that it keeps lent until it is hashed.
    struct Part {
        std::shared_ptr<WriteJob> job;
        FedChecksums::Part part;
        Slot slot;
    };

    using Item = std::variant<Portion, Part>;

    // The outcome of a turn: what went wrong; the slot that the item does not keep any more; whether it has ended.
    struct Turn {
        std::optional<IoError> error;
        std::optional<Slot> slot;
        bool ended = true;
    };

    void add(const std::shared_ptr<WriteJob> &job, std::vector<LiveChecksums::Portion> portions);
    void add(const std::shared_ptr<WriteJob> &job, const FedChecksums::Part &part, const Slot &slot);
    // Forget the portions of a failed job. Its parts stay until `take` lets them go; none is hashed any more.
    void forget(WriteJob &job);

    // Return something that can be hashed now, for `hash`; or, of a failed job, something that can be let go.
    std::optional<Item> take();
    // Return a portion of one job.
    std::optional<Item> take_portion(const WriteJob &job);
    // Hash a part, or some of a portion, without the mutex; put back what is left of the portion. Of a failed job
    // nothing is read any more.
    Turn hash(Item &item, Lock &lock);

    // True when nothing is left, nor held by a thread that may put some of it back.
    bool empty() const { return portions_.empty() && held_ == 0 && parts_.empty(); }
    // Wait until something has come that may be hashed, or nothing will come any more.
    void wait(Lock &lock) { changed_.wait(lock); }
    // Say that nothing is added any more: threads end with the last of what is there.
    void end();
    // Wake a thread for what another one has left.
    void wake() { changed_.notify_one(); }

  private:
    std::optional<Item> take_part();
    template <class Wanted> std::optional<Item> take_portion_if(Wanted wanted);
    void tell_end();
    Turn hash(Portion &taken, Lock &lock);
    Turn hash(Part &taken, Lock &lock);

    std::deque<Portion> portions_; // oldest job first
    std::deque<Part> parts_;       // in the order in which they were fed
    std::size_t held_ = 0;         // portions that threads hash now
    bool part_is_next_ = false;
    bool ending_ = false;
    std::condition_variable changed_;
};

} // namespace dsh
