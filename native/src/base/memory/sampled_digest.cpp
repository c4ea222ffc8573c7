#include "base/memory/sampled_digest.hpp"

#include <algorithm>
#include <array>
#include <cstddef>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace dsh {
namespace {

constexpr std::uint64_t line_bytes = 64;
constexpr std::uint64_t least_lines = 16;
constexpr std::uint64_t bytes_for_a_line = 8 << 10;

// Smaller regions come from a heap, whose pages stay mapped when a part of it is freed.
constexpr std::uint64_t own_mapping_bytes = 128 << 10;

// Lines are far apart, so the processor does not guess the next one: they are requested this far ahead of their use.
constexpr std::size_t requested_ahead = 32;

// The finalizer of SplitMix64.
std::uint64_t mixed(std::uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
    return value ^ (value >> 31);
}

// Takes pieces of memory in the order of their regions, and reads each of them a little later.
class Reading {
  public:
    explicit Reading(std::vector<std::uint64_t> &digests) : digests_(digests) {}

    void add(std::size_t region, std::uint64_t address, std::uint64_t nbytes) {
        if (count_ >= requested_ahead) {
            read(pieces_[count_ % requested_ahead]);
        }
        for (std::uint64_t at = 0; at < nbytes; at += line_bytes) {
            __builtin_prefetch(reinterpret_cast<const void *>(address + at));
        }
        __builtin_prefetch(reinterpret_cast<const void *>(address + nbytes - 1));
        pieces_[count_ % requested_ahead] = {region, address, nbytes};
        ++count_;
    }

    void finish() {
        const std::size_t waiting = std::min(count_, requested_ahead);
        for (std::size_t i = count_ - waiting; i < count_; ++i) {
            read(pieces_[i % requested_ahead]);
        }
        count_ = 0;
    }

  private:
    struct Piece {
        std::size_t region;
        std::uint64_t address;
        std::uint64_t nbytes;
    };

    void read(const Piece &piece) {
        std::uint64_t &digest = digests_[piece.region];
        digest = XXH3_64bits_withSeed(reinterpret_cast<const void *>(piece.address), piece.nbytes, digest);
    }

    std::vector<std::uint64_t> &digests_;
    std::array<Piece, requested_ahead> pieces_{};
    std::size_t count_ = 0;
};

void add_sample(Reading &reading, std::size_t region, std::uint64_t address, std::uint64_t nbytes, std::uint64_t seed) {
    // The last bytes, which may be no full line, and a line somewhere in each of equal stretches of full lines. Lines
    // are counted from the first byte, not from the nearest multiple of their length: equal bytes have equal digests
    // wherever they are.
    const std::uint64_t lines = nbytes / line_bytes;
    const std::uint64_t stretches = std::min(lines, std::max(least_lines, nbytes / bytes_for_a_line));
    reading.add(region, address, line_bytes);
    for (std::uint64_t i = 0; i < stretches; ++i) {
        const std::uint64_t first = lines * i / stretches;
        const std::uint64_t length = lines * (i + 1) / stretches - first;
        reading.add(region, address + (first + mixed(seed + i) % length) * line_bytes, line_bytes);
    }
    reading.add(region, address + nbytes - line_bytes, line_bytes);
}

} // namespace

std::vector<std::uint64_t> sampled_digests(std::span<const Region> regions, std::uint64_t seed) {
    std::vector<std::uint64_t> digests(regions.size(), 0);
    Reading reading(digests);
    for (std::size_t i = 0; i < regions.size(); ++i) {
        const auto [address, nbytes] = regions[i];
        if (nbytes >= own_mapping_bytes) {
            // What was requested of the regions before is read first: the look at this one takes a while.
            reading.finish();
            if (!is_mapped(regions[i])) {
                continue;
            }
        }
        if (nbytes <= sampled_whole_bytes) {
            if (nbytes > 0) {
                reading.add(i, address, nbytes);
            }
        } else {
            add_sample(reading, i, address, nbytes, mixed(seed));
        }
    }
    reading.finish();
    return digests;
}

} // namespace dsh
