// Cuts elements into the planes of their bytes: each kernel compiles this for its own processors.
#pragma once

#include <stddef.h>
#include <stdint.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace dsh {
namespace {

// With AVX-512 compilers narrow words by an instruction for that. With AVX2 all planes are cut at once: bytes are
// sorted within 128 bits, and then transposed.
#if defined(__AVX2__) && !defined(__AVX512F__)

constexpr size_t cut_at_once = 32;

// Sixteen bytes at `low` and as many at `high`, in one register.
__m256i halves(const void *low, const void *high) {
    const __m128i first = _mm_loadu_si128(static_cast<const __m128i *>(low));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128(static_cast<const __m128i *>(high)),
                                   1);
}

void store(unsigned char *into, __m256i bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(into), bytes); }

void cut_some(const uint16_t *words, unsigned char *planes, size_t distance) {
    const __m256i sorted =
        _mm256_broadcastsi128_si256(_mm_set_epi8(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0));
    const __m256i first = _mm256_shuffle_epi8(halves(words, words + 16), sorted);
    const __m256i second = _mm256_shuffle_epi8(halves(words + 8, words + 24), sorted);
    store(planes, _mm256_unpacklo_epi64(first, second));
    store(planes + distance, _mm256_unpackhi_epi64(first, second));
}

void cut_some(const uint32_t *words, unsigned char *planes, size_t distance) {
    const __m256i sorted =
        _mm256_broadcastsi128_si256(_mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0));
    const __m256i fours[] = {_mm256_shuffle_epi8(halves(words, words + 16), sorted),
                             _mm256_shuffle_epi8(halves(words + 4, words + 20), sorted),
                             _mm256_shuffle_epi8(halves(words + 8, words + 24), sorted),
                             _mm256_shuffle_epi8(halves(words + 12, words + 28), sorted)};
    const __m256i low_first = _mm256_unpacklo_epi32(fours[0], fours[1]);
    const __m256i low_second = _mm256_unpacklo_epi32(fours[2], fours[3]);
    const __m256i high_first = _mm256_unpackhi_epi32(fours[0], fours[1]);
    const __m256i high_second = _mm256_unpackhi_epi32(fours[2], fours[3]);
    store(planes, _mm256_unpacklo_epi64(low_first, low_second));
    store(planes + distance, _mm256_unpackhi_epi64(low_first, low_second));
    store(planes + 2 * distance, _mm256_unpacklo_epi64(high_first, high_second));
    store(planes + 3 * distance, _mm256_unpackhi_epi64(high_first, high_second));
}

#endif

// Plane `i` begins at planes + i * distance, and gets the bytes of `count` elements. What is not cut at once is cut one
// plane after the other, which compilers turn into vector instructions.
template <typename Word> void cut(const Word *words, size_t count, unsigned char *planes, size_t distance) {
    size_t at = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (sizeof(Word) == 2 || sizeof(Word) == 4) {
        for (; at + cut_at_once <= count; at += cut_at_once) {
            cut_some(words + at, planes + at, distance);
        }
    }
#endif
    for (size_t plane = 0; plane < sizeof(Word); ++plane) {
        unsigned char *__restrict__ into = planes + plane * distance;
        const Word *__restrict__ from = words;
        for (size_t i = at; i < count; ++i) {
            into[i] = static_cast<unsigned char>(from[i] >> (8 * plane));
        }
    }
}

} // namespace
} // namespace dsh
