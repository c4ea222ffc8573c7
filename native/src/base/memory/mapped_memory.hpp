// Memory that others own and may unmap at any time: copies of it, and checksums, that fail where a direct read would
// end the process.
//
// Looking first whether memory is mapped is no guard, since another thread may unmap it right afterwards. So the kernel
// copies (process_vm_readv, process_vm_writev): it answers EFAULT for memory that is gone, or whose file has been cut.
// The copy stays in the processor's cache, where it is hashed; the live bytes are read from memory once, as by a direct
// read. The kernel copies page by page, and waits for the memory at the beginning of each, so while a piece is hashed
// the processor is asked to fetch the next one: a prefetch is a hint, and does nothing where memory is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/checksums/checksum.hpp"

namespace dsh {

constexpr std::uint64_t cached_bytes = 256 << 10; // of a copy that is to be hashed before it leaves the cache

struct Region {
    std::uint64_t address;
    std::uint64_t nbytes;
};

struct CopiedRegion {
    std::byte *into;
    Region from;
};

struct CopyFailure {
    std::size_t index; // of the first region that could not be copied
    int code;          // errno; EFAULT when it is not mapped
};

// Return whether a region is mapped now. That is enough for a caller who knows that nobody unmaps it meanwhile, such as
// the thread that owns it.
bool is_mapped(const Region &region);

// Copy the regions in order, together at most 1 GiB. Returns the first failure; what `into` holds then is undefined.
// Where seccomp forbids these calls, as Docker did before version 19.03, memory is looked at and then read
// directly: a crash on freed memory is unlikely there, but possible.
std::optional<CopyFailure> copy_memory(std::span<const CopiedRegion> regions);

// Add a region, which is at `position` of extent `index` and may be unmapped at any time, to `digests`, as
// Digests::feed does with a caller's own memory. Returns 0; or errno, when the region can't be read: the digests are
// then undefined.
int feed_live(Digests &digests, std::size_t index, std::uint64_t position, std::uint64_t whole, const Region &region);

// Return the checksum of each region, in order. Throws IoError naming the first region that can't be read (EFAULT: it
// is no longer mapped).
std::vector<Digest> checksum_memory(std::span<const Region> regions);

} // namespace dsh
