#include "writer/staging_pool.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <system_error>

namespace dsh {

StagingPool::StagingPool(std::uint64_t budget_bytes, std::uint64_t block_bytes)
    : budget_bytes_(budget_bytes), block_bytes_(block_bytes) {
    const std::uint64_t least = least_bytes(block_bytes);
    if (budget_bytes < least) {
        throw std::invalid_argument("a staging budget of " + std::to_string(budget_bytes) +
                                    " bytes is too small for blocks of " + std::to_string(block_bytes) +
                                    " bytes: give at least " + std::to_string(least));
    }
    const std::uint64_t small_count = std::clamp<std::uint64_t>(budget_bytes / 16 / small_bytes, least_small,
                                                                (budget_bytes - 2 * block_bytes) / small_bytes);
    void *mapping =
        mmap(nullptr, budget_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (mapping == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(),
                                "mmap of a staging budget of " + std::to_string(budget_bytes) + " bytes");
    }
    data_ = static_cast<std::byte *>(mapping);
    std::byte *at = data_;
    const std::uint64_t large_count = (budget_bytes - small_count * small_bytes) / block_bytes;
    for (std::uint64_t i = 0; i < large_count; ++i, at += block_bytes) {
        large_.push_back(at);
    }
    for (std::uint64_t i = 0; i < small_count; ++i, at += small_bytes) {
        small_.push_back(at);
    }
}

StagingPool::~StagingPool() {
    if (data_ != nullptr) {
        munmap(data_, budget_bytes_);
    }
}

void StagingPool::drop() {
    dropped_ = true;
    large_.clear();
    small_.clear();
    if (lent_ == 0 && data_ != nullptr) {
        munmap(data_, budget_bytes_);
        data_ = nullptr;
    }
}

std::optional<Slot> StagingPool::take(std::uint64_t nbytes) {
    const bool small = nbytes <= small_bytes && !small_.empty();
    std::vector<std::byte *> &pool = small ? small_ : large_;
    if (pool.empty()) {
        return std::nullopt;
    }
    std::byte *data = pool.back();
    pool.pop_back();
    ++lent_;
    return Slot{data, small};
}

void StagingPool::give(Slot slot) {
    --lent_;
    (slot.small ? small_ : large_).push_back(slot.data);
    if (dropped_) {
        drop();
    }
}

} // namespace dsh
