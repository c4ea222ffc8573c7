// The kernel for every processor, one number at a time. The tests compare the other kernels with it.
#include <bit>
#include <cstring>

#include "statistics/kernel.hpp"

namespace dsh {
namespace {

struct Lanes {
    using Vector = double;
    using Element = double;
    using Count = uint64_t;
    static constexpr unsigned width = 1;
    struct Block {
        double vectors[block_elements];
    };

    static double all(double value) { return value; }
    static double load(const double *number) { return *number; }
    template <typename Number> static Block block(const char *numbers, Number number) {
        Block all;
        for (size_t i = 0; i < block_elements; ++i) {
            std::memcpy(&number, numbers + i * sizeof number, sizeof number);
            all.vectors[i] = widened(number);
        }
        return all;
    }
    static void store(double *number, double value) { *number = value; }

    static double min(double value, double least) { return value < least ? value : least; }
    static double max(double value, double most) { return value > most ? value : most; }
    static double sum(double a, double b) { return a + b; }
    static double product_sum(double a, double b, double c) { return a * b + c; }

    static uint64_t exponent(double value) { return std::bit_cast<uint64_t>(value) >> 52 & 0x7ffU; }

    static Count no_zeros() { return 0; }
    static Count with_zeros(Count zeros, const Block &block) {
        for (const double value : block.vectors) {
            zeros += value == 0.0;
        }
        return zeros;
    }
    static uint64_t total(Count zeros) { return zeros; }

    static bool has_special(const Block &block) {
        unsigned found = 0;
        for (const double value : block.vectors) {
            found |= special(value);
        }
        return found != 0;
    }
    static unsigned special(double value) { return exponent(value) == 0x7ffU; }
    static unsigned nans(double value) { return value != value; }
    static double without(double value, unsigned mask) { return mask != 0 ? 0.0 : value; }

    static uint64_t bin(double value) {
        constexpr uint64_t first = 1023 + least_exponent;
        const uint64_t above = exponent(value) > first ? exponent(value) - first : 0;
        return above < exponent_bins ? above : exponent_bins - 1;
    }
    static Pairs<2> pairs(const Block &block) {
        Pairs<2> pairs{};
        for (size_t i = 0; i < block_elements / 2; ++i) {
            const uint64_t second = bin(block.vectors[i + block_elements / 2]);
            pairs.words[i / 2] |= (bin(block.vectors[i]) | second << 6) << i % 2 * 32;
        }
        return pairs;
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
