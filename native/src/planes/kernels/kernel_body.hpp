// The loops of one kernel: compiled once for each kind of processor, with internal linkage. Compilers vectorize those
// over elements; those over quads use what the processor has for them.
#pragma once

#include <string.h>
#if defined(__BMI2__) || defined(__AVX512VBMI2__)
#include <immintrin.h>
#endif

#include "planes/kernels/cut.hpp"
#include "planes/kernels/floats.hpp"
#include "planes/kernels/kernel.hpp"

namespace dsh {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte is the lowest of a word");

// So many elements at a time stay in the first-level cache between the transform and the cut. Each loop over them does
// one thing, which compilers turn into vector instructions.
constexpr size_t tile = 1024;

constexpr size_t least(size_t a, size_t b) { return a < b ? a : b; }

constexpr bool is_rotated(Transform transform) {
    return transform == Transform::rotated || transform == Transform::rotated_xor;
}

constexpr bool is_exclusive(Transform transform) {
    return transform == Transform::exclusive || transform == Transform::rotated_xor;
}

template <typename Word> constexpr unsigned bits = 8 * sizeof(Word);

template <typename Word> void rotate_left(Word *words, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        words[i] = static_cast<Word>(words[i] << 1 | words[i] >> (bits<Word> - 1));
    }
}

template <typename Word> void rotate_right(Word *words, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        words[i] = static_cast<Word>(words[i] >> 1 | words[i] << (bits<Word> - 1));
    }
}

template <typename Word> void exclusive_or(Word *__restrict__ words, const Word *__restrict__ base, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        words[i] = static_cast<Word>(words[i] ^ base[i]);
    }
}

template <typename Word> void subtract(Word *__restrict__ words, const Word *__restrict__ base, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const auto difference = static_cast<Word>(words[i] - base[i]);
        const auto sign = static_cast<Word>(0 - (difference >> (bits<Word> - 1)));
        words[i] = static_cast<Word>(static_cast<Word>(difference << 1) ^ sign);
    }
}

template <typename Word> void add(Word *__restrict__ words, const Word *__restrict__ base, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const auto sign = static_cast<Word>(0 - (words[i] & 1));
        words[i] = static_cast<Word>(static_cast<Word>(words[i] >> 1 ^ sign) + base[i]);
    }
}

template <typename Word>
void split(const unsigned char *data, const unsigned char *base, size_t count, Transform transform,
           unsigned char *planes) {
    Word words[tile];
    Word others[tile];
    for (size_t at = 0; at < count; at += tile) {
        const size_t here = least(tile, count - at);
        memcpy(words, data + at * sizeof(Word), here * sizeof(Word));
        if (needs_base(transform)) {
            memcpy(others, base + at * sizeof(Word), here * sizeof(Word));
        }
        if (is_exclusive(transform)) {
            exclusive_or(words, others, here);
        }
        if (is_rotated(transform)) {
            rotate_left(words, here);
        }
        if (transform == Transform::difference) {
            subtract(words, others, here);
        }
        cut(words, here, planes + at, count);
    }
}

// Put two halves of each element together. Whole planes joined in pairs, and the pairs again, are several times faster
// than each byte shifted to its place in a wide word.
template <typename Half, typename Word>
void join_halves(const Half *__restrict__ low, const Half *__restrict__ high, size_t count, Word *__restrict__ words) {
    static_assert(sizeof(Word) == 2 * sizeof(Half));
    for (size_t i = 0; i < count; ++i) {
        words[i] = static_cast<Word>(static_cast<Word>(low[i]) | static_cast<Word>(high[i]) << bits<Half>);
    }
}

// Put `count` elements of the planes together.
void join_tile(const unsigned char *const *planes, size_t count, uint8_t *words) { memcpy(words, planes[0], count); }
void join_tile(const unsigned char *const *planes, size_t count, uint16_t *words) {
    join_halves(planes[0], planes[1], count, words);
}
void join_tile(const unsigned char *const *planes, size_t count, uint32_t *words) {
    uint16_t low[tile];
    uint16_t high[tile];
    join_tile(planes, count, low);
    join_tile(planes + 2, count, high);
    join_halves(low, high, count, words);
}
void join_tile(const unsigned char *const *planes, size_t count, uint64_t *words) {
    uint32_t low[tile];
    uint32_t high[tile];
    join_tile(planes, count, low);
    join_tile(planes + 4, count, high);
    join_halves(low, high, count, words);
}

