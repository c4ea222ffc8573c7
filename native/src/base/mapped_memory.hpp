// Memory that others own and may unmap at any time: whether it is still mapped, and its checksums as long as it is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/checksum.hpp"

namespace dsh {

struct Region {
    std::uint64_t address;
    std::uint64_t nbytes;
};

// Return true when every page of the region is mapped now. Another thread may unmap it right afterwards: the answer
// makes a crash on freed memory unlikely, never impossible.
bool is_mapped(std::uint64_t address, std::uint64_t nbytes);

// Return the checksum of each region, in order. Throws IoError (EFAULT) naming the first region that is no longer
// mapped.
std::vector<Digest> checksum_memory(std::span<const Region> regions);

} // namespace dsh
