#include "blocks/cutting.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "base/memory/aligned_memory.hpp"

namespace dsh {
namespace {

struct Range {
    std::uint64_t begin;
    std::uint64_t end;
    std::uint64_t source;
};

// Return the aligned interiors of all memory runs that may be direct, in file order.
std::vector<Range> direct_ranges(std::span<const Extent> extents, const Cutting &how) {
    std::vector<Range> ranges;
    std::size_t i = how.gathered_extents;
    while (i < extents.size()) {
        const Extent &first = extents[i];
        std::uint64_t end = first.end();
        std::size_t next = i + 1;
        // An empty extent has no address that means anything: it starts no run and breaks none.
        while (first.nbytes != 0 && next < extents.size() &&
               (extents[next].nbytes == 0 ||
                (extents[next].offset == end && extents[next].address - first.address == end - first.offset))) {
            end += extents[next].nbytes;
            ++next;
        }
        const bool congruent = first.address % how.align == first.offset % how.align;
        if (congruent && end - first.offset >= how.min_direct_bytes) {
            const std::uint64_t from = round_up(first.offset, how.align);
            const std::uint64_t to = round_down(end, how.align);
            if (from < to) {
                ranges.push_back({from, to, first.address + (from - first.offset)});
            }
        }
        i = next;
    }
    return ranges;
}

class Cutter {
  public:
    Cutter(std::span<const Extent> extents, const Cutting &how) : extents_(extents), how_(how) {}

    void gather(std::uint64_t begin, std::uint64_t end) {
        if (how_.max_gap_bytes == std::numeric_limits<std::uint64_t>::max()) {
            pieces(begin, end, 0);
            return;
        }
        // Walk the extents inside and merge those whose aligned surroundings are no further apart than the gap allowed.
        std::uint64_t from = 0;
        std::uint64_t to = 0;
        for (std::size_t i = first_reaching(begin); i < extents_.size() && extents_[i].offset < end; ++i) {
            if (extents_[i].nbytes == 0) {
                continue;
            }
            const std::uint64_t lower = std::max(begin, round_down(extents_[i].offset, how_.align));
            const std::uint64_t upper = std::min(end, round_up(extents_[i].end(), how_.align));
            if (to != 0 && lower <= to + how_.max_gap_bytes) {
                to = std::max(to, upper);
                continue;
            }
            if (to != 0) {
                pieces(from, to, 0);
            }
            from = lower;
            to = upper;
        }
        if (to != 0) {
            pieces(from, to, 0);
        }
    }

    void pieces(std::uint64_t begin, std::uint64_t end, std::uint64_t source) {
        for (std::uint64_t at = begin; at < end;) {
            const std::uint64_t nbytes = std::min(how_.block_bytes, end - at);
            blocks.push_back({at, nbytes, source == 0 ? 0 : source + (at - begin), first_reaching(at)});
            at += nbytes;
        }
    }

    std::vector<Block> blocks;

  private:
    // Return the first extent that ends after `offset`. Offsets grow from call to call, so the search goes on where it
    // stopped.
    std::size_t first_reaching(std::uint64_t offset) {
        while (reached_ < extents_.size() && extents_[reached_].end() <= offset) {
            ++reached_;
        }
        return reached_;
    }

    std::span<const Extent> extents_;
    const Cutting &how_;
    std::size_t reached_ = 0;
};

} // namespace

void require_memory(std::size_t index, const Extent &extent) {
    if (extent.nbytes != 0 && (extent.address == 0 || extent.address + extent.nbytes < extent.address)) {
        throw std::invalid_argument("extent " + std::to_string(index) + " has " + std::to_string(extent.nbytes) +
                                    " bytes at address " + std::to_string(extent.address) + ", where no memory can be");
    }
}

std::vector<Block> cut(std::span<const Extent> extents, std::uint64_t begin, std::uint64_t end, const Cutting &how) {
    Cutter cutter(extents, how);
    std::uint64_t at = begin;
    for (const Range &range : direct_ranges(extents, how)) {
        if (range.begin > at) {
            cutter.gather(at, range.begin);
        }
        cutter.pieces(range.begin, range.end, range.source);
        at = range.end;
    }
    if (at < end) {
        cutter.gather(at, end);
    }
    return std::move(cutter.blocks);
}

} // namespace dsh
