// The kernel for processors with AVX2. This file is compiled for them, so it includes no header with inline functions
// of external linkage: the linker could take those copies for every processor.
#include <immintrin.h>

#include "statistics/brain_floats.hpp"
#include "statistics/integer_lanes.hpp"
#include "statistics/kernel.hpp"

namespace dsh {
namespace {

// The sign bits of the lanes of a mask. One is needed for every four numbers of a sketch, and a load takes less than
// making it from the mask.
alignas(32) constexpr double sign_bits[16][4] = {
    {0.0, 0.0, 0.0, 0.0},   {-0.0, 0.0, 0.0, 0.0},   {0.0, -0.0, 0.0, 0.0},   {-0.0, -0.0, 0.0, 0.0},
    {0.0, 0.0, -0.0, 0.0},  {-0.0, 0.0, -0.0, 0.0},  {0.0, -0.0, -0.0, 0.0},  {-0.0, -0.0, -0.0, 0.0},
    {0.0, 0.0, 0.0, -0.0},  {-0.0, 0.0, 0.0, -0.0},  {0.0, -0.0, 0.0, -0.0},  {-0.0, -0.0, 0.0, -0.0},
    {0.0, 0.0, -0.0, -0.0}, {-0.0, 0.0, -0.0, -0.0}, {0.0, -0.0, -0.0, -0.0}, {-0.0, -0.0, -0.0, -0.0},
};

struct Lanes {
    using Vector = __m256d;
    using Element = double;
    using Count = __m256i;
    static constexpr unsigned width = 4;
    struct Block {
        Vector vectors[block_elements / width];
    };

    static Vector all(double value) { return _mm256_set1_pd(value); }
    static Vector load(const double *numbers) { return _mm256_loadu_pd(numbers); }
    static Block block(const char *numbers, double) {
        const auto *first = reinterpret_cast<const double *>(numbers);
        return {{load(first), load(first + width), load(first + 2 * width), load(first + 3 * width)}};
    }
    static void store(double *numbers, Vector values) { _mm256_storeu_pd(numbers, values); }

    // When one argument is NaN, the instruction returns the second.
    static Vector min(Vector values, Vector least) { return _mm256_min_pd(values, least); }
    static Vector max(Vector values, Vector most) { return _mm256_max_pd(values, most); }
    static Vector sum(Vector a, Vector b) { return _mm256_add_pd(a, b); }
    static Vector product_sum(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }

    static Count no_zeros() { return _mm256_setzero_si256(); }
    static Count with_zeros(Count zeros, const Block &block) {
        for (const Vector values : block.vectors) {
            const Vector found = _mm256_cmp_pd(values, _mm256_setzero_pd(), _CMP_EQ_OQ);
            zeros = _mm256_sub_epi64(zeros, _mm256_castpd_si256(found));
        }
        return zeros;
    }
    static uint64_t total(Count zeros) { return sum_of_lanes<uint64_t>(zeros); }

    static __m256i exponents(Vector values) {
        return _mm256_and_si256(_mm256_srli_epi64(_mm256_castpd_si256(values), 52), _mm256_set1_epi64x(0x7ff));
    }
    static Vector specials(Vector values) {
        return _mm256_castsi256_pd(_mm256_cmpeq_epi64(exponents(values), _mm256_set1_epi64x(0x7ff)));
    }
    static bool has_special(const Block &block) {
        const Vector first = _mm256_or_pd(specials(block.vectors[0]), specials(block.vectors[1]));
        const Vector last = _mm256_or_pd(specials(block.vectors[2]), specials(block.vectors[3]));
        return _mm256_movemask_pd(_mm256_or_pd(first, last)) != 0;
    }
    static unsigned mask(Vector comparison) { return static_cast<unsigned>(_mm256_movemask_pd(comparison)); }
    static unsigned special(Vector values) { return mask(specials(values)); }
    static unsigned nans(Vector values) { return mask(_mm256_cmp_pd(values, values, _CMP_UNORD_Q)); }
    static Vector without(Vector values, unsigned mask) {
        const __m256i lane_bits = _mm256_set_epi64x(8, 4, 2, 1);
        const __m256i here = _mm256_and_si256(_mm256_set1_epi64x(mask), lane_bits);
        return _mm256_andnot_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(here, lane_bits)), values);
    }

