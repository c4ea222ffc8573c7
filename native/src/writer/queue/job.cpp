#include "writer/queue/job.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/memory/aligned_memory.hpp"
#include "base/memory/mapped_memory.hpp"

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
      live_checksums_(std::span(plan_->extents()).first(plan_->extents().size() - plan_->fed_extents()),
                      std::span(blocks_).first(live_blocks_)),
      fed_checksums_(plan_->extents(), plan_->fed_extents()), end_(plan_->data_end()) {
    next_lent = next_fed = live_blocks_;
}

void WriteJob::hash(LiveChecksums::Portion &portion) {
    if (const int code = live_checksums_.hash(portion)) {
        throw unreadable(portion.extent, code);
    }
}

void WriteJob::compose(std::byte *destination) {
    const std::vector<Extent> &extents = plan_->extents();
    std::uint64_t filled = 0;
    Copies copies;
    each_piece(extents, block(),
               [&](std::size_t extent, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
                   std::memset(destination + filled, 0, at - filled);
                   for (std::uint64_t done = 0; done < nbytes;) {
                       const std::uint64_t piece = std::min(cached_bytes - copies.nbytes, nbytes - done);
                       copies.add(extent, position + done,
                                  {destination + at + done, {extents[extent].address + position + done, piece}});
                       done += piece;
                       if (copies.full()) {
                           copy_and_hash(copies);
                       }
                   }
                   filled = at + nbytes;
               });
    copy_and_hash(copies);
    std::memset(destination + filled, 0, block().nbytes - filled);
}

// Many small extents are copied by one call of the kernel, and hashed while they are in the cache.
void WriteJob::copy_and_hash(Copies &copies) {
    if (const auto failure = copy_memory(copies.regions)) {
        throw unreadable(copies.origins[failure->index].extent, failure->code);
    }
    for (std::size_t i = 0; i < copies.regions.size(); ++i) {
        const auto [extent, position] = copies.origins[i];
        live_checksums_.copied(extent, position, copies.regions[i].into, copies.regions[i].from.nbytes);
    }
    copies = {};
}

void WriteJob::zero_gaps(const Feed &feed) const {
    std::byte *data = feed.slot.data;
    std::uint64_t filled = 0;
    each_piece(plan_->extents(), block(feed.index),
               [&](std::size_t, std::uint64_t, std::uint64_t at, std::uint64_t nbytes) {
                   std::memset(data + filled, 0, at - filled);
                   filled = at + nbytes;
               });
    std::memset(data + filled, 0, block(feed.index).nbytes - filled);
}

std::vector<Digest> WriteJob::digests() const {
    std::vector<Digest> all = live_checksums_.values();
    all.insert(all.end(), fed_checksums_.values().begin(), fed_checksums_.values().end());
    return all;
}

std::uint64_t WriteJob::end() {
    std::lock_guard lock(ends_);
    return end_;
}

void WriteJob::set_end(std::uint64_t end) {
    std::lock_guard lock(ends_);
    end_ = end;
}

void WriteJob::write_behind(const std::byte *data, std::uint64_t offset, std::uint64_t nbytes) {
    std::lock_guard lock(ends_);
    const int code = file_.descriptor() < 0 ? ECANCELED : file_.write(data, offset, nbytes);
    if (code != 0) {
        throw IoError("write of " + std::to_string(nbytes) + " bytes", path(), offset, code);
    }
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
    write_through_bounce(file_, trailer, end_);
    write_through_bounce(file_, header, 0);
    const std::uint64_t nbytes = end_ + trailer.size();
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

IoError WriteJob::failure(const Write &write, int code) const {
    if (code != EFAULT || write.slot) {
        return {"write of " + std::to_string(write.nbytes) + " bytes", path(), write.offset, code};
    }
    // The device can't read some of the block's live memory; a hashing thread may come there only later.
    const Block &block = *std::ranges::lower_bound(blocks_, write.offset, {}, &Block::offset);
    std::size_t gone = block.first_extent;
    bool found = false;
    each_piece(plan_->extents(), block,
               [&](std::size_t extent, std::uint64_t position, std::uint64_t, std::uint64_t nbytes) {
                   if (!found && !is_mapped({plan_->extents()[extent].address + position, nbytes})) {
                       gone = extent;
                       found = true;
                   }
               });
    return unreadable(gone, code);
}

IoError WriteJob::unreadable(std::size_t extent, int code) const {
    return {"reading the memory of extent " + std::to_string(extent) + ", which is no longer mapped,", file_.path(),
            plan_->extents()[extent].offset, code};
}

} // namespace dsh
