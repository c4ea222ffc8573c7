// The kernel for processors with AVX-512. This file is compiled for them, so it includes no header with inline
// functions of external linkage: the linker could take those copies for every processor.
#include <immintrin.h>

#include "statistics/brain_floats.hpp"
#include "statistics/integer_lanes.hpp"
#include "statistics/kernel.hpp"

namespace dsh {
namespace {

struct Lanes {
    using Vector = __m512d;
    using Element = double;
    using Count = uint64_t;
    static constexpr unsigned width = 8;
    struct Block {
        Vector vectors[block_elements / width];
    };

    static Vector all(double value) { return _mm512_set1_pd(value); }
    static Vector load(const double *numbers) { return _mm512_loadu_pd(numbers); }
    static Block block(const char *numbers, double) {
        const auto *first = reinterpret_cast<const double *>(numbers);
        return {{load(first), load(first + width)}};
    }
    static void store(double *numbers, Vector values) { _mm512_storeu_pd(numbers, values); }

    // When one argument is NaN, the instruction returns the second.
    static Vector min(Vector values, Vector least) { return _mm512_min_pd(values, least); }
    static Vector max(Vector values, Vector most) { return _mm512_max_pd(values, most); }
    static Vector sum(Vector a, Vector b) { return _mm512_add_pd(a, b); }
    static Vector product_sum(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }

    static Count no_zeros() { return 0; }
    static Count with_zeros(Count zeros, const Block &block) {
        const unsigned first = _mm512_fpclass_pd_mask(block.vectors[0], 0x06);
        const unsigned second = _mm512_fpclass_pd_mask(block.vectors[1], 0x06);
        return zeros + static_cast<unsigned>(__builtin_popcount(first | second << width));
    }
    static uint64_t total(Count zeros) { return zeros; }

    static bool has_special(const Block &block) { return (special(block.vectors[0]) | special(block.vectors[1])) != 0; }
    static unsigned special(Vector values) { return _mm512_fpclass_pd_mask(values, 0x99); }
    static unsigned nans(Vector values) { return _mm512_fpclass_pd_mask(values, 0x81); }
    static Vector without(Vector values, unsigned mask) {
        return _mm512_maskz_mov_pd(static_cast<__mmask8>(~mask), values);
    }

    static __m512i bins(Vector values) {
        const __m512i exponents =
            _mm512_and_si512(_mm512_srli_epi64(_mm512_castpd_si512(values), 52), _mm512_set1_epi64(0x7ff));
        const __m512i above = _mm512_subs_epu16(exponents, _mm512_set1_epi64(1023 + least_exponent));
        return _mm512_min_epu16(above, _mm512_set1_epi64(exponent_bins - 1));
    }
    static Pairs<2> pairs(const Block &block) {
        const __m512i second = _mm512_slli_epi64(bins(block.vectors[1]), 6);
        const __m512i both = _mm512_or_si512(bins(block.vectors[0]), second);
        return words_of(_mm512_cvtepi64_epi32(both));
    }
    static void widen(const Vector *values, Vector *into) {
        into[0] = values[0];
        into[1] = values[1];
    }

    static Vector negated(Vector values, unsigned mask) {
        return _mm512_mask_sub_pd(values, static_cast<__mmask8>(mask), _mm512_setzero_pd(), values);
    }
    static Vector turned(Vector values, unsigned turn) {
        const __m512i lanes = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
        return _mm512_permutexvar_pd(_mm512_xor_si512(lanes, _mm512_set1_epi64(turn)), values);
    }
};

struct Floats {
    using Vector = __m512;
    using Element = float;
    using Count = uint64_t;
    static constexpr unsigned width = 16;
    struct Block {
        Vector vectors[block_elements / width];
    };

    static Vector all(double value) { return _mm512_set1_ps(static_cast<float>(value)); }
    static Block block(const char *numbers, float) { return {{_mm512_loadu_ps(numbers)}}; }
    static Block block(const char *numbers, F16) {
        return {{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(numbers)))}};
    }
    // Put the numbers whose upper halves are these into the vector.
    static void begin_with(__m256i halves, Vector *into) {
        *into = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    static void store(float *numbers, Vector values) { _mm512_storeu_ps(numbers, values); }

    static Vector min(Vector values, Vector least) { return _mm512_min_ps(values, least); }
    static Vector max(Vector values, Vector most) { return _mm512_max_ps(values, most); }

    static Count no_zeros() { return 0; }
    static Count with_zeros(Count zeros, const Block &block) {
        return zeros + static_cast<unsigned>(__builtin_popcount(_mm512_fpclass_ps_mask(*block.vectors, 0x06)));
    }
    static uint64_t total(Count zeros) { return zeros; }
    static bool has_special(const Block &block) { return _mm512_fpclass_ps_mask(*block.vectors, 0x99) != 0; }

    static Pairs<2> pairs(const Block &block) {
        const __m512i exponents =
            _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(*block.vectors), 23), _mm512_set1_epi32(0xff));
        const __m512i above = _mm512_subs_epu16(exponents, _mm512_set1_epi32(127 + least_exponent));
        const __m512i bins = _mm512_min_epu16(above, _mm512_set1_epi32(exponent_bins - 1));
        const __m256i second = _mm256_slli_epi32(_mm512_extracti64x4_epi64(bins, 1), 6);
        return words_of(_mm256_or_si256(_mm512_castsi512_si256(bins), second));
    }
    static void widen(const Vector *values, __m512d *into) {
        into[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(*values));
        into[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(*values, 1));
    }
};

bool works() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

} // namespace

const Kernel avx512_kernel = {
    "avx512",
    &works,
    &add_blocks<Lanes, Lanes, double>,
    &add_blocks<Lanes, Floats, float>,
    &add_blocks<Lanes, BrainFloats<Floats>, BF16>,
    &add_blocks<Lanes, Floats, F16>,
};

} // namespace dsh
