#include "planes/few_mantissas.hpp"

#include <algorithm>
#include <cstring>

#include "planes/kernels/kernel.hpp"
#include "planes/raw_bytes.hpp"

namespace dsh {
namespace {

constexpr std::uint32_t nothing = 1U << 31; // in a slot
constexpr std::uint32_t index_mask = most_mantissas - 1;
constexpr std::uint32_t sign_of_index = most_mantissas;

// So many numbers at a time stay in the first-level cache between the loops over them.
constexpr std::size_t tile = 1024;

// The mantissa of the first number that is not zero; zero where all are.
std::uint32_t first_mantissa(const std::byte *numbers, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        std::uint32_t word;
        std::memcpy(&word, numbers + i * sizeof word, sizeof word); // the processor is little-endian
        if ((word & ~(1U << 31)) != 0) {
            return word & mantissa_mask;
        }
    }
    return 0;
}

} // namespace

void FewMantissas::forget() {
    slots_.fill(nothing);
    count_ = 0;
    are_halves_ = false;
}

bool FewMantissas::index(const std::byte *numbers, std::size_t count, std::byte *indices, std::byte *exponents) {
    if (count_ == 0 || are_halves_) {
        if (planes_kernel().take_halves_apart(raw(numbers), count, raw(indices), raw(exponents))) {
            meet_halves();
            return true;
        }
        if (are_halves_) {
            return false;
        }
        const std::uint32_t first = first_mantissa(numbers, count);
        meet({&first, 1});
    }
    for (std::size_t at = 0; at < count; at += tile) {
        const std::size_t here = std::min(tile, count - at);
        if (!index_tile(numbers + at * sizeof(float), here, indices + at, exponents + at)) {
            return false;
        }
    }
    return true;
}

bool FewMantissas::index_tile(const std::byte *numbers, std::size_t count, std::byte *indices, std::byte *exponents) {
    std::uint32_t memory[tile];
    std::byte signs[tile];
    if (!planes_kernel().take_apart(raw(numbers), count, mantissas_[0], memory, raw(signs), raw(exponents))) {
        return false; // no exponent says how a denormal was rounded
    }
    const std::span<const std::uint32_t> mantissas(memory, count);
    if (!look_up(mantissas, indices) && !(meet(mantissas) && look_up(mantissas, indices))) {
        return false;
    }
    for (std::size_t i = 0; i < count; ++i) {
        indices[i] |= signs[i];
    }
    return true;
}

// Write the indices of the mantissas; return whether all of them were met.
bool FewMantissas::look_up(std::span<const std::uint32_t> mantissas, std::byte *indices) const {
    std::uint32_t differing = 0;
    for (const std::uint32_t mantissa : mantissas) {
        const std::uint32_t slot = slots_[mantissa >> (mantissa_bits - upper_bits)];
        differing |= slot ^ mantissa;
        *indices++ = static_cast<std::byte>(slot >> mantissa_bits);
    }
    return (differing & (nothing | mantissa_mask)) == 0;
}

// Give those of the mantissas that were not met a place each; return whether there is one for all of them.
bool FewMantissas::meet(std::span<const std::uint32_t> mantissas) {
    for (const std::uint32_t mantissa : mantissas) {
        std::uint32_t &slot = slots_[mantissa >> (mantissa_bits - upper_bits)];
        if ((slot & (nothing | mantissa_mask)) == mantissa) {
            continue;
        }
        if (slot != nothing || count_ == most_mantissas) {
            return false;
        }
        slot = mantissa | static_cast<std::uint32_t>(count_) << mantissa_bits;
        mantissas_[count_++] = mantissa;
    }
    return true;
}

// The mantissa of a bfloat16 number is its own index.
void FewMantissas::meet_halves() {
    are_halves_ = true;
    count_ = most_mantissas;
    for (std::size_t i = 0; i < most_mantissas; ++i) {
        mantissas_[i] = static_cast<std::uint32_t>(i) << (mantissa_bits - 7);
    }
}

std::size_t join_indexed(const Plane &indices, const Plane &exponents, std::span<const std::uint32_t> mantissas,
                         std::size_t count, std::byte *into) {
    std::array<std::uint32_t, most_mantissas> known{};
    std::copy_n(mantissas.begin(), std::min(mantissas.size(), known.size()), known.begin());
    const auto *index = static_cast<const std::uint8_t *>(indices.bytes);
    const auto *exponent = static_cast<const std::uint8_t *>(exponents.bytes);
    const std::size_t next_index = indices.is_constant ? 0 : 1;
    const std::size_t next_exponent = exponents.is_constant ? 0 : 1;
    std::size_t highest = 0;
    for (std::size_t i = 0; i < count; ++i, index += next_index, exponent += next_exponent) {
        const std::uint32_t place = *index & index_mask;
        highest = std::max<std::size_t>(highest, place);
        const std::uint32_t sign = (*index & sign_of_index) != 0 ? 1U << 31 : 0;
        const std::uint32_t mantissa = *exponent != 0 ? known[place] : 0;
        const std::uint32_t word = sign | std::uint32_t{*exponent} << mantissa_bits | mantissa;
        std::memcpy(into + i * sizeof word, &word, sizeof word);
    }
    return highest;
}

} // namespace dsh
