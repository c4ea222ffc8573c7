#include "failing_calls.hpp"

#include <cerrno>
#include <sys/types.h>

extern "C" {

ssize_t __real_pread(int fd, void *into, size_t nbytes, off_t offset);
int __real_ftruncate(int fd, off_t nbytes);
int __real_fdatasync(int fd);

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

} // extern "C"

namespace dsh::test {

FailingCall failing_pread, failing_ftruncate, failing_fdatasync;

} // namespace dsh::test
