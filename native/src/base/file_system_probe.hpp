// What the file system of a folder reports and takes: asked of a file made there for the purpose and removed again.
#pragma once

#include <cstdint>
#include <string>

namespace dsh {

struct FileSystemFacts {
    std::string type;
    bool direct;
    std::uint64_t memory_align;
    std::uint64_t offset_align;
    std::uint64_t block_bytes;
    std::uint64_t
        place_align;    // congruent placement's modulus: the largest of page size, st_blksize and both alignments
    std::string reason; // why not direct; empty when direct
};

// Throws IoError when no file can be made in `directory`.
FileSystemFacts probe_file_system(const std::string &directory);

} // namespace dsh
