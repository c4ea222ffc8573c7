// The dtypes of the format: their names, their sizes, and their elements as floating-point numbers.
#pragma once

#include <cstddef>
#include <string_view>

namespace dsh {

// How the bytes of one dtype become numbers. Every dtype but the wide ones fits float32 exactly; I64 and U64 beyond
// 2^53 are rounded to the nearest float64.
struct Elements {
    std::string_view name;
    std::size_t nbytes;                                                   // of one element
    bool wide;                                                            // decoded to float64, else to float32
    void (*decode)(const std::byte *from, std::size_t count, void *into); // null: the bytes are those numbers already
};

// By the name that safetensors has for it. Throws std::invalid_argument.
const Elements &elements_of(std::string_view dtype);

} // namespace dsh
