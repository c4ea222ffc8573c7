// What O_DIRECT demands of an open file, as statx tells it.
#pragma once

#include <cstdint>

namespace dsh {

struct DirectAlign {
    bool known = false;       // the file system tells; if not, the two below are 0
    std::uint32_t memory = 0; // of addresses; 0 when it is known that this file takes no O_DIRECT
    std::uint32_t offset = 0; // of offsets and sizes
};

DirectAlign direct_align(int fd);

} // namespace dsh
