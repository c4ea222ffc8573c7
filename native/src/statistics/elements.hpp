// The dtypes of the format: their names, their sizes, and the decoding of their elements to floating-point numbers.
#pragma once

#include <cstddef>
#include <string_view>

namespace dsh {

// The form in which a kernel takes numbers.
enum class Form { f64, f32, bf16, f16 };

// One dtype. Every dtype but those of the form f64 fits float32 exactly; I64 and U64 beyond 2^53 are rounded to the
// nearest float64.
struct Elements {
    std::string_view name;
    std::size_t nbytes;                                                   // of one element
    Form form;                                                            // of its bytes, or after decoding
    bool decoded;                                                         // the bytes have no form until decoded
    void (*decode)(const std::byte *from, std::size_t count, void *into); // to float64 for f64, else to float32
};

// Look a dtype up by its name in safetensors. Throws std::invalid_argument for an unknown one.
const Elements &elements_of(std::string_view dtype);

} // namespace dsh
