// Probes the file system of a folder, with a temporary file that is removed again.
#pragma once

#include <cstdint>
#include <string>

namespace dsh {

struct FileSystemFacts {
    std::string type;           // such as "ext4", or the magic number in hexadecimal
    bool direct;                // O_DIRECT is accepted
    std::uint64_t memory_align; // of O_DIRECT, as statx tells; 0 when it does not
    std::uint64_t offset_align;
    std::uint64_t block_bytes; // st_blksize
    std::uint64_t place_align; // the modulus of congruent placement (writer/file/plan.hpp): a power of two
    std::string reason;        // why O_DIRECT is refused; empty when it is not
};

// Throws IoError when no file can be made in `directory`.
FileSystemFacts probe_file_system(const std::string &directory);

} // namespace dsh
