// The kernel for every processor, one number at a time. The tests compare the other kernels with it.
#include <bit>
#include <cstring>

#include "statistics/kernel.hpp"

namespace dsh {
namespace {

struct Lanes {
    using Vector = double;
    static constexpr unsigned width = 1;

    static double all(double value) { return value; }
    template <typename Number> static double load(const void *numbers, Number value) {
        std::memcpy(&value, numbers, sizeof value);
        return value;
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
    static void pairs(double first, double second, uint64_t *into) { *into = bin(first) | bin(second) << 6; }

    static double negated(double value, unsigned mask) {
        return std::bit_cast<double>(std::bit_cast<uint64_t>(value) ^ uint64_t{mask} << 63);
    }
    static double turned(double value, unsigned) { return value; }
};

bool works() { return true; }

} // namespace

const Kernel portable_kernel = {"portable", &works, &add_blocks<Lanes, float>, &add_blocks<Lanes, double>};

} // namespace dsh
