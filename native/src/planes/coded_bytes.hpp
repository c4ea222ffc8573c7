// What an entropy coder makes of byte planes, about, without coding them: whoever packs a block chooses among the forms
// of its elements by a sample of it.
#pragma once

#include <array>
#include <cstddef>

#include "planes/byte_planes.hpp"

namespace dsh {

inline constexpr std::size_t most_planes = 8;

// Return how many bytes a Huffman code takes for each plane of the transformed elements, about, without its table:
// runs of a byte count as nothing. data, base (of the transforms that need one) have itemsize * count bytes, and
// itemsize is 1, 2, 4 or 8, else std::invalid_argument.
std::array<double, most_planes> coded_bytes(const std::byte *data, const std::byte *base, std::size_t count,
                                            std::size_t itemsize, Transform transform);

} // namespace dsh
