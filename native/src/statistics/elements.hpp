// The dtypes of the format: their names, their sizes, and the decoding of their elements to floating-point numbers.
#pragma once

#include <cstddef>
#include <string_view>

namespace dsh {

// One dtype. Every dtype but the wide ones fits float32 exactly; I64 and U64 beyond 2^53 are rounded to the nearest
// float64.
struct Elements {
    std::string_view name;
    std::size_t nbytes;                                                   // of one element
    bool wide;                                                            // decoded to float64, else to float32
    void (*decode)(const std::byte *from, std::size_t count, void *into); // null: the bytes are those numbers already
};

// Look a dtype up by its name in safetensors. Throws std::invalid_argument for an unknown one.
const Elements &elements_of(std::string_view dtype);

} // namespace dsh
