#include "statistics/elements.hpp"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "statistics/halves.hpp"

namespace dsh {
namespace {

template <typename T> T loaded(const std::byte *from, std::size_t index) {
    T value;
    std::memcpy(&value, from + index * sizeof(T), sizeof(T));
    return value;
}

template <typename From, typename Into> void decode_number(const std::byte *from, std::size_t count, void *into) {
    for (std::size_t i = 0; i < count; ++i) {
        static_cast<Into *>(into)[i] = static_cast<Into>(loaded<From>(from, i));
    }
}

void decode_bool(const std::byte *from, std::size_t count, void *into) {
    for (std::size_t i = 0; i < count; ++i) {
        static_cast<float *>(into)[i] = from[i] == std::byte{0} ? 0.0F : 1.0F;
    }
}

void decode_bf16(const std::byte *from, std::size_t count, void *into) {
    for (std::size_t i = 0; i < count; ++i) {
        static_cast<float *>(into)[i] = widened(loaded<BF16>(from, i));
    }
}

void decode_f16(const std::byte *from, std::size_t count, void *into) {
    for (std::size_t i = 0; i < count; ++i) {
        static_cast<float *>(into)[i] = widened(loaded<F16>(from, i));
    }
}

void decode_e5m2(const std::byte *from, std::size_t count, void *into) {
    for (std::size_t i = 0; i < count; ++i) {
        static_cast<float *>(into)[i] =
            widened(F16{static_cast<std::uint16_t>(std::to_integer<unsigned>(from[i]) << 8)});
    }
}

// E4M3 has no infinities: all ones are NaN, with either sign.
float from_e4m3(unsigned byte) {
    const unsigned exponent = byte >> 3 & 15U;
    const auto mantissa = static_cast<float>(byte & 7U);
    const float magnitude = (byte & 0x7fU) == 0x7fU ? std::numeric_limits<float>::quiet_NaN()
                            : exponent == 0         ? std::ldexp(mantissa, -9)
                                                    : std::ldexp(8.0F + mantissa, static_cast<int>(exponent) - 10);
    return (byte & 0x80U) != 0 ? -magnitude : magnitude;
}

void decode_e4m3(const std::byte *from, std::size_t count, void *into) {
    static const auto table = [] {
        std::array<float, 256> values;
        for (unsigned byte = 0; byte < values.size(); ++byte) {
            values[byte] = from_e4m3(byte);
        }
        return values;
    }();
    for (std::size_t i = 0; i < count; ++i) {
        static_cast<float *>(into)[i] = table[std::to_integer<std::size_t>(from[i])];
    }
}

constexpr std::array dtypes = {
    Elements{"F64", 8, Form::f64, false, &decode_number<double, double>},
    Elements{"F32", 4, Form::f32, false, &decode_number<float, float>},
    Elements{"BF16", 2, Form::bf16, false, &decode_bf16},
    Elements{"F16", 2, Form::f16, false, &decode_f16},
    Elements{"F8_E4M3", 1, Form::f32, true, &decode_e4m3},
    Elements{"F8_E5M2", 1, Form::f32, true, &decode_e5m2},
    Elements{"I64", 8, Form::f64, true, &decode_number<std::int64_t, double>},
    Elements{"U64", 8, Form::f64, true, &decode_number<std::uint64_t, double>},
    Elements{"I32", 4, Form::f64, true, &decode_number<std::int32_t, double>},
    Elements{"U32", 4, Form::f64, true, &decode_number<std::uint32_t, double>},
    Elements{"I16", 2, Form::f32, true, &decode_number<std::int16_t, float>},
    Elements{"U16", 2, Form::f32, true, &decode_number<std::uint16_t, float>},
    Elements{"I8", 1, Form::f32, true, &decode_number<std::int8_t, float>},
    Elements{"U8", 1, Form::f32, true, &decode_number<std::uint8_t, float>},
    Elements{"BOOL", 1, Form::f32, true, &decode_bool},
};

} // namespace

const Elements &elements_of(std::string_view dtype) {
    std::string known;
    for (const Elements &elements : dtypes) {
        if (elements.name == dtype) {
            return elements;
        }
        known += (known.empty() ? "" : ", ") + std::string(elements.name);
    }
    throw std::invalid_argument("dtype " + std::string(dtype) + " is not one of " + known);
}

} // namespace dsh
