// The plan of one file: which bytes of memory stand at which offsets. Immutable, and shared by every job that writes
// the file as long as no address changes.
//
// Congruent placement: a plan's author gives a large lazy extent an offset that is congruent to its address modulo
// `align`. A direct write needs an aligned address and an aligned offset at once, and only under this condition does
// every aligned offset in the extent fall on an aligned address; otherwise all of it would have to be copied. The plan
// does not demand congruence: the interior of a congruent run is written straight from its memory, its unaligned edges
// and all other bytes are copied through slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "blocks/cutting.hpp"

namespace dsh {

struct ExtentKinds {
    std::size_t eager;
    std::size_t fed;
};

// Count the extents marked eager and fed; an empty `fed` marks none. Throws std::invalid_argument naming the extent
// unless the eager ones come first and the fed ones last.
ExtentKinds count_kinds(std::span<const std::uint8_t> eager, std::span<const std::uint8_t> fed);

class WritePlan : public std::enable_shared_from_this<WritePlan> {
  public:
    // The first `eager_extents` are eager: they come first, so that checksums are fed in file order although eager
    // bytes are copied first. The last `fed_extents` are fed: their bytes come from a feeder, their addresses mean
    // nothing. Throws std::invalid_argument naming the extent when they are unsorted, overlap, leave [data_start,
    // data_end), or when the fed ones share a page (of `align`) with another, for such a page would have two sources.
    WritePlan(std::vector<Extent> extents, std::size_t eager_extents, std::size_t fed_extents, std::uint64_t data_start,
              std::uint64_t data_end, std::uint64_t align);

    // Cut the file into blocks. Direct blocks are written straight from their memory, by O_DIRECT where the file system
    // has it, buffered otherwise. The blocks from `fed_start` on are fed, and no other has a byte of a fed extent.
    std::vector<Block> blocks(std::uint64_t block_bytes) const;

    const std::vector<Extent> &extents() const { return extents_; }
    std::size_t eager_extents() const { return eager_extents_; }
    std::size_t fed_extents() const { return fed_extents_; }
    std::uint64_t fed_start() const { return fed_start_; }
    std::uint64_t data_start() const { return data_start_; }
    std::uint64_t data_end() const { return data_end_; }
    std::uint64_t align() const { return align_; }
    std::uint64_t total_bytes() const { return total_bytes_; }
    // Bytes that no slot is needed for.
    std::uint64_t direct_bytes() const;

  private:
    std::vector<Extent> extents_;
    std::size_t eager_extents_;
    std::size_t fed_extents_;
    std::uint64_t data_start_;
    std::uint64_t data_end_;
    std::uint64_t align_;
    std::uint64_t fed_start_;
    std::uint64_t total_bytes_ = 0;
};

} // namespace dsh
