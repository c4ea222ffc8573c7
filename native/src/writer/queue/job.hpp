// One file on its way to the disk: the blocks still to be prepared, their checksums, and what is pending.
//
// A block is *prepared* (copied into a slot unless it is direct), then *pending* (queued or in flight), then written.
// The blocks of a job are of two kinds:
//   - live blocks come first; their bytes are in the memory of the plan's extents. They are prepared strictly in file
//     order by one holder of `busy` at a time. What is not copied is hashed beside that, from the start of the job on
//     (live_checksums.hpp).
//   - fed blocks follow; a feeder fills them (feed.hpp). They are hashed by several threads while they are pending
//     (fed_checksums.hpp).
//
// Fields marked (queue) are guarded by the write queue's mutex; the rest belongs to the holder of `busy`. It is a flag
// rather than a mutex, so that a thread hashes and copies without the queue's mutex, and whoever waits for the flag
// waits on the queue's condition variable together with everything else.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/files/io_error.hpp"
#include "base/memory/mapped_memory.hpp"
#include "blocks/cutting.hpp"
#include "writer/file/output_file.hpp"
#include "writer/file/plan.hpp"
#include "writer/queue/fed_checksums.hpp"
#include "writer/queue/feed.hpp"
#include "writer/queue/live_checksums.hpp"
#include "writer/queue/staging_pool.hpp"

namespace dsh {

class WriteJob;

// One block's bytes, ready for the device. They stay where they are until `WriteQueue::completed`.
struct Write {
    std::shared_ptr<WriteJob> job;
    const std::byte *data;
    std::uint64_t offset;
    std::uint64_t nbytes;
    std::optional<Slot> slot; // none when the device reads live memory
};

class WriteJob {
  public:
    // Creates and preallocates the file. Throws IoError, and leaves no file behind when it does.
    WriteJob(std::shared_ptr<const WritePlan> plan, std::vector<Block> blocks, std::string path,
             std::shared_ptr<Faults> faults);

    const Block &block() const { return blocks_[next]; }
    const Block &block(std::size_t index) const { return blocks_[index]; }
    // Nothing of live memory is left to prepare.
    bool live_prepared() const { return next == live_blocks_; }
    bool all_lent() const { return next_lent == blocks_.size(); }
    bool prepared() const { return live_prepared() && next_fed == blocks_.size(); }
    bool eager_block() const { return !live_prepared() && block().first_extent < plan_->eager_extents(); }
    // Every block is written and hashed, or the job has failed and nothing of it is pending.
    bool settled() const {
        return pending == 0 && unhashed == 0 && live_unhashed == 0 && !busy && (prepared() || error);
    }

    // What is to be hashed where it is. Both `hash` and `compose` throw IoError (EFAULT) when memory of the plan is no
    // longer mapped: a tensor that was freed too early fails the job, not the process. Neither reads the plan's memory
    // itself, for that memory may go at any instruction.
    std::vector<LiveChecksums::Portion> portions() const { return live_checksums_.portions(); }
    // Hash some more of a portion.
    void hash(LiveChecksums::Portion &portion);
    // Compose the next block in a slot (gaps become zeros); hash there what is in no portion.
    void compose(std::byte *destination);
    // Make the gaps of a block that its feeder has filled zeros.
    void zero_gaps(const Feed &feed) const;
    FedChecksums &fed_checksums() { return fed_checksums_; }
    // What the failure of a write means.
    IoError failure(const Write &write, int code) const;

    // Where the next bytes behind the planned ones go: data_end, or the end of the last appendix.
    std::uint64_t end();
    void set_end(std::uint64_t end);
    // Write bytes of a buffer that is aligned in every way. Throws IoError, ECANCELED once the file is gone or sealed.
    void write_behind(const std::byte *data, std::uint64_t offset, std::uint64_t nbytes);
    // Write the header, and the trailer at the end; cut the file there, fdatasync and close it; returns its size in
    // bytes. Throws std::logic_error when finished already, IoError when a write fails.
    std::uint64_t finish(std::string_view header, std::string_view trailer);
    // Close and unlink the file, unless it is finished.
    void discard();
    bool finished();

    const WritePlan &plan() const { return *plan_; }
    OutputFile &file() { return file_; }
    const std::string &path() const { return file_.path(); }
    // One for each extent, in plan order. Only when the job is settled without an error.
    std::vector<Digest> digests() const;

    std::size_t next = 0;           // (queue) the live block to prepare next
    bool busy = false;              // (queue) a thread prepares it
    std::size_t next_lent;          // (queue) the fed block to lend next
    std::size_t next_fed;           // (queue) the fed block to take back next
    std::size_t lent = 0;           // (queue) slots that the feeder holds
    std::size_t unhashed = 0;       // (queue) parts of fed blocks that are not hashed yet
    bool releasing = false;         // (queue) nothing more goes straight from live memory
    std::size_t pending = 0;        // (queue) blocks queued or in flight
    std::size_t live_pending = 0;   // (queue) those among them that the device reads from live memory
    std::size_t live_unhashed = 0;  // (queue) portions of live memory that are not hashed yet
    std::optional<IoError> error;   // (queue) the first failure; a failed job prepares nothing more
    std::uint64_t bytes_direct = 0; // (queue) written from live memory
    std::uint64_t bytes_copied = 0; // (queue) written from slots
    double stall_s = 0;             // (queue) time that `release` waited
    double eager_s = 0;             // (queue) time that `start` took
    double write_s = 0;             // (queue) from start to the last data byte
    std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();

  private:
    // Pieces of extents that are copied together.
    struct Copies {
        struct Origin {
            std::size_t extent;
            std::uint64_t position; // in the extent
        };
        std::vector<CopiedRegion> regions;
        std::vector<Origin> origins;
        std::uint64_t nbytes = 0;

        void add(std::size_t extent, std::uint64_t position, const CopiedRegion &region) {
            regions.push_back(region);
            origins.push_back({extent, position});
            nbytes += region.from.nbytes;
        }
        bool full() const { return nbytes == cached_bytes; }
    };

    void copy_and_hash(Copies &copies);
    IoError unreadable(std::size_t extent, int code) const;

    std::shared_ptr<const WritePlan> plan_;
    std::vector<Block> blocks_;
    std::size_t live_blocks_;
    OutputFile file_;
    LiveChecksums live_checksums_;
    FedChecksums fed_checksums_;
    // One caller at a time appends to, finishes or discards the file; never taken together with the queue's mutex.
    std::mutex ends_;
    std::uint64_t end_;
    bool finished_ = false;
};

} // namespace dsh
