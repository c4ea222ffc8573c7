#include "writer/file/plan.hpp"

#include <limits>
#include <span>
#include <stdexcept>
#include <string>

#include "base/memory/aligned_memory.hpp"

namespace dsh {

ExtentKinds count_kinds(std::span<const std::uint8_t> eager, std::span<const std::uint8_t> fed) {
    ExtentKinds kinds{};
    for (std::size_t i = 0; i < eager.size(); ++i) {
        const bool is_fed = !fed.empty() && fed[i] != 0;
        if (eager[i] != 0 && kinds.eager != i) {
            throw std::invalid_argument("extent " + std::to_string(i) +
                                        " is eager but follows a lazy one: eager extents come first");
        }
        if (eager[i] != 0 && is_fed) {
            throw std::invalid_argument("extent " + std::to_string(i) + " is both eager and fed");
        }
        if (!is_fed && kinds.fed != 0) {
            throw std::invalid_argument("extent " + std::to_string(i) +
                                        " follows a fed one but is not: fed extents come last");
        }
        kinds.eager += eager[i] != 0 ? 1 : 0;
        kinds.fed += is_fed ? 1 : 0;
    }
    return kinds;
}

WritePlan::WritePlan(std::vector<Extent> extents, std::size_t eager_extents, std::size_t fed_extents,
                     std::uint64_t data_start, std::uint64_t data_end, std::uint64_t align)
    : extents_(std::move(extents)), eager_extents_(eager_extents), fed_extents_(fed_extents), data_start_(data_start),
      data_end_(data_end), align_(align), fed_start_(data_end) {
    if (align == 0 || (align & (align - 1)) != 0) {
        throw std::invalid_argument("align must be a power of two, not " + std::to_string(align));
    }
    if (data_start % align != 0 || data_end % align != 0 || data_end < data_start) {
        throw std::invalid_argument("data_start " + std::to_string(data_start) + " and data_end " +
                                    std::to_string(data_end) + " must be multiples of " + std::to_string(align) +
                                    ", in order");
    }
    const std::size_t first_fed = extents_.size() - fed_extents;
    std::uint64_t at = data_start;
    for (std::size_t i = 0; i < extents_.size(); ++i) {
        const Extent &extent = extents_[i];
        if (extent.offset < at || extent.end() > data_end || extent.end() < extent.offset) {
            throw std::invalid_argument("extent " + std::to_string(i) + " covers [" + std::to_string(extent.offset) +
                                        ", " + std::to_string(extent.end()) + "), outside of what is free: [" +
                                        std::to_string(at) + ", " + std::to_string(data_end) + ")");
        }
        if (i < first_fed) {
            require_memory(i, extent);
        } else if (i == first_fed) {
            fed_start_ = round_down(extent.offset, align);
            if (fed_start_ < at) {
                throw std::invalid_argument("extent " + std::to_string(i) + " is the first fed one, but at " +
                                            std::to_string(extent.offset) + " it shares a page with one before");
            }
        }
        at = extent.end();
        total_bytes_ += extent.nbytes;
    }
}

std::vector<Block> WritePlan::blocks(std::uint64_t block_bytes) const {
    Cutting how{.align = align_,
                .block_bytes = block_bytes,
                .max_gap_bytes = std::numeric_limits<std::uint64_t>::max(),
                .gathered_extents = eager_extents_};
    const std::span<const Extent> all(extents_);
    std::vector<Block> blocks = cut(all.first(all.size() - fed_extents_), data_start_, fed_start_, how);
    how.gathered_extents = all.size();
    const std::vector<Block> fed = cut(all, fed_start_, data_end_, how);
    blocks.insert(blocks.end(), fed.begin(), fed.end());
    return blocks;
}

std::uint64_t WritePlan::direct_bytes() const {
    std::uint64_t sum = 0;
    for (const Block &block : blocks(std::uint64_t{1} << 40)) {
        sum += block.direct() ? block.nbytes : 0;
    }
    return sum;
}

} // namespace dsh