    static __m256i bins(Vector values) {
        const __m256i above = _mm256_subs_epu16(exponents(values), _mm256_set1_epi64x(1023 + least_exponent));
        return _mm256_min_epu16(above, _mm256_set1_epi64x(exponent_bins - 1));
    }
    static Pairs<2> pairs(const Block &block) {
        const __m256i some = _mm256_or_si256(bins(block.vectors[0]), _mm256_slli_epi64(bins(block.vectors[1]), 6));
        const __m256i others = _mm256_or_si256(bins(block.vectors[2]), _mm256_slli_epi64(bins(block.vectors[3]), 6));
        return words_of(_mm256_or_si256(some, _mm256_slli_epi64(others, 32)));
    }
    static void widen(const Vector *values, Vector *into) {
        for (unsigned i = 0; i < block_elements / width; ++i) {
            into[i] = values[i];
        }
    }

    static Vector negated(Vector values, unsigned mask) {
        return _mm256_xor_pd(values, _mm256_load_pd(sign_bits[mask & 15U]));
    }
    static Vector turned(Vector values, unsigned turn) {
        const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
        const __m256i from = _mm256_xor_si256(lanes, _mm256_set1_epi32(static_cast<int>(2 * turn)));
        return _mm256_castsi256_pd(_mm256_permutevar8x32_epi32(_mm256_castpd_si256(values), from));
    }
};

struct Floats {
    using Vector = __m256;
    using Element = float;
    using Count = __m256i;
    static constexpr unsigned width = 8;
    struct Block {
        Vector vectors[block_elements / width];
    };

    static Vector all(double value) { return _mm256_set1_ps(static_cast<float>(value)); }
    static Block block(const char *numbers, float) {
        const auto *first = reinterpret_cast<const float *>(numbers);
        return {{_mm256_loadu_ps(first), _mm256_loadu_ps(first + width)}};
    }
    static Block block(const char *numbers, F16) {
        const auto *first = reinterpret_cast<const __m128i *>(numbers);
        return {{_mm256_cvtph_ps(_mm_loadu_si128(first)), _mm256_cvtph_ps(_mm_loadu_si128(first + 1))}};
    }
    // Put the numbers whose upper halves are these into the two vectors.
    static void begin_with(__m256i halves, Vector *into) {
        const __m256i in_turn = _mm256_permute4x64_epi64(halves, 0xd8); // unpacking works within 128 bits
        into[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), in_turn));
        into[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), in_turn));
    }
    static void store(float *numbers, Vector values) { _mm256_storeu_ps(numbers, values); }

    static Vector min(Vector values, Vector least) { return _mm256_min_ps(values, least); }
    static Vector max(Vector values, Vector most) { return _mm256_max_ps(values, most); }

    static Count no_zeros() { return _mm256_setzero_si256(); }
    static Count with_zeros(Count zeros, const Block &block) {
        for (const Vector values : block.vectors) {
            const Vector found = _mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_EQ_OQ);
            zeros = _mm256_sub_epi32(zeros, _mm256_castps_si256(found));
        }
        return zeros;
    }
    static uint64_t total(Count zeros) { return sum_of_lanes<uint32_t>(zeros); }

    static __m256i exponents(Vector values) {
        return _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(values), 23), _mm256_set1_epi32(0xff));
    }
    static bool has_special(const Block &block) {
        const __m256i all_ones = _mm256_set1_epi32(0xff);
        const __m256i first = _mm256_cmpeq_epi32(exponents(block.vectors[0]), all_ones);
        const __m256i second = _mm256_cmpeq_epi32(exponents(block.vectors[1]), all_ones);
        return _mm256_movemask_epi8(_mm256_or_si256(first, second)) != 0;
    }
    static __m256i bins(Vector values) {
        const __m256i above = _mm256_subs_epu16(exponents(values), _mm256_set1_epi32(127 + least_exponent));
        return _mm256_min_epu16(above, _mm256_set1_epi32(exponent_bins - 1));
    }
    static Pairs<2> pairs(const Block &block) {
        const __m256i second = _mm256_slli_epi32(bins(block.vectors[1]), 6);
        return words_of(_mm256_or_si256(bins(block.vectors[0]), second));
    }
    static void widen(const Vector *values, __m256d *into) {
        for (unsigned i = 0; i < block_elements / width; ++i) {
            into[2 * i] = _mm256_cvtps_pd(_mm256_castps256_ps128(values[i]));
            into[2 * i + 1] = _mm256_cvtps_pd(_mm256_extractf128_ps(values[i], 1));
        }
    }
};

bool works() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

} // namespace

const Kernel avx2_kernel = {
    "avx2",
    &works,
    &add_blocks<Lanes, Lanes, double>,
    &add_blocks<Lanes, Floats, float>,
    &add_blocks<Lanes, BrainFloats<Floats>, BF16>,
    &add_blocks<Lanes, Floats, F16>,
};

} // namespace dsh
