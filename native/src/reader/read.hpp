// Reads extents of files straight into memory, in parallel, and returns the checksum of each.
//
// The aligned interior of a large extent whose address is congruent to its offset is read without a copy; the rest
// passes through a bounce buffer, neighbours together in one read. Hashing follows the reads of a file in order and
// overlaps with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "blocks/cutting.hpp"

namespace dsh {

struct ReadRequest {
    std::size_t file; // position in `paths`
    Extent extent;
};

// Returns the checksum of every request, in the order given, once all bytes are in memory; nothing unless `hashed`, for
// callers who hash the bytes themselves. Throws IoError naming path and offset (a file that ends early is EIO), and
// std::invalid_argument when a request names no file, reaches where no file or memory can be, or overlaps another one
// in its file. After an error the targets hold an undefined mixture.
std::vector<Digest> read(const std::vector<std::string> &paths, const std::vector<ReadRequest> &requests,
                         std::uint64_t block_bytes, std::size_t depth, bool hashed);

} // namespace dsh
