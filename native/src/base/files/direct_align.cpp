#include "base/files/direct_align.hpp"

#include <cstring>
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif

namespace dsh {

// glibc's struct statx may be older than the kernel's, so the two fields are read at their fixed offsets in the
// kernel's structure.
DirectAlign direct_align(int fd) {
    alignas(8) unsigned char raw[256] = {};
    DirectAlign result;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, raw) == 0) {
        std::uint32_t mask = 0;
        std::memcpy(&mask, raw, sizeof mask);
        if ((mask & STATX_DIOALIGN) != 0) {
            result.known = true;
            std::memcpy(&result.memory, raw + 0x98, sizeof result.memory);
            std::memcpy(&result.offset, raw + 0x9c, sizeof result.offset);
        }
    }
    return result;
}

} // namespace dsh
