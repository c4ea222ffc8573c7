// Numbers of 32 bits rounded to 16, as a reader makes low-precision weights of their masters, and as a writer finds out
// that it may. docs/format.md has the definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/checksum.hpp"
#include "base/mapped_memory.hpp"

namespace dsh {

enum class Half { bf16, fp16 };

// Round to the nearest, ties to even; beyond the largest finite number to infinity. A NaN becomes 0x7FC0 or 0x7E00.
// The memory need not be aligned, and may not overlap.
void round_to_half(const std::byte *numbers, std::size_t count, Half to, std::byte *into);

struct RoundedDigests {
    Digest halves;
    Digest numbers;
};

// Return the checksums of `halves` and of `numbers` if the former are the latter, rounded, bit for bit; nothing
// otherwise. Both may be unmapped at any time: IoError (EFAULT) says so. `halves` has half of the bytes of `numbers`.
std::optional<RoundedDigests> checksum_if_rounded(const Region &numbers, const Region &halves, Half to);

} // namespace dsh
