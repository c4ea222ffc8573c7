#include "writer/appendix.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>

#include "base/files/io_error.hpp"
#include "base/memory/mapped_memory.hpp"
#include "writer/queue/job.hpp"

namespace dsh {
namespace {

// Large enough for a direct write to run at the device's speed.
constexpr std::uint64_t buffer_bytes = 4 << 20;

} // namespace

Appendix::Appendix(std::shared_ptr<WriteJob> job, std::vector<std::uint64_t> sizes)
    : job_(std::move(job)), sizes_(std::move(sizes)), digests_(sizes_.size()),
      buffer_(aligned_memory(job_->plan().align(), round_up(buffer_bytes, job_->plan().align()))),
      room_(round_up(buffer_bytes, job_->plan().align())), offset_(job_->end()), at_(offset_) {}

void Appendix::add(std::uint64_t address, std::uint64_t nbytes) {
    while (nbytes > 0) {
        while (extent_ < sizes_.size() && position_ == sizes_[extent_]) {
            ++extent_;
            position_ = 0;
        }
        if (ended_ || extent_ == sizes_.size()) {
            throw std::invalid_argument(std::to_string(nbytes) + " bytes more than the extents have");
        }
        const std::uint64_t taken = std::min({nbytes, sizes_[extent_] - position_, room_ - filled_});
        std::byte *target = buffer_.get() + filled_;
        const CopiedRegion copied{target, {address, taken}};
        if (const auto failure = copy_memory(std::span(&copied, 1))) {
            throw IoError("reading memory that is no longer mapped,", job_->path(), at_ + filled_, failure->code);
        }
        digests_.feed(extent_, position_, sizes_[extent_], target, taken);
        address += taken;
        nbytes -= taken;
        position_ += taken;
        filled_ += taken;
        if (filled_ == room_) {
            write_out();
        }
    }
}

std::vector<Digest> Appendix::end() {
    while (extent_ < sizes_.size() && position_ == sizes_[extent_]) {
        ++extent_;
        position_ = 0;
    }
    if (ended_ || extent_ < sizes_.size()) {
        throw std::logic_error("the extents of this appendix have not all their bytes, or it has ended");
    }
    const std::uint64_t padded = round_up(filled_, job_->plan().align());
    std::memset(buffer_.get() + filled_, 0, padded - filled_);
    filled_ = padded;
    write_out();
    job_->set_end(at_);
    ended_ = true;
    return digests_.values();
}

void Appendix::write_out() {
    job_->write_behind(buffer_.get(), at_, filled_);
    at_ += filled_;
    filled_ = 0;
}

} // namespace dsh
