// Estimates what an entropy coder makes of a byte plane without coding it: whoever packs a block chooses among the
// forms of its elements by a sample of it.
#pragma once

#include <cstddef>
#include <span>

namespace dsh {

// Return how many bytes a Huffman code takes for a plane, about, without its table: runs of a byte count as nothing.
double coded_bytes(std::span<const std::byte> plane);

} // namespace dsh
