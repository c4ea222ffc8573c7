#include "writer/queue/fed_checksums.hpp"

namespace dsh {
namespace {

// The extent that began before the block and has bytes in it, if there is one. Only a block's first extent can be.
bool continues(const Extent &extent, const Block &block) {
    return extent.offset < block.offset && extent.end() > block.offset;
}

} // namespace

FedChecksums::FedChecksums(const std::vector<Extent> &extents, std::size_t fed)
    : extents_(extents), first_(extents.size() - fed), values_(fed, checksum(nullptr, 0)) {}

std::vector<FedChecksums::Part> FedChecksums::parts(const Block &block, const std::byte *data) const {
    bool continued = false;
    bool own = false;
    each_piece(extents_, block, [&](std::size_t extent, std::uint64_t, std::uint64_t, std::uint64_t) {
        (continues(extents_[extent], block) ? continued : own) = true;
    });
    std::vector<Part> found;
    if (continued) {
        found.push_back({&block, data, true});
    }
    if (own) {
        found.push_back({&block, data, false});
    }
    return found;
}

bool FedChecksums::ready(const Part &part) const {
    if (!part.continued) {
        return true;
    }
    const std::size_t extent = part.block->first_extent;
    const auto before = unfinished_.find(extent);
    return before != unfinished_.end() && before->second.position == part.block->offset - extents_[extent].offset;
}

std::optional<RunningChecksum> FedChecksums::begin(const Part &part) {
    if (!part.continued) {
        return std::nullopt;
    }
    return unfinished_.extract(part.block->first_extent).mapped().running;
}

std::optional<FedChecksums::Unfinished> FedChecksums::hash(const Part &part, std::optional<RunningChecksum> before) {
    std::optional<Unfinished> unfinished;
    each_piece(extents_, *part.block,
               [&](std::size_t extent, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
                   if (continues(extents_[extent], *part.block) != part.continued) {
                       return;
                   }
                   if (nbytes == extents_[extent].nbytes) {
                       values_[extent - first_] = checksum(part.data + at, nbytes);
                       return;
                   }
                   RunningChecksum running = part.continued ? *before : RunningChecksum();
                   running.add(part.data + at, nbytes);
                   if (position + nbytes == extents_[extent].nbytes) {
                       values_[extent - first_] = running.end();
                   } else {
                       unfinished = Unfinished{extent, position + nbytes, running};
                   }
               });
    return unfinished;
}

void FedChecksums::end(std::optional<Unfinished> unfinished) {
    if (unfinished) {
        const std::size_t extent = unfinished->extent;
        unfinished_.emplace(extent, std::move(*unfinished));
    }
}

} // namespace dsh
