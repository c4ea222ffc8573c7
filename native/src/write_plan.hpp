// Where the bytes of one file come from: immutable, shared by every job that writes it while no address moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "blocks.hpp"

namespace dsh {

class WritePlan : public std::enable_shared_from_this<WritePlan> {
  public:
    static constexpr std::uint64_t min_direct_bytes = 1 << 20;

    // Throws std::invalid_argument naming the extent when they are unsorted, overlap, leave [data_start, data_end) or
    // an eager extent follows a lazy one: eager extents come first, so that checksums can be fed in file order although
    // eager bytes are copied first.
    WritePlan(std::vector<Extent> extents, std::size_t eager_extents, std::uint64_t data_start, std::uint64_t data_end,
              std::uint64_t align);

    // Direct blocks are written straight from their source, by O_DIRECT where the file system has it, buffered
    // otherwise.
    std::vector<Block> blocks(std::uint64_t block_bytes) const;

    const std::vector<Extent> &extents() const { return extents_; }
    std::size_t eager_extents() const { return eager_extents_; }
    std::uint64_t data_start() const { return data_start_; }
    std::uint64_t data_end() const { return data_end_; }
    std::uint64_t align() const { return align_; }
    std::uint64_t total_bytes() const { return total_bytes_; }
    std::uint64_t direct_bytes() const;

  private:
    std::vector<Extent> extents_;
    std::size_t eager_extents_;
    std::uint64_t data_start_;
    std::uint64_t data_end_;
    std::uint64_t align_;
    std::uint64_t total_bytes_ = 0;
};

} // namespace dsh
