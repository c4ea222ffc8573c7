// One file on its way to the disk: which blocks are still to be prepared, their checksums, and what is pending.
//
// A block is *prepared* (its bytes hashed, and copied into a slot unless it is direct), then *pending* (queued or in
// flight), then done. Blocks are prepared strictly in file order by one holder of `busy` at a time, so one running
// checksum is enough. The blocks from `live_blocks` on are *fed*: handed out with a slot, filled by a feeder, and
// prepared, again strictly in file order, by one holder of `hashing` at a time; they have a running checksum of their
// own. Fields marked (queue) are guarded by the write queue's mutex; the rest belongs to the holder of `busy` or
// `hashing`.
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

#include "base/checksum.hpp"
#include "base/io_error.hpp"
#include "blocks/cutting.hpp"
#include "writer/output_file.hpp"
#include "writer/plan.hpp"
#include "writer/staging_pool.hpp"

namespace dsh {

class WriteJob;

// One block's bytes, ready for the device.
struct Write {
    std::shared_ptr<WriteJob> job;
    const std::byte *data;
    std::uint64_t offset;
    std::uint64_t nbytes;
    std::optional<Slot> slot; // empty when the bytes are read from live memory
};

// A fed block on loan to its feeder.
struct Feed {
    std::size_t index; // of the block
    Slot slot;
};

class WriteJob {
  public:
    WriteJob(std::shared_ptr<const WritePlan> plan, std::vector<Block> blocks, std::string path,
             std::shared_ptr<Faults> faults);

    const Block &block() const { return blocks_[next]; }
    const Block &block(std::size_t index) const { return blocks_[index]; }
    // Nothing of live memory is left to prepare.
    bool read() const { return next == live_blocks_; }
    bool all_handed_out() const { return next_out == blocks_.size(); }
    bool prepared() const { return read() && next_fed == blocks_.size(); }
    bool eager_block() const { return !read() && block().first_extent < plan_->eager_extents(); }

    // Hash the next block where it lies; only for direct blocks. Both throw IoError (EFAULT) when memory of the plan is
    // no longer mapped: a tensor that was freed under us fails the job, not the process.
    void hash_live();
    // Compose the next block in a slot (gaps become zeros) and hash it there.
    void compose(std::byte *destination);
    // Hash a block that its feeder has filled, where gaps become zeros.
    void hash_fed(const Feed &feed);

    // Throws std::logic_error when finished already, IoError when writing fails.
    std::uint64_t finish(std::string_view header, std::string_view tail);
    // Close and unlink, unless finished.
    void discard();
    bool finished();

    const WritePlan &plan() const { return *plan_; }
    OutputFile &file() { return file_; }
    const std::string &path() const { return file_.path(); }
    std::vector<Digest> digests() const;

    std::size_t next = 0;           // (queue) the live block to prepare next
    bool busy = false;              // (queue) somebody prepares it
    std::size_t next_out;           // (queue) the fed block to hand out next
    std::size_t next_fed;           // (queue) the fed block to prepare next
    std::size_t out = 0;            // (queue) slots that the feeder holds
    bool hashing = false;           // (queue) somebody prepares a fed block
    bool releasing = false;         // (queue) nothing more goes straight from live memory
    std::size_t pending = 0;        // (queue) blocks queued or in flight
    std::size_t live_pending = 0;   // (queue) of them, those the device reads from live memory
    std::optional<IoError> error;   // (queue) the first failure; a failed job prepares nothing more
    std::uint64_t bytes_direct = 0; // (queue)
    std::uint64_t bytes_copied = 0; // (queue)
    double stall_s = 0;             // (queue) what `release` waited
    double eager_s = 0;             // (queue) what `start` took
    double write_s = 0;             // (queue) from start to the last data byte
    std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();

    bool settled() const { return pending == 0 && !busy && (prepared() || error); }

  private:
    void require_mapped(std::size_t extent, const std::byte *data, std::uint64_t nbytes) const;

    std::shared_ptr<const WritePlan> plan_;
    std::vector<Block> blocks_;
    std::size_t live_blocks_;
    OutputFile file_;
    Digests live_digests_;
    Digests fed_digests_;
    std::mutex ends_; // one caller at a time finishes or discards the file
    bool finished_ = false;
};

} // namespace dsh
