// Elements cut into planes: the first bytes of all of them, then the second, and so on. An entropy coder finds in
// a plane what it can't find in whole numbers, such as that all exponents are about the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dsh {

// What an element becomes before it is cut. Each has an inverse for all bits, NaN payloads and -0.0 included.
enum class Transform : std::uint8_t {
    plain = 0,     // itself
    rotated = 1,   // rotated left by a bit, so that the exponent of a float32 or bfloat16 is one byte, without the sign
    exclusive = 2, // XOR with the base's element
    rotated_xor = 3, // both
    difference = 4,  // the difference from the base's element as integers modulo 2^bits, zigzag: 0, -1, 1, -2 ...
};

inline constexpr unsigned transforms = 5;

// Whether an element's form depends on the base's.
constexpr bool needs_base(Transform transform) { return transform >= Transform::exclusive; }

// Write the elements' bytes to `planes`, plane after plane from the least significant on. `itemsize` is 1, 2, 4 or 8,
// else std::invalid_argument; data, base (of the transforms that need one) and planes have itemsize * count bytes.
void split_planes(const std::byte *data, const std::byte *base, std::size_t count, std::size_t itemsize,
                  Transform transform, std::byte *planes);

// Put together what `split_planes` cut; each plane has `count` bytes.
void join_planes(std::span<const std::byte *const> planes, const std::byte *base, std::size_t count,
                 Transform transform, std::byte *data);

} // namespace dsh
