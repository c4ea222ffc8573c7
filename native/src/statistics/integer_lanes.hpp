// From vector registers into those of integers: the pairs of a block, and the sum of lanes, for processors with AVX2.
#pragma once

#include <immintrin.h>

#include "statistics/kernel.hpp"

// Kernels for several processors include this, so everything has internal linkage: the linker must not take the copy
// that was compiled for one processor for the others.
namespace dsh {
namespace {

// Words of several pairs that are shifted take less than pairs that are fetched one by one, by an instruction or
// through the memory.
inline Pairs<4> words_of(__m128i pairs) {
    return {{static_cast<uint64_t>(_mm_cvtsi128_si64(pairs)), static_cast<uint64_t>(_mm_extract_epi64(pairs, 1))}};
}

inline Pairs<2> words_of(__m256i pairs) {
    const Pairs<4> first = words_of(_mm256_castsi256_si128(pairs));
    const Pairs<4> last = words_of(_mm256_extracti128_si256(pairs, 1));
    return {{first.words[0], first.words[1], last.words[0], last.words[1]}};
}

template <typename Lane> uint64_t sum_of_lanes(__m256i register_of_lanes) {
    alignas(32) Lane lanes[sizeof register_of_lanes / sizeof(Lane)];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), register_of_lanes);
    uint64_t sum = 0;
    for (const Lane lane : lanes) {
        sum += lane;
    }
    return sum;
}

} // namespace
} // namespace dsh
