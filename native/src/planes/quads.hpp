// Planes of which nearly all bytes are 0, 1 or 2, four bytes in one. docs/format.md has the definition.
#pragma once

#include <cstddef>
#include <span>

namespace dsh {

// Return the number of quads of so many bytes.
constexpr std::size_t quads_of(std::size_t count) { return (count + 3) / 4; }

// Write one quad for every four bytes of a plane, two bits each, the first in the lowest: its value, or 3 where it is 3
// or more; and the others, which are those, in order. Return their number. `quads` has quads_of(count) bytes, `others`
// has `count`.
std::size_t gather_quads(const std::byte *plane, std::size_t count, std::byte *quads, std::byte *others);

// Write the `count` bytes of the plane whose quads and others these are. `quads` has quads_of(count) bytes. Return the
// number of others that the quads ask for: where it is not that of `others`, the plane holds anything.
std::size_t spread_quads(const std::byte *quads, std::span<const std::byte> others, std::size_t count,
                         std::byte *plane);

} // namespace dsh
