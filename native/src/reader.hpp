// Extents of files straight into memory, in parallel, with the checksum of each computed on the way.
//
// Large extents whose address is congruent to their offset are read without a copy; the rest passes through a bounce
// buffer, neighbours together in one read. Hashing follows the reads of a file in order and overlaps with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/checksum.hpp"
#include "blocks/cutting.hpp"

namespace dsh {

struct ReadRequest {
    std::size_t file;
    Extent extent;
};

// The checksum of every request, in the order given. Throws IoError naming path and offset (a file that ends early is
// EIO), and std::invalid_argument when two requests overlap in a file. On an error the targets hold an undefined
// mixture.
std::vector<Digest> read(const std::vector<std::string> &paths, const std::vector<ReadRequest> &requests,
                         std::uint64_t block_bytes, std::size_t depth);

} // namespace dsh
