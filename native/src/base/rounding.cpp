#include "base/rounding.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/files/io_error.hpp"
#include "base/memory/huge_pages.hpp"

namespace dsh {
namespace {

// So many numbers at a time are rounded, in loops without branches that compilers vectorize.
constexpr std::size_t strip = 1024;

constexpr std::size_t piece_bytes = cached_bytes; // of numbers, whose halves are beside them in the cache
constexpr std::size_t number_bytes = sizeof(std::uint32_t);
constexpr std::size_t half_bytes = sizeof(std::uint16_t);

// Of a sample, in elements.
constexpr std::uint64_t most_sampled = 2048;
constexpr std::uint64_t sampled_stretches = 32;
constexpr std::uint64_t sampled_line = 32;
static_assert((sampled_stretches + 1) * sampled_line <= most_sampled);

constexpr std::uint32_t sign = 0x80000000U;
constexpr std::uint32_t infinity = 0x7f800000U;

// All bits where `condition` holds, else none: compilers vectorize what has no branch.
constexpr std::uint32_t mask(bool condition) { return 0U - static_cast<std::uint32_t>(condition); }

std::uint32_t bf16_of(std::uint32_t bits) {
    const std::uint32_t nan = mask((bits & ~sign) > infinity);
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return (nan & 0x7fc0U) | (~nan & rounded);
}

// A magnitude below 2^-14 is a denormal: the sum with 0.5 rounds it to multiples of 2^-24, which are its last bits.
std::uint32_t denormal_of(std::uint32_t magnitude) {
    float number;
    std::memcpy(&number, &magnitude, sizeof number);
    number += 0.5F;
    std::uint32_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits - 0x3f000000U;
}

std::uint32_t fp16_of(std::uint32_t bits) {
    const std::uint32_t magnitude = bits & ~sign;
    const std::uint32_t nan = mask(magnitude > infinity);
    const std::uint32_t large = mask(magnitude >= 0x47800000U); // 2^16
    const std::uint32_t small = mask(magnitude < 0x38800000U);  // 2^-14
    // The exponent's bias becomes 15 from 127; a carry out of the mantissa goes where it belongs, up to infinity.
    const std::uint32_t normal = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
    // What is large is replaced before the sum: a NaN in it would be slow.
    const std::uint32_t denormal = denormal_of(small & magnitude);
    const std::uint32_t finite = (small & denormal) | (~small & normal);
    const std::uint32_t rounded = (large & 0x7c00U) | (~large & finite) | ((bits & sign) >> 16);
    return (nan & 0x7e00U) | (~nan & rounded);
}

template <std::uint32_t (*half_of)(std::uint32_t)>
void round_all(const std::byte *numbers, std::size_t count, std::byte *into) {
    std::array<std::uint32_t, strip> from{};
    std::array<std::uint16_t, strip> to;
    for (std::size_t at = 0; at < count; at += strip) {
        const std::size_t now = std::min(strip, count - at);
        std::memcpy(from.data(), numbers + at * number_bytes, now * number_bytes);
        for (std::size_t i = 0; i < strip; ++i) {
            to[i] = static_cast<std::uint16_t>(half_of(from[i]));
        }
        std::memcpy(into + at * half_bytes, to.data(), now * half_bytes);
    }
}

void copy_live(std::byte *into, std::uint64_t address, std::uint64_t nbytes) {
    const CopiedRegion piece{into, {address, nbytes}};
    if (const auto failure = copy_memory(std::span(&piece, 1))) {
        throw IoError("comparing weights with their masters, whose memory is no longer mapped,", "", 0, failure->code);
    }
}

} // namespace

void round_to_half(const std::byte *numbers, std::size_t count, Half to, std::byte *into) {
    to == Half::bf16 ? round_all<bf16_of>(numbers, count, into) : round_all<fp16_of>(numbers, count, into);
}

bool RoundedComparison::add(const Region &numbers, const Region &halves) {
    thread_local const HugePages memory = huge_pages(huge_page_bytes, "a buffer");
    static_assert(2 * piece_bytes <= huge_page_bytes);
    std::byte *const copied = memory.get();
    std::byte *const expected = copied + piece_bytes;
    std::byte *const found = expected + piece_bytes / 2;
    for (std::uint64_t done = 0; done < numbers.nbytes; done += piece_bytes) {
        const std::uint64_t nbytes = std::min<std::uint64_t>(piece_bytes, numbers.nbytes - done);
        copy_live(copied, numbers.address + done, nbytes);
        copy_live(found, halves.address + done / 2, nbytes / 2);
        round_to_half(copied, nbytes / number_bytes, to_, expected);
        if (std::memcmp(expected, found, nbytes / 2) != 0) {
            return false;
        }
        of_numbers_.add(copied, nbytes);
        of_halves_.add(found, nbytes / 2);
    }
    return true;
}

bool sample_is_rounded(const Region &numbers, const Region &halves, Half to) {
    const std::uint64_t count = halves.nbytes / half_bytes;
    std::array<std::byte, most_sampled * number_bytes> of_numbers;
    std::array<std::byte, most_sampled * half_bytes> expected;
    std::array<std::byte, most_sampled * half_bytes> found;
    std::vector<CopiedRegion> pieces;
    std::uint64_t sampled = 0;
    const auto take = [&](std::uint64_t first, std::uint64_t length) {
        pieces.push_back({of_numbers.data() + sampled * number_bytes,
                          {numbers.address + first * number_bytes, length * number_bytes}});
        pieces.push_back(
            {found.data() + sampled * half_bytes, {halves.address + first * half_bytes, length * half_bytes}});
        sampled += length;
    };
    if (count <= most_sampled) {
        take(0, count);
    } else {
        for (std::uint64_t i = 0; i < sampled_stretches; ++i) {
            take(count * i / sampled_stretches, sampled_line);
        }
        take(count - sampled_line, sampled_line);
    }
    if (sampled == 0 || copy_memory(pieces)) {
        return true;
    }
    round_to_half(of_numbers.data(), sampled, to, expected.data());
    return std::memcmp(expected.data(), found.data(), sampled * half_bytes) == 0;
}

} // namespace dsh
