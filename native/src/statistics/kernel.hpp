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
    uint32_t pairs[pair_tables][exponent_bins * exponent_bins]; // two elements of a block are counted together
};

// The pairs of a block, so many to a word.
template <unsigned per_word> struct Pairs {
    uint64_t words[block_elements / 2 / per_word];
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
// in a register. Extremes and exponents are the same in both. Its `Block` is 16 numbers, at least as such vectors.
template <typename Lanes, typename Counted> struct BlockSums {
    using Vector = typename Lanes::Vector;
    static constexpr unsigned width = Lanes::width;
    static constexpr unsigned vectors = block_elements / width;
    static constexpr unsigned chains = 2; // hide an addition's latency

    typename Counted::Vector min, max;
    Vector sum[chains], squares[chains];
    typename Counted::Count zeros = Counted::no_zeros();

    BlockSums() {
        min = Counted::all(__builtin_inf());
        max = Counted::all(-__builtin_inf());
        for (unsigned chain = 0; chain < chains; ++chain) {
            sum[chain] = squares[chain] = Lanes::all(0.0);
        }
    }

    // Add one block of 16 numbers, at any address.
    template <typename Number> void add(const char *numbers, Sketching sketching, uint64_t hash, Tally &tally) {
        const typename Counted::Block counted = Counted::block(numbers, Number{});
        for (const auto &some : counted.vectors) {
            min = Counted::min(some, min);
            max = Counted::max(some, max);
        }
        zeros = Counted::with_zeros(zeros, counted);
        count(Counted::pairs(counted), tally);
        Vector values[vectors];
        Counted::widen(counted.vectors, values);
        if (Counted::has_special(counted)) {
            set_apart(values, tally);
        }
        for (unsigned i = 0; i < vectors; ++i) {
            sum[i % chains] = Lanes::sum(values[i], sum[i % chains]);
            squares[i % chains] = Lanes::product_sum(values[i], values[i], squares[i % chains]);
        }
        if (sketching.buckets != nullptr) {
            place(values, hash, sketching.buckets + block_elements * row_of(hash, sketching.row_mask));
        }
    }

    template <unsigned per_word> static void count(const Pairs<per_word> &pairs, Tally &tally) {
        constexpr unsigned bits = 64 / per_word;
        for (uint64_t some : pairs.words) {
            for (unsigned i = 0; i < per_word; ++i, some >>= bits) {
                ++tally.pairs[i % pair_tables][some & (uint64_t{1} << bits) - 1];
            }
        }
    }

    // Count NaN and Inf, and replace them by zeros, which change no sum.
    static void set_apart(Vector *values, Tally &tally) {
        for (unsigned i = 0; i < vectors; ++i) {
            const unsigned special = Lanes::special(values[i]);
            const auto nan = static_cast<unsigned>(__builtin_popcount(Lanes::nans(values[i])));
            tally.nan += nan;
            tally.inf += static_cast<unsigned>(__builtin_popcount(special)) - nan;
            values[i] = Lanes::without(values[i], special);
        }
    }

    static void place(const Vector *values, uint64_t hash, double *row) {
        const unsigned turn = turn_of(hash);
        const unsigned signs = signs_of(hash);
        for (unsigned i = 0; i < vectors; ++i) {
            double *target = row + width * (i ^ turn / width);
            const Vector signed_values = Lanes::negated(values[i], signs >> i * width);
            Lanes::store(target, Lanes::sum(Lanes::turned(signed_values, turn % width), Lanes::load(target)));
        }
    }

    void into(Tally &tally) const {
        tally.zeros += Counted::total(zeros);
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
