// The block sizes and queue depths that the writer and the reader accept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace dsh {

constexpr std::uint64_t block_granule = 4096;
constexpr std::uint64_t most_block_bytes = 1 << 30;
constexpr std::size_t most_depth = 1024;
constexpr std::uint64_t default_block_bytes = 4 << 20;
constexpr std::size_t default_depth = 8;

// Throws std::invalid_argument unless both are within the limits.
inline void require_limits(std::uint64_t block_bytes, std::size_t depth) {
    if (block_bytes == 0 || block_bytes % block_granule != 0 || block_bytes > most_block_bytes) {
        throw std::invalid_argument("block_bytes must be a multiple of " + std::to_string(block_granule) + " up to " +
                                    std::to_string(most_block_bytes) + ", not " + std::to_string(block_bytes));
    }
    if (depth == 0 || depth > most_depth) {
        throw std::invalid_argument("depth must be between 1 and " + std::to_string(most_depth) + ", not " +
                                    std::to_string(depth));
    }
}

} // namespace dsh