template <typename Word>
void join(const Plane *planes, const unsigned char *base, size_t count, Transform transform, unsigned char *data) {
    unsigned char constant[sizeof(Word)][tile];
    for (size_t i = 0; i < sizeof(Word); ++i) {
        if (planes[i].is_constant) {
            memset(constant[i], *static_cast<const unsigned char *>(planes[i].bytes), tile);
        }
    }
    Word words[tile];
    Word others[tile];
    const unsigned char *from[sizeof(Word)];
    for (size_t at = 0; at < count; at += tile) {
        const size_t here = least(tile, count - at);
        for (size_t i = 0; i < sizeof(Word); ++i) {
            from[i] = planes[i].is_constant ? constant[i] : static_cast<const unsigned char *>(planes[i].bytes) + at;
        }
        join_tile(from, here, words);
        if (needs_base(transform)) {
            memcpy(others, base + at * sizeof(Word), here * sizeof(Word));
        }
        if (is_rotated(transform)) {
            rotate_right(words, here);
        }
        if (is_exclusive(transform)) {
            exclusive_or(words, others, here);
        }
        if (transform == Transform::difference) {
            add(words, others, here);
        }
        memcpy(data + at * sizeof(Word), words, here * sizeof(Word));
    }
}

constexpr size_t word_bytes = sizeof(uint64_t);

// A byte in all eight places of a word.
constexpr uint64_t everywhere(uint8_t byte) { return 0x0101010101010101U * byte; }

// The lowest bit of each byte that is 3 or more: its lower seven bits are, or it has the eighth.
constexpr uint64_t others_in(uint64_t word) {
    return (((word & everywhere(0x7f)) + everywhere(0x7d)) | word) >> 7 & everywhere(1);
}

// The lowest bit of each byte that is 3, where none is more.
constexpr uint64_t threes_in(uint64_t word) { return word & word >> 1 & everywhere(1); }

constexpr size_t quads_in(size_t count) { return (count + 3) / 4; }

// The first `nbytes` bytes, 8 of them at most, and zeros.
uint64_t first_bytes(const unsigned char *bytes, size_t nbytes) {
    uint64_t word = 0;
    if (nbytes != 0) {
        memcpy(&word, bytes, nbytes);
    }
    return word;
}

#ifdef __BMI2__

// The quads of eight bytes, none of which is more than 3, and the other way round.
uint16_t quads_of_word(uint64_t small) { return static_cast<uint16_t>(_pext_u64(small, everywhere(3))); }
uint64_t word_of_quads(uint16_t quads) { return _pdep_u64(quads, everywhere(3)); }

// The bytes of a word that `mask` has, next to each other, and the other way round.
uint64_t gathered(uint64_t word, uint64_t mask) { return _pext_u64(word, mask); }
uint64_t scattered(uint64_t bytes, uint64_t mask) { return _pdep_u64(bytes, mask); }

#else

uint16_t quads_of_word(uint64_t small) {
    const uint64_t pairs = small | small >> 6;
    const uint64_t fours = pairs | pairs >> 12;
    return static_cast<uint16_t>((fours & 0xffU) | (fours >> 24 & 0xff00U));
}

uint64_t word_of_quads(uint16_t quads) {
    const uint64_t fours = (quads & 0xffU) | static_cast<uint64_t>(quads & 0xff00U) << 24;
    const uint64_t pairs = (fours | fours << 12) & 0x000f000f000f000fU;
    return (pairs | pairs << 6) & everywhere(3);
}

uint64_t gathered(uint64_t word, uint64_t mask) {
    uint64_t found = 0;
    unsigned place = 0;
    for (uint64_t left = mask & everywhere(1); left != 0; left &= left - 1) {
        found |= (word >> __builtin_ctzll(left) & 0xffU) << place;
        place += 8;
    }
    return found;
}

uint64_t scattered(uint64_t bytes, uint64_t mask) {
    uint64_t found = 0;
    for (uint64_t left = mask & everywhere(1); left != 0; left &= left - 1) {
        found |= (bytes & 0xffU) << __builtin_ctzll(left);
        bytes >>= 8;
    }
    return found;
}

#endif

// Gather the quads and others of up to eight bytes; return the number of others.
size_t gather_word(const unsigned char *plane, size_t nbytes, unsigned char *quads, unsigned char *others) {
    const uint64_t word = first_bytes(plane, nbytes);
    const uint64_t marks = others_in(word);
    const uint64_t mask = marks * 0xffU;
    const uint16_t two = quads_of_word((word & ~mask) | marks * 3);
    memcpy(quads, &two, quads_in(nbytes));
    if (marks == 0) {
        return 0;
    }
    // As there are no more others than bytes before, all eight bytes have room where there are eight here.
    const uint64_t found = gathered(word, mask);
    memcpy(others, &found, nbytes);
    return static_cast<size_t>(__builtin_popcountll(marks));
}

