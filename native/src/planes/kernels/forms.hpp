// What elements become before they are cut into byte planes, what they consist of, and what a plane may be. No header
// of C++ is included here, because the kernels include this one.
#pragma once

#include <stdint.h>

namespace dsh {

// Each has an inverse for all bits, NaN payloads and -0.0 included.
enum class Transform : uint8_t {
    plain = 0,     // itself
    rotated = 1,   // rotated left by a bit, so that the exponent of a float32 or bfloat16 is one byte, without the sign
    exclusive = 2, // XOR with the base's element
    rotated_xor = 3, // both
    difference = 4,  // the difference from the base's element as integers modulo 2^bits, zigzag: 0, -1, 1, -2 ...
};

constexpr unsigned transforms = 5;

// Whether an element's form depends on the base's.
static constexpr bool needs_base(Transform transform) { return transform >= Transform::exclusive; }

// Of a float32 number.
constexpr unsigned mantissa_bits = 23;
constexpr uint32_t mantissa_mask = (1U << mantissa_bits) - 1;

// As many bytes as there are elements, or the one that all of them are.
struct Plane {
    const void *bytes;
    bool is_constant;
};

} // namespace dsh
