#include "failing_calls.hpp"

#include <cerrno>
#include <sys/mman.h>
#include <sys/types.h>

extern "C" {

ssize_t __real_pread(int fd, void *into, size_t nbytes, off_t offset);
int __real_ftruncate(int fd, off_t nbytes);
int __real_fdatasync(int fd);
void *__real_mmap(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset);

ssize_t __wrap_pread(int fd, void *into, size_t nbytes, off_t offset) {
    if (dsh::test::failing_pread.fails()) {
        errno = dsh::test::failing_pread.code;
        return -1;
    }
    return __real_pread(fd, into, nbytes, offset);
}

int __wrap_ftruncate(int fd, off_t nbytes) {
    if (dsh::test::failing_ftruncate.fails()) {
        errno = dsh::test::failing_ftruncate.code;
        return -1;
    }
    return __real_ftruncate(fd, nbytes);
}

int __wrap_fdatasync(int fd) {
    if (dsh::test::failing_fdatasync.fails()) {
        errno = dsh::test::failing_fdatasync.code;
        return -1;
    }
    return __real_fdatasync(fd);
}

void *__wrap_mmap(void *at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
    if (dsh::test::failing_mmap.fails()) {
        errno = dsh::test::failing_mmap.code;
        return MAP_FAILED;
    }
    return __real_mmap(at, nbytes, protection, flags, fd, offset);
}

} // extern "C"

namespace dsh::test {

FailingCall failing_pread, failing_ftruncate, failing_fdatasync, failing_mmap;

} // namespace dsh::test
