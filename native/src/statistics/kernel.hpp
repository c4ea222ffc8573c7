// The statistics of whole blocks of 16 numbers, written once for every width of vector registers.
#pragma once

#include "statistics/halves.hpp"
#include "statistics/sketch_placement.hpp"

namespace dsh {

constexpr size_t exponent_bins = 64;
constexpr int least_exponent = -52;
constexpr size_t pair_tables = 2;  // used in turn, because an increment waits for the store of the one before it
constexpr size_t most_blocks = 64; // of one call of a kernel

// The counts so far. A zero is also counted in the first bin, a NaN or Inf in the last; statistics.cpp corrects that.
struct Tally {
    uint64_t nan;
    uint64_t inf;
    uint64_t zeros;
    uint64_t padding; // zeros that are no elements, and counted in the bins alone
    double min;       // +Inf while there is none
    double max;       // -Inf
    double sum;
    double sum_of_squares;
    uint32_t pairs[pair_tables][exponent_bins * exponent_bins]; // elements 8 apart are counted together
};

// The sketch to add to: (row_mask + 1) rows of 16 buckets; `buckets` is null when no sketch is wanted.
struct Sketching {
    double *buckets;
    uint64_t row_mask;
    uint64_t state;
};

using AddBlocks = void (*)(const void *numbers, size_t blocks, uint64_t first_block, Sketching sketching, Tally &tally);

// One function for each form of numbers. The order in which numbers are added up is the same for all forms.
struct Kernel {
    const char *name;
    bool (*works)(); // on this processor
    AddBlocks f64;
    AddBlocks f32;
    AddBlocks bf16;
    AddBlocks f16;
};

extern const Kernel portable_kernel;
extern const Kernel avx2_kernel;
extern const Kernel avx512_kernel;

namespace {

// `Lanes` is a vector register of a few float64: its width divides 16, its masks are the low bits of an unsigned.
// `Counted` is one of the numbers as they are counted: float64 too, or float32 for what is no wider, with twice as many
// in a register. Extremes and exponents are the same in both.
template <typename Lanes, typename Counted> struct BlockSums {
    using Vector = typename Lanes::Vector;
    static constexpr unsigned width = Lanes::width;
    static constexpr unsigned vectors = block_elements / width;
    static constexpr unsigned chains = 2; // hide an addition's latency

    typename Counted::Vector min, max;
    Vector sum[chains], squares[chains];
    uint64_t zeros = 0;

    BlockSums() {
        min = Counted::all(__builtin_inf());
        max = Counted::all(-__builtin_inf());
        for (unsigned chain = 0; chain < chains; ++chain) {
            sum[chain] = squares[chain] = Lanes::all(0.0);
        }
    }

    // Add one block of 16 numbers, at any address.
    template <typename Number> void add(const char *numbers, Sketching sketching, uint64_t hash, Tally &tally) {
        typename Counted::Vector counted[block_elements / Counted::width];
        Vector values[vectors];
        alignas(64) uint32_t pairs[block_elements / 2];
        unsigned special = 0;
        for (unsigned i = 0; i < block_elements / Counted::width; ++i) {
            counted[i] = Counted::load(numbers + i * Counted::width * sizeof(Number), Number{});
            min = Counted::min(counted[i], min);
            max = Counted::max(counted[i], max);
            zeros += static_cast<unsigned>(__builtin_popcount(Counted::zeros(counted[i])));
            special |= Counted::special(counted[i]) << i * Counted::width;
        }
        Counted::pairs(counted, pairs);
        for (unsigned i = 0; i < block_elements / 2; ++i) {
            ++tally.pairs[i % pair_tables][pairs[i]];
        }
        Counted::widen(counted, values);
        if (special != 0) {
            set_apart(values, special, tally);
        }
        for (unsigned i = 0; i < vectors; ++i) {
            sum[i % chains] = Lanes::sum(values[i], sum[i % chains]);
            squares[i % chains] = Lanes::product_sum(values[i], values[i], squares[i % chains]);
        }
        if (sketching.buckets != nullptr) {
            place(values, hash, sketching.buckets + block_elements * row_of(hash, sketching.row_mask));
        }
    }

    // Count NaN and Inf, and replace them by zeros, which change no sum.
    static void set_apart(Vector *values, unsigned special, Tally &tally) {
        for (unsigned i = 0; i < vectors; ++i) {
            const auto nan = static_cast<unsigned>(__builtin_popcount(Lanes::nans(values[i])));
            const unsigned here = special >> i * width & ((1U << width) - 1);
            tally.nan += nan;
            tally.inf += static_cast<unsigned>(__builtin_popcount(here)) - nan;
            values[i] = Lanes::without(values[i], here);
        }
    }

    static void place(const Vector *values, uint64_t hash, double *row) {
        const unsigned turn = turn_of(hash);
        const unsigned signs = signs_of(hash);
        for (unsigned i = 0; i < vectors; ++i) {
            double *target = row + width * (i ^ turn / width);
            const Vector signed_values = Lanes::negated(values[i], signs >> i * width);
            Lanes::store(target, Lanes::sum(Lanes::turned(signed_values, turn % width), Lanes::load(target, double{})));
        }
    }

    void into(Tally &tally) const {
        tally.zeros += zeros;
        typename Counted::Element least[Counted::width], most[Counted::width];
        Counted::store(least, min);
        Counted::store(most, max);
        for (unsigned lane = 0; lane < Counted::width; ++lane) {
            tally.min = least[lane] < tally.min ? least[lane] : tally.min;
            tally.max = most[lane] > tally.max ? most[lane] : tally.max;
        }
        for (unsigned chain = 0; chain < chains; ++chain) {
            double lanes[2][width];
            Lanes::store(lanes[0], sum[chain]);
            Lanes::store(lanes[1], squares[chain]);
            for (unsigned lane = 0; lane < width; ++lane) {
                tally.sum += lanes[0][lane];
                tally.sum_of_squares += lanes[1][lane];
            }
        }
    }
};

template <typename Lanes, typename Counted, typename Number>
void add_blocks(const void *numbers, size_t blocks, uint64_t first_block, Sketching sketching, Tally &tally) {
    uint64_t hashes[most_blocks];
    for (size_t block = 0; block < blocks; ++block) {
        hashes[block] = block_hash(sketching.state, first_block + block);
    }
    BlockSums<Lanes, Counted> sums;
    for (size_t block = 0; block < blocks; ++block) {
        const char *first = static_cast<const char *>(numbers) + block * block_elements * sizeof(Number);
        sums.template add<Number>(first, sketching, hashes[block], tally);
    }
    sums.into(tally);
}

} // namespace
} // namespace dsh
