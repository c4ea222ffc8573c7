#include "planes/few_mantissas.hpp"

#include <algorithm>
#include <cstring>

namespace dsh {
namespace {

constexpr unsigned mantissa_bits = 23;
constexpr std::uint32_t mantissa_mask = (1U << mantissa_bits) - 1;
constexpr std::uint32_t nothing = 1U << 31; // in a slot
constexpr std::uint32_t index_mask = most_mantissas - 1;
constexpr std::uint32_t sign_of_index = most_mantissas;

std::uint32_t word_at(const std::byte *numbers, std::size_t i) {
    std::uint32_t word;
    std::memcpy(&word, numbers + i * sizeof word, sizeof word); // the processor is little-endian
    return word;
}

} // namespace

void FewMantissas::forget() {
    slots_.fill(nothing);
    count_ = 0;
}

bool FewMantissas::index(const std::byte *numbers, std::size_t count, std::byte *indices, std::byte *exponents) {
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t word = word_at(numbers, i);
        const std::uint32_t mantissa = word & mantissa_mask;
        const std::uint32_t exponent = word >> mantissa_bits & 0xffU;
        const std::uint32_t sign = word >> 31 != 0 ? sign_of_index : 0;
        std::uint32_t slot = 0;
        if (exponent != 0) {
            slot = slots_[mantissa >> (mantissa_bits - upper_bits)];
            if ((slot & (nothing | mantissa_mask)) != mantissa) {
                if (!meet(mantissa)) {
                    return false;
                }
                slot = slots_[mantissa >> (mantissa_bits - upper_bits)];
            }
        } else if (mantissa != 0) {
            return false; // no exponent says how a denormal was rounded
        }
        indices[i] = static_cast<std::byte>(sign | (slot >> mantissa_bits & index_mask));
        exponents[i] = static_cast<std::byte>(exponent);
    }
    return true;
}

bool FewMantissas::meet(std::uint32_t mantissa) {
    std::uint32_t &slot = slots_[mantissa >> (mantissa_bits - upper_bits)];
    if (slot != nothing || count_ == most_mantissas) {
        return false;
    }
    slot = mantissa | static_cast<std::uint32_t>(count_) << mantissa_bits;
    mantissas_[count_++] = mantissa;
    return true;
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
