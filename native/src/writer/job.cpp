#include "writer/job.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/aligned_memory.hpp"
#include "base/mapped_memory.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t bounce_bytes = 1 << 20;

// Write `bytes` at `offset` through an aligned buffer; throws IoError.
void write_through_bounce(OutputFile &file, std::string_view bytes, std::uint64_t offset) {
    const std::uint64_t room = round_up(bounce_bytes, file.align());
    const AlignedMemory bounce = aligned_memory(file.align(), room);
    for (std::uint64_t at = 0; at < bytes.size();) {
        const std::uint64_t nbytes = std::min<std::uint64_t>(room, bytes.size() - at);
        std::memcpy(bounce.get(), bytes.data() + at, nbytes);
        const int code = file.write(bounce.get(), offset + at, nbytes);
        if (code != 0) {
            throw IoError("write of " + std::to_string(nbytes) + " bytes", file.path(), offset + at, code);
        }
        at += nbytes;
    }
}

std::size_t count_live(const std::vector<Block> &blocks, const WritePlan &plan) {
    const auto fed = [&](const Block &block) { return block.offset >= plan.fed_start(); };
    return static_cast<std::size_t>(std::ranges::find_if(blocks, fed) - blocks.begin());
}

} // namespace

WriteJob::WriteJob(std::shared_ptr<const WritePlan> plan, std::vector<Block> blocks, std::string path,
                   std::shared_ptr<Faults> faults)
    : plan_(std::move(plan)), blocks_(std::move(blocks)), live_blocks_(count_live(blocks_, *plan_)),
      file_(std::move(path), plan_->data_end(), plan_->align(), std::move(faults)),
      live_digests_(plan_->extents().size() - plan_->fed_extents()), fed_digests_(plan_->fed_extents()) {
    next_lent = next_fed = live_blocks_;
}

void WriteJob::hash_live() {
    const auto *source = reinterpret_cast<const std::byte *>(block().source);
    each_piece(plan_->extents(), block(),
               [&](std::size_t extent, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
                   require_mapped(extent, source + at, nbytes);
                   live_digests_.feed(extent, position, plan_->extents()[extent].nbytes, source + at, nbytes);
               });
}

void WriteJob::compose(std::byte *destination) {
    const std::vector<Extent> &extents = plan_->extents();
    std::uint64_t filled = 0;
    each_piece(extents, block(),
               [&](std::size_t extent, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
                   const auto *source = reinterpret_cast<const std::byte *>(extents[extent].address) + position;
                   require_mapped(extent, source, nbytes);
                   std::memset(destination + filled, 0, at - filled);
                   std::memcpy(destination + at, source, nbytes);
                   live_digests_.feed(extent, position, extents[extent].nbytes, destination + at, nbytes);
                   filled = at + nbytes;
               });
    std::memset(destination + filled, 0, block().nbytes - filled);
}

void WriteJob::hash_fed(const Feed &feed) {
    const std::vector<Extent> &extents = plan_->extents();
    const std::size_t first_fed = extents.size() - plan_->fed_extents();
    std::byte *data = feed.slot.data;
    std::uint64_t filled = 0;
    each_piece(extents, block(feed.index),
               [&](std::size_t extent, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
                   std::memset(data + filled, 0, at - filled);
                   fed_digests_.feed(extent - first_fed, position, extents[extent].nbytes, data + at, nbytes);
                   filled = at + nbytes;
               });
    std::memset(data + filled, 0, block(feed.index).nbytes - filled);
}

std::vector<Digest> WriteJob::digests() const {
    std::vector<Digest> all = live_digests_.values();
    all.insert(all.end(), fed_digests_.values().begin(), fed_digests_.values().end());
    return all;
}

std::uint64_t WriteJob::finish(std::string_view header, std::string_view trailer) {
    if (header.size() != plan_->data_start() || trailer.size() % plan_->align() != 0) {
        throw std::invalid_argument("the header must have " + std::to_string(plan_->data_start()) + " bytes, not " +
                                    std::to_string(header.size()) + ", and the trailer a multiple of " +
                                    std::to_string(plan_->align()) + ", not " + std::to_string(trailer.size()));
    }
    std::lock_guard lock(ends_);
    if (finished_) {
        throw std::logic_error("finished already: " + file_.path());
    }
    write_through_bounce(file_, trailer, plan_->data_end());
    write_through_bounce(file_, header, 0);
    const std::uint64_t nbytes = plan_->data_end() + trailer.size();
    file_.seal(nbytes);
    finished_ = true;
    return nbytes;
}

void WriteJob::discard() {
    std::lock_guard lock(ends_);
    file_.discard();
}

bool WriteJob::finished() {
    std::lock_guard lock(ends_);
    return finished_;
}

void WriteJob::require_mapped(std::size_t extent, const std::byte *data, std::uint64_t nbytes) const {
    if (!is_mapped(reinterpret_cast<std::uint64_t>(data), nbytes)) {
        throw IoError("reading the memory of extent " + std::to_string(extent) + ", which is no longer mapped,",
                      file_.path(), plan_->extents()[extent].offset, EFAULT);
    }
}

} // namespace dsh
