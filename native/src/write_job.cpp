#include "write_job.hpp"

#include <cstring>

namespace dsh {

WriteJob::WriteJob(std::shared_ptr<const WritePlan> plan, std::vector<Block> blocks, std::string path,
                   std::shared_ptr<Faults> faults)
    : plan_(std::move(plan)), blocks_(std::move(blocks)),
      file_(std::move(path), plan_->data_end(), plan_->align(), std::move(faults)),
      digests_(plan_->extents().size(), checksum(nullptr, 0)) {}

void WriteJob::hash_live() {
    const auto *source = reinterpret_cast<const std::byte *>(block().source);
    each_piece(plan_->extents(), block(),
               [&](std::size_t extent, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
                   hash_piece(extent, position, source + at, nbytes);
               });
}

void WriteJob::compose(std::byte *destination) {
    const std::vector<Extent> &extents = plan_->extents();
    std::uint64_t filled = 0;
    each_piece(extents, block(),
               [&](std::size_t extent, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
                   std::memset(destination + filled, 0, at - filled);
                   std::memcpy(destination + at,
                               reinterpret_cast<const std::byte *>(extents[extent].address) + position, nbytes);
                   hash_piece(extent, position, destination + at, nbytes);
                   filled = at + nbytes;
               });
    std::memset(destination + filled, 0, block().nbytes - filled);
}

void WriteJob::hash_piece(std::size_t extent, std::uint64_t position, const std::byte *data, std::uint64_t nbytes) {
    const std::uint64_t whole = plan_->extents()[extent].nbytes;
    if (nbytes == whole) {
        digests_[extent] = checksum(data, nbytes);
        return;
    }
    if (position == 0) {
        running_.reset();
    }
    running_.update(data, nbytes);
    if (position + nbytes == whole) {
        digests_[extent] = running_.digest();
    }
}

} // namespace dsh
