// Cuts a file's extents into blocks of input or output. Pure arithmetic, shared by the writer and the reader.
//
// Invariants: blocks are aligned, disjoint and sorted by offset. A *direct* block is wholly inside one memory run
// (extents that are neighbours both in memory and in the file) whose address is congruent to its offset modulo the
// alignment, so the device can use the memory itself: O_DIRECT wants the address and the offset aligned at once, and
// only a congruent run has a byte at which both are. The unaligned edges of such a run, and every other byte, belong to
// *gather* blocks, which are copied through aligned memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace dsh {

struct Extent {
    std::uint64_t offset;
    std::uint64_t address;
    std::uint64_t nbytes;

    std::uint64_t end() const { return offset + nbytes; }
};

// Throws std::invalid_argument when no memory can be at the extent's address.
void require_memory(std::size_t index, const Extent &extent);

struct Block {
    std::uint64_t offset;
    std::uint64_t nbytes;
    std::uint64_t source;     // address of a direct block's bytes; 0 for a gather block
    std::size_t first_extent; // the first extent that reaches into the block

    bool direct() const { return source != 0; }
    std::uint64_t end() const { return offset + nbytes; }
};

struct Cutting {
    std::uint64_t align;
    std::uint64_t block_bytes;
    std::uint64_t min_direct_bytes = 1 << 20; // shorter runs are gathered: many small requests cost more than one copy
    std::uint64_t max_gap_bytes;              // a gap between extents longer than this starts a new gather block
    std::size_t gathered_extents;             // the first so many extents are never direct
};

// Cut [begin, end), both aligned. Extents are sorted by offset, disjoint, and inside that range. Gaps up to
// max_gap_bytes become part of a gather block.
std::vector<Block> cut(std::span<const Extent> extents, std::uint64_t begin, std::uint64_t end, const Cutting &how);

// Call visit(index, extent_position, block_position, nbytes) for every non-empty piece of an extent inside the block,
// in order.
template <typename Visit> void each_piece(const std::vector<Extent> &extents, const Block &block, Visit visit) {
    for (std::size_t i = block.first_extent; i < extents.size() && extents[i].offset < block.end(); ++i) {
        const Extent &extent = extents[i];
        const std::uint64_t from = extent.offset > block.offset ? extent.offset : block.offset;
        const std::uint64_t to = extent.end() < block.end() ? extent.end() : block.end();
        if (from < to) {
            visit(i, from - extent.offset, from - block.offset, to - from);
        }
    }
}

} // namespace dsh
