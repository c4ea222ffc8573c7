// Memory that others own and may take away: whether it is still there, and its checksums as long as it is.
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

bool is_mapped(std::uint64_t address, std::uint64_t nbytes);

// The checksum of each region, in order. Throws IoError (EFAULT) for one that is not mapped any more.
std::vector<Digest> checksum_memory(std::span<const Region> regions);

} // namespace dsh
