// The kernel for processors with AVX2. This file is compiled for them, so it includes no header with inline functions
// of external linkage: the linker could take those copies for every processor.
#include <immintrin.h>

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
    static constexpr unsigned width = 4;

    static Vector all(double value) { return _mm256_set1_pd(value); }
    static Vector load(const void *numbers, double) { return _mm256_loadu_pd(static_cast<const double *>(numbers)); }
    static void store(double *numbers, Vector values) { _mm256_storeu_pd(numbers, values); }

    // When one argument is NaN, the instruction returns the second.
    static Vector min(Vector values, Vector least) { return _mm256_min_pd(values, least); }
    static Vector max(Vector values, Vector most) { return _mm256_max_pd(values, most); }
    static Vector sum(Vector a, Vector b) { return _mm256_add_pd(a, b); }
    static Vector product_sum(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }

    static unsigned mask(Vector comparison) { return static_cast<unsigned>(_mm256_movemask_pd(comparison)); }
    static unsigned zeros(Vector values) { return mask(_mm256_cmp_pd(values, _mm256_setzero_pd(), _CMP_EQ_OQ)); }
    static unsigned special(Vector values) {
        const Vector magnitudes = _mm256_andnot_pd(_mm256_set1_pd(-0.0), values);
        return mask(_mm256_cmp_pd(magnitudes, _mm256_set1_pd(__builtin_inf()), _CMP_NLT_UQ));
    }
    static unsigned nans(Vector values) { return mask(_mm256_cmp_pd(values, values, _CMP_UNORD_Q)); }
    static Vector without(Vector values, unsigned mask) {
        const __m256i lane_bits = _mm256_set_epi64x(8, 4, 2, 1);
        const __m256i here = _mm256_and_si256(_mm256_set1_epi64x(mask), lane_bits);
        return _mm256_andnot_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(here, lane_bits)), values);
    }

    static __m256i bins(Vector values) {
        const __m256i exponents =
            _mm256_and_si256(_mm256_srli_epi64(_mm256_castpd_si256(values), 52), _mm256_set1_epi64x(0x7ff));
        const __m256i above = _mm256_subs_epu16(exponents, _mm256_set1_epi64x(1023 + least_exponent));
        return _mm256_min_epu16(above, _mm256_set1_epi64x(exponent_bins - 1));
    }
    static void pairs(const Vector *values, uint32_t *into) {
        const __m256i even_lanes = _mm256_set_epi32(0, 0, 0, 0, 6, 4, 2, 0);
        for (unsigned i = 0; i < 2; ++i) {
            const __m256i both = _mm256_or_si256(bins(values[i]), _mm256_slli_epi64(bins(values[i + 2]), 6));
            const __m256i packed = _mm256_permutevar8x32_epi32(both, even_lanes);
            _mm_store_si128(reinterpret_cast<__m128i *>(into + i * width), _mm256_castsi256_si128(packed));
        }
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
    static constexpr unsigned width = 8;

    static Vector all(double value) { return _mm256_set1_ps(static_cast<float>(value)); }
    static Vector load(const void *numbers, float) { return _mm256_loadu_ps(static_cast<const float *>(numbers)); }
    static Vector load(const void *numbers, BF16) {
        const __m128i halves = _mm_loadu_si128(static_cast<const __m128i *>(numbers));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    static Vector load(const void *numbers, F16) {
        return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(numbers)));
    }
    static void store(float *numbers, Vector values) { _mm256_storeu_ps(numbers, values); }

    static Vector min(Vector values, Vector least) { return _mm256_min_ps(values, least); }
    static Vector max(Vector values, Vector most) { return _mm256_max_ps(values, most); }
    static unsigned mask(Vector comparison) { return static_cast<unsigned>(_mm256_movemask_ps(comparison)); }
    static unsigned zeros(Vector values) { return mask(_mm256_cmp_ps(values, _mm256_setzero_ps(), _CMP_EQ_OQ)); }
    static unsigned special(Vector values) {
        const Vector magnitudes = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), values);
        return mask(_mm256_cmp_ps(magnitudes, _mm256_set1_ps(__builtin_inff()), _CMP_NLT_UQ));
    }

    static __m256i bins(Vector values) {
        const __m256i exponents =
            _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(values), 23), _mm256_set1_epi32(0xff));
        const __m256i above = _mm256_subs_epu16(exponents, _mm256_set1_epi32(127 + least_exponent));
        return _mm256_min_epu16(above, _mm256_set1_epi32(exponent_bins - 1));
    }
    static void pairs(const Vector *values, uint32_t *into) {
        _mm256_store_si256(reinterpret_cast<__m256i *>(into),
                           _mm256_or_si256(bins(values[0]), _mm256_slli_epi32(bins(values[1]), 6)));
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
    &add_blocks<Lanes, Floats, BF16>,
    &add_blocks<Lanes, Floats, F16>,
};

} // namespace dsh
