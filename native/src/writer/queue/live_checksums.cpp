#include "writer/queue/live_checksums.hpp"

#include <algorithm>
#include <functional>

#include "base/memory/mapped_memory.hpp"

namespace dsh {
namespace {

// A thread hashes so many bytes before it looks whether they are still wanted: 1 to 2 ms.
constexpr std::uint64_t turn_bytes = 16 << 20;

} // namespace

LiveChecksums::LiveChecksums(std::span<const Extent> extents, std::span<const Block> blocks)
    : extents_(extents), in_portion_(extents.size()), hashed_(extents.size(), checksum(nullptr, 0)),
      copied_(extents.size()) {
    for (const Block &block : blocks) {
        for (std::size_t i = block.first_extent;
             block.direct() && i < extents.size() && extents[i].offset < block.end(); ++i) {
            in_portion_[i] = extents[i].nbytes != 0;
        }
    }
}

std::vector<LiveChecksums::Portion> LiveChecksums::portions() const {
    struct Range {
        std::size_t first;
        std::size_t last;
        std::uint64_t nbytes;
    };
    std::vector<Range> ranges;
    for (std::size_t i = 0; i < extents_.size(); ++i) {
        if (!in_portion_[i]) {
            continue;
        }
        if (ranges.empty() || ranges.back().last != i || ranges.back().nbytes >= turn_bytes) {
            ranges.push_back({i, i, 0});
        }
        ++ranges.back().last;
        ranges.back().nbytes += extents_[i].nbytes;
    }
    std::ranges::stable_sort(ranges, std::ranges::greater(), &Range::nbytes);
    std::vector<Portion> portions;
    for (const Range &range : ranges) {
        portions.push_back({.first = range.first, .last = range.last});
    }
    return portions;
}

int LiveChecksums::hash(Portion &portion) {
    for (std::uint64_t left = turn_bytes; left > 0 && !portion.done();) {
        const Extent &extent = extents_[portion.extent];
        const std::uint64_t nbytes = std::min(left, extent.nbytes - portion.position);
        const Region live{extent.address + portion.position, nbytes};
        if (const int code =
                feed_live(portion.digests, portion.extent - portion.first, portion.position, extent.nbytes, live)) {
            return code;
        }
        left -= nbytes;
        portion.position += nbytes;
        if (portion.position == extent.nbytes) {
            ++portion.extent;
            portion.position = 0;
        }
    }
    if (portion.done()) {
        std::ranges::copy(portion.digests.values(), hashed_.begin() + static_cast<std::ptrdiff_t>(portion.first));
    }
    return 0;
}

void LiveChecksums::copied(std::size_t extent, std::uint64_t position, const std::byte *data, std::uint64_t nbytes) {
    if (!in_portion_[extent]) {
        copied_.feed(extent, position, extents_[extent].nbytes, data, nbytes);
    }
}

std::vector<Digest> LiveChecksums::values() const {
    std::vector<Digest> all = copied_.values();
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (in_portion_[i]) {
            all[i] = hashed_[i];
        }
    }
    return all;
}

} // namespace dsh
