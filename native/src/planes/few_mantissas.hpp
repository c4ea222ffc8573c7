// Float32 numbers that have few mantissas, by the index of theirs: all products of bfloat16 numbers with one factor
// have at most 128, whatever the factor is, because each sign and exponent has the same. docs/format.md has the
// definition.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "planes/kernels/forms.hpp"

namespace dsh {

constexpr std::size_t most_mantissas = 128;

// The mantissas that were met so far, in the order in which they were.
class FewMantissas {
  public:
    FewMantissas() { forget(); }

    void forget();

    // Write what stands for `count` numbers, at any address, into two planes of as many bytes: the sign and the index
    // of the mantissa, and the exponent. False when they have no few mantissas, or would not come back.
    bool index(const std::byte *numbers, std::size_t count, std::byte *indices, std::byte *exponents);

    // Whether what was indexed since `forget` are bfloat16 numbers, all of whose mantissas are listed then.
    bool are_halves() const { return are_halves_; }

    std::span<const std::uint32_t> met() const { return {mantissas_.data(), count_}; }

  private:
    // The products of neighbours are so far apart that no two of them have the same upper bits.
    static constexpr std::size_t upper_bits = 9;

    bool index_tile(const std::byte *numbers, std::size_t count, std::byte *indices, std::byte *exponents);
    bool look_up(std::span<const std::uint32_t> mantissas, std::byte *indices) const;
    bool meet(std::span<const std::uint32_t> mantissas);
    void meet_halves();

    std::array<std::uint32_t, std::size_t{1} << upper_bits> slots_; // by upper bits: the mantissa, and its index above
    std::array<std::uint32_t, most_mantissas> mantissas_;
    std::size_t count_ = 0;
    bool are_halves_ = false;
};

// Write the `count` numbers for which two planes stand to `into`; return the highest index, which must be one of the
// mantissas for the numbers to be right.
std::size_t join_indexed(const Plane &indices, const Plane &exponents, std::span<const std::uint32_t> mantissas,
                         std::size_t count, std::byte *into);

} // namespace dsh
