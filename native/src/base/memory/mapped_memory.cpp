#include "base/memory/mapped_memory.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/files/io_error.hpp"
#include "base/memory/aligned_memory.hpp"
#include "base/memory/huge_pages.hpp"

#ifdef __SANITIZE_THREAD__
extern "C" void __tsan_read_range(void *address, long nbytes); // as GCC declares it
#endif

namespace dsh {
namespace {

constexpr std::size_t most_regions = 512; // of one call; the kernel takes 1024

std::atomic<bool> forbidden = false; // to this process, which never changes

// Chooses for one thread between the two calls that copy. The kernel looks up, one by one, the pages of the side that
// it takes for another process: process_vm_readv those it reads, process_vm_writev those it writes. In pages of 4 KiB
// that takes longer than the copy. So the better call is the one whose far side is in huge pages, and that depends on
// the training's memory: both are tried, again and again, and the faster one is taken for what follows.
class FasterCall {
  public:
    bool writes() const { return turn_ < tries ? turn_ % 2 == 1 : fastest_[1] < fastest_[0]; }

    void took(std::chrono::steady_clock::duration time) {
        if (turn_ < tries) {
            auto &fastest = fastest_[turn_ % 2];
            fastest = turn_ < 2 ? time : std::min(fastest, time);
        }
        turn_ = (turn_ + 1) % period;
    }

  private:
    static constexpr unsigned tries = 4; // two of each, for the first one may be interrupted or meet new pages
    static constexpr unsigned period = 64;

    unsigned turn_ = 0;
    std::array<std::chrono::steady_clock::duration, 2> fastest_{};
};

ssize_t copy_by_kernel(std::span<const iovec> into, std::span<const iovec> from, bool writes) {
    return writes ? process_vm_writev(getpid(), from.data(), from.size(), into.data(), into.size(), 0)
                  : process_vm_readv(getpid(), into.data(), into.size(), from.data(), from.size(), 0);
}

// Only copies of one full piece are compared, since they are what takes time.
ssize_t copy_faster(std::span<const iovec> into, std::span<const iovec> from) {
    thread_local FasterCall call;
    if (into.size() != 1 || into[0].iov_len != cached_bytes) {
        return copy_by_kernel(into, from, false);
    }
    const auto start = std::chrono::steady_clock::now();
    const ssize_t result = copy_by_kernel(into, from, call.writes());
    call.took(std::chrono::steady_clock::now() - start);
    return result;
}

const void *pointer(const Region &region) { return reinterpret_cast<const void *>(region.address); }

std::optional<CopyFailure> copy_directly(std::span<const CopiedRegion> regions) {
    for (std::size_t i = 0; i < regions.size(); ++i) {
        if (!is_mapped(regions[i].from)) {
            return CopyFailure{i, EFAULT};
        }
        std::memcpy(regions[i].into, pointer(regions[i].from), regions[i].from.nbytes);
    }
    return std::nullopt;
}

// At most most_regions.
std::optional<CopyFailure> copy_some(std::span<const CopiedRegion> regions) {
    std::array<iovec, most_regions> into;
    std::array<iovec, most_regions> from;
    std::uint64_t whole = 0;
    for (std::size_t i = 0; i < regions.size(); ++i) {
        into[i] = {regions[i].into, regions[i].from.nbytes};
        from[i] = {const_cast<void *>(pointer(regions[i].from)), regions[i].from.nbytes};
        whole += regions[i].from.nbytes;
#ifdef __SANITIZE_THREAD__
        __tsan_read_range(from[i].iov_base,
                          static_cast<long>(from[i].iov_len)); // the kernel's reads are not seen otherwise
#endif
    }
    const ssize_t result = copy_faster(std::span(into).first(regions.size()), std::span(from).first(regions.size()));
    if (result < 0 && (errno == EPERM || errno == ENOSYS)) {
        forbidden = true;
        return copy_directly(regions);
    }
    if (result < 0) {
        return CopyFailure{0, errno};
    }
    // What was copied ends where the first page is missing.
    auto left = static_cast<std::uint64_t>(result);
    for (std::size_t i = 0; left < whole; ++i) {
        if (left < regions[i].from.nbytes) {
            return CopyFailure{i, EFAULT};
        }
        left -= regions[i].from.nbytes;
        whole -= regions[i].from.nbytes;
    }
    return std::nullopt;
}

// Hash a full piece of a larger extent in the cache, and have the processor fetch as many bytes of `next` meanwhile.
void hash_and_fetch(Digests &digests, std::size_t index, std::uint64_t position, std::uint64_t whole,
                    const std::byte *piece, std::uint64_t next) {
    constexpr std::uint64_t stride = 2048;
    constexpr std::uint64_t line = 64;
    for (std::uint64_t done = 0; done < cached_bytes; done += stride) {
        digests.feed(index, position + done, whole, piece + done, stride);
        for (std::uint64_t at = next + done; at < next + done + stride; at += line) {
            __builtin_prefetch(reinterpret_cast<const void *>(at), 0, 0);
        }
    }
}

} // namespace

bool is_mapped(const Region &region) {
    static const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    const std::uint64_t begin = round_down(region.address, page);
    // msync fails with ENOMEM when a page is unmapped. On anonymous memory MS_ASYNC has no other effect.
    return msync(reinterpret_cast<void *>(begin), region.address + region.nbytes - begin, MS_ASYNC) == 0;
}

std::optional<CopyFailure> copy_memory(std::span<const CopiedRegion> regions) {
    if (forbidden) {
        return copy_directly(regions);
    }
    for (std::size_t at = 0; at < regions.size(); at += most_regions) {
        if (auto failure = copy_some(regions.subspan(at, std::min(most_regions, regions.size() - at)))) {
            failure->index += at;
            return failure;
        }
    }
    return std::nullopt;
}

int feed_live(Digests &digests, std::size_t index, std::uint64_t position, std::uint64_t whole, const Region &region) {
    thread_local const HugePages cached = huge_pages(huge_page_bytes, "a buffer");
    for (std::uint64_t done = 0; done < region.nbytes;) {
        const std::uint64_t left = region.nbytes - done;
        const CopiedRegion piece{cached.get(), {region.address + done, std::min(cached_bytes, left)}};
        if (const auto failure = copy_memory(std::span(&piece, 1))) {
            return failure->code;
        }
        if (piece.from.nbytes == cached_bytes && left > cached_bytes) {
            hash_and_fetch(digests, index, position + done, whole, piece.into, piece.from.address + cached_bytes);
        } else {
            digests.feed(index, position + done, whole, piece.into, piece.from.nbytes);
        }
        done += piece.from.nbytes;
    }
    return 0;
}

std::vector<Digest> checksum_memory(std::span<const Region> regions) {
    Digests digests(regions.size());
    for (std::size_t i = 0; i < regions.size(); ++i) {
        if (const int code = feed_live(digests, i, 0, regions[i].nbytes, regions[i])) {
            throw IoError("reading region " + std::to_string(i) + ", whose memory is no longer mapped,", "", 0, code);
        }
    }
    return digests.values();
}

} // namespace dsh
