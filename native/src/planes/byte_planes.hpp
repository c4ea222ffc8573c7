// Elements cut into planes: the first bytes of all of them, then the second, and so on. An entropy coder finds in
// a plane what it can't find in whole numbers, such as that all exponents are about the same.
#pragma once

#include <cstddef>
#include <span>

#include "planes/kernels/forms.hpp"

namespace dsh {

// An element has so many bytes at most, each of which goes to a plane of its own.
inline constexpr std::size_t most_planes = 8;

// Throw std::invalid_argument unless elements of so many bytes can be cut into planes: 1, 2, 4 or 8.
void require_itemsize(std::size_t itemsize);

// Write the elements' bytes to `planes`, plane after plane from the least significant on. `itemsize` is 1, 2, 4 or 8,
// else std::invalid_argument; data, base (of the transforms that need one) and planes have itemsize * count bytes.
void split_planes(const std::byte *data, const std::byte *base, std::size_t count, std::size_t itemsize,
                  Transform transform, std::byte *planes);

// Put together what `split_planes` cut.
void join_planes(std::span<const Plane> planes, const std::byte *base, std::size_t count, Transform transform,
                 std::byte *data);

// Return whether all bytes are the same.
bool is_constant(std::span<const std::byte> plane);

} // namespace dsh
