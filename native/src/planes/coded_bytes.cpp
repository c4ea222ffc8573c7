#include "planes/coded_bytes.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>

namespace dsh {
namespace {

constexpr std::size_t values = 256;

using Counts = std::array<std::uint32_t, values>;

// So many bytes that repeat those before them are part of a run, which costs an entropy coder next to nothing.
constexpr std::size_t word_bytes = sizeof(std::uint64_t);

// Count the bytes of a plane that are not in a run. Four tables in turn: an increment waits for the one before it where
// both are of the same place.
Counts count_bytes(std::span<const std::byte> plane) {
    std::array<Counts, 4> turns{};
    std::uint64_t before = 0;
    std::size_t at = 0;
    for (; at + word_bytes <= plane.size(); at += word_bytes) {
        std::uint64_t word;
        std::memcpy(&word, plane.data() + at, word_bytes);
        if (word == before && at != 0) {
            continue;
        }
        before = word;
        for (unsigned i = 0; i < word_bytes; ++i) {
            ++turns[i % turns.size()][word >> (8 * i) & 0xffU];
        }
    }
    for (; at < plane.size(); ++at) {
        ++turns[0][std::to_integer<std::size_t>(plane[at])];
    }
    Counts counts;
    for (std::size_t value = 0; value < values; ++value) {
        counts[value] = turns[0][value] + turns[1][value] + turns[2][value] + turns[3][value];
    }
    return counts;
}

// n * log2(n), from a table where n is small: most are. The table is never destroyed: a daemon thread of Python may
// still pack while the process exits.
double entropy_term(std::uint64_t n) {
    static const auto table = [] {
        std::array<double, 4097> found{};
        for (std::size_t i = 2; i < found.size(); ++i) {
            found[i] = static_cast<double>(i) * std::log2(static_cast<double>(i));
        }
        return found;
    }();
    return n < table.size() ? table[n] : static_cast<double>(n) * std::log2(static_cast<double>(n));
}

// A code has a whole number of bits: a value that is more than two fifths of those that are left has one, and with it
// each of the others; what remains comes close to its entropy.
double huffman_bits(Counts counts) {
    std::uint64_t left = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
    double bits = 0;
    for (;;) {
        const auto most = std::max_element(counts.begin(), counts.end());
        if (*most == left) {
            return bits;
        }
        if (5 * std::uint64_t{*most} <= 2 * left) {
            break;
        }
        bits += static_cast<double>(left);
        left -= *most;
        *most = 0;
    }
    bits += entropy_term(left);
    for (const std::uint32_t count : counts) {
        bits -= entropy_term(count);
    }
    return bits;
}

} // namespace

double coded_bytes(std::span<const std::byte> plane) { return huffman_bits(count_bytes(plane)) / 8; }

} // namespace dsh
