// Takes float32 numbers apart, into sign, exponent and mantissa: each kernel compiles this for its own processors. Each
// loop does one thing, which compilers turn into vector instructions.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "planes/kernels/forms.hpp"

namespace dsh {
namespace {

constexpr uint32_t lower_half = 0xffff;

uint32_t word_at(const unsigned char *numbers, size_t i) {
    uint32_t word;
    memcpy(&word, numbers + i * sizeof word, sizeof word);
    return word;
}

uint32_t without_sign(uint32_t word) { return word & ~(1U << 31); }

// Whether a number has a mantissa and no exponent.
uint32_t is_denormal(uint32_t word) { return without_sign(word) - 1 < mantissa_mask ? 1U : 0U; }

unsigned char sign_of(uint32_t word) { return static_cast<unsigned char>(word >> 24 & 0x80U); }

void write_exponents(const unsigned char *numbers, size_t count, unsigned char *__restrict__ exponents) {
    for (size_t i = 0; i < count; ++i) {
        exponents[i] = static_cast<unsigned char>(word_at(numbers, i) >> mantissa_bits);
    }
}

bool take_halves_apart(const unsigned char *__restrict__ numbers, size_t count,
                       unsigned char *__restrict__ signs_and_mantissas, unsigned char *__restrict__ exponents) {
    uint32_t odd = 0;
    for (size_t i = 0; i < count; ++i) {
        const uint32_t word = word_at(numbers, i);
        odd |= (word & lower_half) | is_denormal(word);
    }
    if (odd != 0) {
        return false;
    }
    for (size_t i = 0; i < count; ++i) {
        const uint32_t word = word_at(numbers, i);
        signs_and_mantissas[i] = static_cast<unsigned char>(sign_of(word) | (word >> 16 & 0x7fU));
    }
    write_exponents(numbers, count, exponents);
    return true;
}

bool take_apart(const unsigned char *__restrict__ numbers, size_t count, uint32_t of_zeros,
                uint32_t *__restrict__ mantissas, unsigned char *__restrict__ signs,
                unsigned char *__restrict__ exponents) {
    uint32_t odd = 0;
    for (size_t i = 0; i < count; ++i) {
        odd |= is_denormal(word_at(numbers, i));
    }
    if (odd != 0) {
        return false;
    }
    for (size_t i = 0; i < count; ++i) {
        const uint32_t word = word_at(numbers, i);
        mantissas[i] = without_sign(word) == 0 ? of_zeros : word & mantissa_mask;
    }
    for (size_t i = 0; i < count; ++i) {
        signs[i] = sign_of(word_at(numbers, i));
    }
    write_exponents(numbers, count, exponents);
    return true;
}

} // namespace
} // namespace dsh
