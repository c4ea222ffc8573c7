// The kernel for every processor, one number at a time. The tests compare the other kernels with it.
#include <bit>
#include <cstring>

#include "statistics/kernel.hpp"

namespace dsh {
namespace {

struct Lanes {
    using Vector = double;
    using Element = double;
    static constexpr unsigned width = 1;

    static double all(double value) { return value; }
    static double load(const void *numbers, double value) {
        std::memcpy(&value, numbers, sizeof value);
        return value;
    }
    template <typename Number> static double load(const void *numbers, Number value) {
        std::memcpy(&value, numbers, sizeof value);
        return widened(value);
    }
    static void store(double *number, double value) { *number = value; }

    static double min(double value, double least) { return value < least ? value : least; }
    static double max(double value, double most) { return value > most ? value : most; }
    static double sum(double a, double b) { return a + b; }
    static double product_sum(double a, double b, double c) { return a * b + c; }

    static uint64_t exponent(double value) { return std::bit_cast<uint64_t>(value) >> 52 & 0x7ffU; }
    static unsigned zeros(double value) { return value == 0.0; }
    static unsigned special(double value) { return exponent(value) == 0x7ffU; }
    static unsigned nans(double value) { return value != value; }
    static double without(double value, unsigned mask) { return mask != 0 ? 0.0 : value; }

    static uint64_t bin(double value) {
        constexpr uint64_t first = 1023 + least_exponent;
        const uint64_t above = exponent(value) > first ? exponent(value) - first : 0;
        return above < exponent_bins ? above : exponent_bins - 1;
    }
    static void pairs(const double *values, uint32_t *into) {
        for (size_t i = 0; i < block_elements / 2; ++i) {
            into[i] = static_cast<uint32_t>(bin(values[i]) | bin(values[i + block_elements / 2]) << 6);
        }
    }
    static void widen(const double *values, double *into) { std::memcpy(into, values, block_elements * sizeof *into); }

    static double negated(double value, unsigned mask) {
        return std::bit_cast<double>(std::bit_cast<uint64_t>(value) ^ uint64_t{mask} << 63);
    }
    static double turned(double value, unsigned) { return value; }
};

bool works() { return true; }

} // namespace

const Kernel portable_kernel = {
    "portable",
    &works,
    &add_blocks<Lanes, Lanes, double>,
    &add_blocks<Lanes, Lanes, float>,
    &add_blocks<Lanes, Lanes, BF16>,
    &add_blocks<Lanes, Lanes, F16>,
};

} // namespace dsh
