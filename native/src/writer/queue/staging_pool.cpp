#include "writer/queue/staging_pool.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <system_error>

namespace dsh {
namespace {

// Make all pages exist, so that no copy into a slot waits for one.
bool populate(std::byte *data, std::uint64_t nbytes) {
#ifdef MADV_POPULATE_WRITE
    if (madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) {
        return true;
    }
    if (errno != EINVAL) {
        return false;
    }
#endif
    std::memset(data, 0, nbytes); // kernels before 5.14
    return true;
}

// Map and populate the staging memory. Forked children don't get it: the kernel would copy at once what is registered
// with a ring, for each child, and a child has no use for it (writer.hpp).
HugePages map_staging(std::uint64_t budget_bytes) {
    HugePages data = huge_pages(budget_bytes, "a staging budget");
    madvise(data.get(), data.get_deleter().nbytes, MADV_DONTFORK);
    if (!populate(data.get(), data.get_deleter().nbytes)) {
        throw std::system_error(errno, std::generic_category(),
                                "mmap of a staging budget of " + std::to_string(budget_bytes) + " bytes");
    }
    return data;
}

} // namespace

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
    data_ = map_staging(budget_bytes);
    std::byte *at = data_.get();
    const std::uint64_t large_count = (budget_bytes - small_count * small_bytes) / block_bytes;
    for (std::uint64_t i = 0; i < large_count; ++i, at += block_bytes) {
        large_.push_back(at);
    }
    for (std::uint64_t i = 0; i < small_count; ++i, at += small_bytes) {
        small_.push_back(at);
    }
}

void StagingPool::drop() {
    dropped_ = true;
    large_.clear();
    small_.clear();
    if (lent_ == 0) {
        data_.reset();
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

void StagingPool::share(Slot slot) { ++further_holders_[slot.data]; }

void StagingPool::give(Slot slot) {
    if (const auto held = further_holders_.find(slot.data); held != further_holders_.end()) {
        if (--held->second == 0) {
            further_holders_.erase(held);
        }
        return;
    }
    --lent_;
    (slot.small ? small_ : large_).push_back(slot.data);
    if (dropped_) {
        drop();
    }
}

} // namespace dsh
