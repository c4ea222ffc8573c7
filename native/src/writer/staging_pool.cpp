#include "writer/staging_pool.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>

#include "base/aligned_memory.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t huge_page_bytes = 2 << 20;

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

// Map and populate the staging memory.
//   - In huge pages, where the host has them: the kernel pins and translates one page where it would take 512.
//   - Not for forked children: the kernel would copy at once what is registered with a ring, for each child, and a
//   child
//     has no use for it (writer.hpp).
std::byte *map_staging(std::uint64_t budget_bytes) {
    const std::uint64_t nbytes = round_up(budget_bytes, static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)));
    const std::uint64_t reserved = nbytes + huge_page_bytes;
    void *mapping = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int code = mapping == MAP_FAILED ? errno : 0;
    if (code == 0) {
        const auto address = reinterpret_cast<std::uint64_t>(mapping);
        const std::uint64_t skipped = round_up(address, huge_page_bytes) - address;
        auto *data = static_cast<std::byte *>(mapping) + skipped;
        if (skipped != 0) {
            munmap(mapping, skipped);
        }
        munmap(data + nbytes, reserved - skipped - nbytes);
        madvise(data, nbytes, MADV_HUGEPAGE);
        madvise(data, nbytes, MADV_DONTFORK);
        if (populate(data, nbytes)) {
            return data;
        }
        code = errno;
        munmap(data, nbytes);
    }
    throw std::system_error(code, std::generic_category(),
                            "mmap of a staging budget of " + std::to_string(budget_bytes) + " bytes");
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
