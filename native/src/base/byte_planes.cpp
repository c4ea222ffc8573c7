#include "base/byte_planes.hpp"

#include <array>
#include <concepts>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace dsh {
namespace {

// So many elements at a time stay in the first-level cache between the transform and the cut. Each loop over them does
// one thing, which compilers turn into vector instructions.
constexpr std::size_t tile = 1024;

template <typename Word> struct Tile {
    std::array<Word, tile> words;
    std::array<Word, tile> base;
};

template <typename Word> constexpr unsigned bits = std::numeric_limits<Word>::digits;

template <std::unsigned_integral Word> void rotate_left(Word *words, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = static_cast<Word>(words[i] << 1 | words[i] >> (bits<Word> - 1));
    }
}

template <std::unsigned_integral Word> void rotate_right(Word *words, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = static_cast<Word>(words[i] >> 1 | words[i] << (bits<Word> - 1));
    }
}

template <std::unsigned_integral Word> void exclusive_or(Word *words, const Word *base, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = static_cast<Word>(words[i] ^ base[i]);
    }
}

template <std::unsigned_integral Word> void subtract(Word *words, const Word *base, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        const auto difference = static_cast<Word>(words[i] - base[i]);
        const auto sign = static_cast<Word>(0 - (difference >> (bits<Word> - 1)));
        words[i] = static_cast<Word>(static_cast<Word>(difference << 1) ^ sign);
    }
}

template <std::unsigned_integral Word> void add(Word *words, const Word *base, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        const auto sign = static_cast<Word>(0 - (words[i] & 1));
        words[i] = static_cast<Word>(static_cast<Word>(words[i] >> 1 ^ sign) + base[i]);
    }
}

template <typename Word>
void split(const std::byte *data, const std::byte *base, std::size_t count, Transform transform, std::byte *planes) {
    Tile<Word> part;
    for (std::size_t at = 0; at < count; at += tile) {
        const std::size_t here = count - at < tile ? count - at : tile;
        std::memcpy(part.words.data(), data + at * sizeof(Word), here * sizeof(Word));
        if (needs_base(transform)) {
            std::memcpy(part.base.data(), base + at * sizeof(Word), here * sizeof(Word));
        }
        if (transform == Transform::exclusive || transform == Transform::rotated_xor) {
            exclusive_or(part.words.data(), part.base.data(), here);
        }
        if (transform == Transform::rotated || transform == Transform::rotated_xor) {
            rotate_left(part.words.data(), here);
        }
        if (transform == Transform::difference) {
            subtract(part.words.data(), part.base.data(), here);
        }
        for (std::size_t plane = 0; plane < sizeof(Word); ++plane) {
            std::byte *__restrict__ into = planes + plane * count + at;
            const Word *__restrict__ words = part.words.data();
            for (std::size_t i = 0; i < here; ++i) {
                into[i] = static_cast<std::byte>(words[i] >> (8 * plane));
            }
        }
    }
}

// Put two halves of each element together. Whole planes joined in pairs, and the pairs again, are several times faster
// than each byte shifted to its place in a wide word.
template <std::unsigned_integral Half, std::unsigned_integral Word>
void join_halves(const Half *__restrict__ low, const Half *__restrict__ high, std::size_t count,
                 Word *__restrict__ words) {
    static_assert(sizeof(Word) == 2 * sizeof(Half));
    for (std::size_t i = 0; i < count; ++i) {
        words[i] = static_cast<Word>(static_cast<Word>(low[i]) | static_cast<Word>(high[i]) << bits<Half>);
    }
}

const std::uint8_t *bytes_at(const std::byte *plane, std::size_t at) {
    return reinterpret_cast<const std::uint8_t *>(plane) + at;
}

// Put the planes' elements [at, at + count) together.
void join_tile(const std::byte *const *planes, std::size_t at, std::size_t count, std::uint8_t *words) {
    std::memcpy(words, planes[0] + at, count);
}
void join_tile(const std::byte *const *planes, std::size_t at, std::size_t count, std::uint16_t *words) {
    join_halves(bytes_at(planes[0], at), bytes_at(planes[1], at), count, words);
}
void join_tile(const std::byte *const *planes, std::size_t at, std::size_t count, std::uint32_t *words) {
    std::array<std::uint16_t, tile> low, high;
    join_tile(planes, at, count, low.data());
    join_tile(planes + 2, at, count, high.data());
    join_halves(low.data(), high.data(), count, words);
}
void join_tile(const std::byte *const *planes, std::size_t at, std::size_t count, std::uint64_t *words) {
    std::array<std::uint32_t, tile> low, high;
    join_tile(planes, at, count, low.data());
    join_tile(planes + 4, at, count, high.data());
    join_halves(low.data(), high.data(), count, words);
}

template <typename Word>
void join(const std::byte *const *planes, const std::byte *base, std::size_t count, Transform transform,
          std::byte *data) {
    Tile<Word> part;
    for (std::size_t at = 0; at < count; at += tile) {
        const std::size_t here = count - at < tile ? count - at : tile;
        join_tile(planes, at, here, part.words.data());
        if (needs_base(transform)) {
            std::memcpy(part.base.data(), base + at * sizeof(Word), here * sizeof(Word));
        }
        if (transform == Transform::rotated || transform == Transform::rotated_xor) {
            rotate_right(part.words.data(), here);
        }
        if (transform == Transform::exclusive || transform == Transform::rotated_xor) {
            exclusive_or(part.words.data(), part.base.data(), here);
        }
        if (transform == Transform::difference) {
            add(part.words.data(), part.base.data(), here);
        }
        std::memcpy(data + at * sizeof(Word), part.words.data(), here * sizeof(Word));
    }
}

[[noreturn]] void refuse(std::size_t itemsize) {
    throw std::invalid_argument("itemsize is " + std::to_string(itemsize) + " where 1, 2, 4 or 8 bytes are known");
}

} // namespace

void split_planes(const std::byte *data, const std::byte *base, std::size_t count, std::size_t itemsize,
                  Transform transform, std::byte *planes) {
    switch (itemsize) {
    case 1:
        return split<std::uint8_t>(data, base, count, transform, planes);
    case 2:
        return split<std::uint16_t>(data, base, count, transform, planes);
    case 4:
        return split<std::uint32_t>(data, base, count, transform, planes);
    case 8:
        return split<std::uint64_t>(data, base, count, transform, planes);
    default:
        refuse(itemsize);
    }
}

void join_planes(std::span<const std::byte *const> planes, const std::byte *base, std::size_t count,
                 Transform transform, std::byte *data) {
    switch (planes.size()) {
    case 1:
        return join<std::uint8_t>(planes.data(), base, count, transform, data);
    case 2:
        return join<std::uint16_t>(planes.data(), base, count, transform, data);
    case 4:
        return join<std::uint32_t>(planes.data(), base, count, transform, data);
    case 8:
        return join<std::uint64_t>(planes.data(), base, count, transform, data);
    default:
        refuse(planes.size());
    }
}

} // namespace dsh
