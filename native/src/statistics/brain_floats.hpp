// A block of BF16 numbers as a kernel for AVX2 or more counts them: zeros and exponents are read from their bits, which
// are all in one register of 256, extremes and sums from the float32 numbers that begin with those bits.
#pragma once

#include <immintrin.h>

#include "statistics/integer_lanes.hpp"
#include "statistics/kernel.hpp"

// Kernels for several processors include this, so everything has internal linkage: the linker must not take the copy
// that was compiled for one processor for the others.
namespace dsh {
namespace {

template <typename Floats> struct BrainFloats : Floats {
    using Count = __m256i; // in 16 lanes, each of which counts no more than most_blocks in a call of a kernel
    struct Block {
        typename Floats::Vector vectors[block_elements / Floats::width];
        __m256i bits;
    };

    static Block block(const char *numbers, BF16) {
        Block block;
        block.bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(numbers));
        Floats::begin_with(block.bits, block.vectors);
        return block;
    }

    static Count no_zeros() { return _mm256_setzero_si256(); }
    static Count with_zeros(Count zeros, const Block &block) {
        return _mm256_sub_epi16(zeros, _mm256_cmpeq_epi16(without_sign(block), _mm256_setzero_si256()));
    }
    static uint64_t total(Count zeros) { return sum_of_lanes<uint16_t>(zeros); }

    static bool has_special(const Block &block) {
        const __m256i special = _mm256_cmpeq_epi16(exponents(block), _mm256_set1_epi16(0xff));
        return _mm256_movemask_epi8(special) != 0;
    }
    static Pairs<4> pairs(const Block &block) {
        const __m256i above = _mm256_subs_epu16(exponents(block), _mm256_set1_epi16(127 + least_exponent));
        const __m256i bins = _mm256_min_epu16(above, _mm256_set1_epi16(exponent_bins - 1));
        const __m128i second = _mm_slli_epi16(_mm256_extracti128_si256(bins, 1), 6);
        return words_of(_mm_or_si128(_mm256_castsi256_si128(bins), second));
    }

  private:
    // The bits but the sign, one place to the left.
    static __m256i without_sign(const Block &block) { return _mm256_add_epi16(block.bits, block.bits); }
    static __m256i exponents(const Block &block) { return _mm256_srli_epi16(without_sign(block), 8); }
};

} // namespace
} // namespace dsh
