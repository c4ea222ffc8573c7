// Digests of samples of memory: they find out, in a fraction of the time that a checksum takes, whether a tensor was
// written to.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/memory/mapped_memory.hpp"

namespace dsh {

// Regions of at most so many bytes are read whole, which takes no longer than to read a sample of them.
inline constexpr std::uint64_t sampled_whole_bytes = 4096;

// Return for each region a digest of some of its bytes. A region of at most sampled_whole_bytes is read whole. A larger
// one is cut into equal stretches, 16 of them or one for each 8 KiB, and one line (64 bytes) of each is read, besides
// the first and the last 64 bytes. `seed` decides which lines; digests are compared with those of the same seed. They
// are written to disk: equal bytes have equal digests wherever they are, in every process and on every host
// (docs/format.md has the definition). A region that is not mapped any more has the digest 0.
std::vector<std::uint64_t> sampled_digests(std::span<const Region> regions, std::uint64_t seed);

} // namespace dsh
