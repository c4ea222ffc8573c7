#include "base/mapped_memory.hpp"

#include <algorithm>
#include <cerrno>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "base/aligned_memory.hpp"
#include "base/io_error.hpp"

namespace dsh {
namespace {

// Regions are looked at piece by piece, so that memory unmapped during a long read is noticed before its next piece.
constexpr std::uint64_t piece_bytes = 1 << 20;

} // namespace

bool is_mapped(std::uint64_t address, std::uint64_t nbytes) {
    static const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    const std::uint64_t begin = round_down(address, page);
    // msync fails with ENOMEM when a page is unmapped. On anonymous memory MS_ASYNC has no other effect.
    return msync(reinterpret_cast<void *>(begin), address + nbytes - begin, MS_ASYNC) == 0;
}

std::vector<Digest> checksum_memory(std::span<const Region> regions) {
    Digests digests(regions.size());
    for (std::size_t i = 0; i < regions.size(); ++i) {
        const auto [address, whole] = regions[i];
        for (std::uint64_t at = 0; at < whole; at += piece_bytes) {
            const std::uint64_t nbytes = std::min(piece_bytes, whole - at);
            if (!is_mapped(address + at, nbytes)) {
                throw IoError("reading region " + std::to_string(i) + ", whose memory is no longer mapped,", "", at,
                              EFAULT);
            }
            digests.feed(i, at, whole, reinterpret_cast<const void *>(address + at), nbytes);
        }
    }
    return digests.values();
}

} // namespace dsh