// Spread up to eight bytes, of which those that are 3 come from the `known` bytes at `others`; return their number.
size_t spread_word(const unsigned char *quads, const unsigned char *others, size_t known, size_t nbytes,
                   unsigned char *plane) {
    uint16_t two = 0;
    memcpy(&two, quads, quads_in(nbytes));
    uint64_t word = word_of_quads(two);
    // Behind the last byte quads may say anything.
    const uint64_t marks = threes_in(word) & (~uint64_t{0} >> (bits<uint64_t> - 8 * nbytes));
    if (marks != 0) {
        const uint64_t mask = marks * 0xffU;
        const uint64_t next = known < word_bytes ? first_bytes(others, known) : first_bytes(others, word_bytes);
        word = (word & ~mask) | scattered(next, mask);
    }
    memcpy(plane, &word, nbytes);
    return static_cast<size_t>(__builtin_popcountll(marks));
}

#ifdef __AVX512VBMI2__

constexpr size_t wide_bytes = sizeof(__m512i);

// As gather_word of 64 bytes.
size_t gather_wide(const unsigned char *plane, unsigned char *quads, unsigned char *others) {
    const __m512i bytes = _mm512_loadu_si512(plane);
    const __m512i small = _mm512_min_epu8(bytes, _mm512_set1_epi8(3));
    const __m512i pairs = _mm512_maddubs_epi16(small, _mm512_set1_epi16(0x0401));
    const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(quads), _mm512_cvtepi32_epi8(fours));
    const __mmask64 large = _mm512_cmpgt_epu8_mask(bytes, _mm512_set1_epi8(2));
    _mm512_storeu_si512(others, _mm512_maskz_compress_epi8(large, bytes));
    return static_cast<size_t>(__builtin_popcountll(large));
}

// As spread_word of 64 bytes.
size_t spread_wide(const unsigned char *quads, const unsigned char *others, size_t known, unsigned char *plane) {
    const __m512i fours = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(quads)));
    const __m512i pairs = _mm512_or_si512(fours, _mm512_slli_epi32(fours, 12));
    const __m512i all = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 6));
    const __m512i small = _mm512_and_si512(all, _mm512_set1_epi8(3));
    const __mmask64 large = _mm512_cmpeq_epi8_mask(small, _mm512_set1_epi8(3));
    const auto wanted = static_cast<unsigned>(__builtin_popcountll(large));
    const __m512i next =
        _mm512_maskz_loadu_epi8(_bzhi_u64(~uint64_t{0}, static_cast<unsigned>(least(known, wanted))), others);
    _mm512_storeu_si512(plane, _mm512_mask_expand_epi8(small, large, next));
    return wanted;
}

#endif

size_t gather(const unsigned char *plane, size_t count, unsigned char *quads, unsigned char *others) {
    size_t found = 0;
    size_t at = 0;
#ifdef __AVX512VBMI2__
    for (; at + wide_bytes <= count; at += wide_bytes) {
        found += gather_wide(plane + at, quads + at / 4, others + found);
    }
#endif
    for (; at + word_bytes <= count; at += word_bytes) {
        found += gather_word(plane + at, word_bytes, quads + at / 4, others + found);
    }
    return at == count ? found : found + gather_word(plane + at, count - at, quads + at / 4, others + found);
}

size_t spread(const unsigned char *quads, const unsigned char *others, size_t known, size_t count,
              unsigned char *plane) {
    size_t used = 0;
    size_t at = 0;
#ifdef __AVX512VBMI2__
    for (; at + wide_bytes <= count; at += wide_bytes) {
        const size_t here = least(used, known);
        used += spread_wide(quads + at / 4, others + here, known - here, plane + at);
    }
#endif
    for (; at + word_bytes <= count; at += word_bytes) {
        const size_t here = least(used, known);
        used += spread_word(quads + at / 4, others + here, known - here, word_bytes, plane + at);
    }
    if (at < count) {
        const size_t here = least(used, known);
        used += spread_word(quads + at / 4, others + here, known - here, count - at, plane + at);
    }
    return used;
}

// The kernel that this file's loops are, as they were compiled here.
constexpr PlanesKernel kernel_that(bool (*works)()) {
    return {
        works,
        {&split<uint8_t>, &split<uint16_t>, &split<uint32_t>, &split<uint64_t>},
        {&join<uint8_t>, &join<uint16_t>, &join<uint32_t>, &join<uint64_t>},
        &gather,
        &spread,
        &take_apart,
        &take_halves_apart,
    };
}

} // namespace
} // namespace dsh
