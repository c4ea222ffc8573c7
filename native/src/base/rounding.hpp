// Numbers of 32 bits rounded to 16, as a reader makes low-precision weights of their masters, and as a writer finds out
// that it may. docs/format.md has the definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/checksums/checksum.hpp"
#include "base/memory/mapped_memory.hpp"

namespace dsh {

enum class Half { bf16, fp16 };

// Round to the nearest, ties to even; beyond the largest finite number to infinity. A NaN becomes 0x7FC0 or 0x7E00.
// The memory need not be aligned, and may not overlap.
void round_to_half(const std::byte *numbers, std::size_t count, Half to, std::byte *into);

struct RoundedDigests {
    Digest halves;
    Digest numbers;
};

// Compares halves with numbers, rounded, bit for bit, as both come in pieces, in order. Both may be unmapped at any
// time. For one thread at a time.
class RoundedComparison {
  public:
    explicit RoundedComparison(Half to) : to_(to) {}

    // Return whether this piece of `halves`, which has half of the bytes of `numbers`, is the latter, rounded. After
    // the first that is not, no other may come. Throws IoError (EFAULT) for memory that is gone.
    bool add(const Region &numbers, const Region &halves);

    // Return the checksums of all that came.
    RoundedDigests end() const { return {of_halves_.end(), of_numbers_.end()}; }

  private:
    Half to_;
    RunningChecksum of_numbers_;
    RunningChecksum of_halves_;
};

// Return whether a sample of `halves` is that of `numbers`, rounded. Up to 2048 are compared all; of more the last 32,
// and 32 at the beginning of each of 32 equal stretches. What can't be read is no difference: whoever compares all says
// so.
bool sample_is_rounded(const Region &numbers, const Region &halves, Half to);

} // namespace dsh
