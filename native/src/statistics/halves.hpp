// The numbers of 16 bits, widened one at a time.
#pragma once

#include <stdint.h>
#include <string.h>

// Kernels for several processors include this, so everything has internal linkage: the linker must not take the copy
// that was compiled for one processor for the others.
namespace dsh {
namespace {

struct BF16 {
    uint16_t bits;
};

struct F16 {
    uint16_t bits;
};

inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline float widened(BF16 number) { return float_of(uint32_t{number.bits} << 16); }

// Multiplying by 2^112 corrects the exponent's bias and normalises denormals; Inf and NaN get their exponent
// afterwards.
inline float widened(F16 number) {
    const uint32_t magnitude = (number.bits & 0x7fffU) << 13;
    const float scaled = float_of(magnitude) * 0x1p112F;
    uint32_t bits;
    memcpy(&bits, &scaled, sizeof bits);
    const uint32_t special = magnitude >= 0x0f800000U ? 0x7f800000U : 0U;
    return float_of(bits | special | (number.bits & 0x8000U) << 16);
}

inline float widened(float number) { return number; }
inline double widened(double number) { return number; }

} // namespace
} // namespace dsh
