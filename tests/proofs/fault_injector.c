/* Fails one call of a process, chosen by its turn among the calls that touch files below one folder.
 *
 * Preloaded into a program (LD_PRELOAD), it stands before the functions of the C library and of liburing. The program
 * arms it through `injector_arm`; `injector_name` then says which call has failed. Calls of io_uring count wherever
 * they lead, because the only ring of the program is that of the writer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <liburing.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { SHORT = -1, NEVER = -2 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static long turn, fails_at = -1;
static int fails_with;
static char failed_call[64];
static pthread_t armed_by;
static __thread char path_now[PATH_MAX];
static char failed_path[PATH_MAX];
static pthread_cond_t disarmed = PTHREAD_COND_INITIALIZER;

/* liburing comes with an extension that is loaded late and privately, where RTLD_NEXT does not look. */
static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    return found ? found : dlsym(dlopen("liburing.so.2", RTLD_LAZY), name);
}
#define REAL(name) ((__typeof__(&name))real(#name))

/* Count from now on the calls below `folder`, and fail the one whose turn is `at` (the first has 0; negative: none)
 * with the errno `error`, SHORT: half of a write, or NEVER: it does not return until
 * `injector_disarm`. A call that this thread makes itself is never such a one: nobody could disarm it. */
void injector_arm(const char *folder, long at, int error) {
    pthread_mutex_lock(&mutex);
    snprintf(root, sizeof root, "%s", folder);
    turn = 0;
    fails_at = at;
    fails_with = error;
    armed_by = pthread_self();
    failed_call[0] = failed_path[0] = 0;
    pthread_mutex_unlock(&mutex);
}

/* Count and fail no call any more. */
void injector_disarm(void) {
    pthread_mutex_lock(&mutex);
    root[0] = 0;
    pthread_cond_broadcast(&disarmed);
    pthread_mutex_unlock(&mutex);
}

/* The file or folder of the call that has failed; of a call of io_uring one that this thread used before. */
const char *injector_path(void) { return failed_path; }

/* Whether a call may still fail. */
int injector_armed(void) { return root[0] != 0; }

/* The name of the call that has failed since `injector_arm`; empty if none. */
const char *injector_name(void) { return failed_call; }

/* The error that this call must fail with, or 0. */
static int take_turn(const char *name) {
    int error = 0;
    pthread_mutex_lock(&mutex);
    if (root[0] && !(fails_with == NEVER && pthread_equal(armed_by, pthread_self()))) {
        if (turn++ == fails_at) {
            error = fails_with;
            snprintf(failed_call, sizeof failed_call, "%s", name);
            snprintf(failed_path, sizeof failed_path, "%s", path_now);
            while (error == NEVER && root[0]) {
                pthread_cond_wait(&disarmed, &mutex);
            }
        }
    }
    pthread_mutex_unlock(&mutex);
    return error;
}

static int is_below(const char *path) {
    if (!root[0] || !path || strncmp(path, root, strlen(root)) != 0) {
        return 0;
    }
    snprintf(path_now, sizeof path_now, "%s", path);
    return 1;
}

static int fd_is_below(int fd) {
    char link[64], path[PATH_MAX];
    if (!root[0] || fd < 0) {
        return 0;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = REAL(readlink)(link, path, sizeof path - 1);
    if (length <= 0) {
        return 0;
    }
    path[length] = 0;
    return is_below(path);
}

static int at_is_below(int folder, const char *path) {
    return path && path[0] == '/' ? is_below(path) : fd_is_below(folder);
}

/* Return from the calling function with -1 when it is the call to fail. Only writes and their completions can be short,
 * so only these are counted then. */
#define MAY_FAIL(below, name)                                                                                          \
    do {                                                                                                               \
        const int error = fails_with != SHORT && (below) ? take_turn(name) : 0;                                        \
        if (error > 0) {                                                                                               \
            errno = error;                                                                                             \
            return -1;                                                                                                 \
        }                                                                                                              \
    } while (0)

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...) {                                                                       \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) ? va_arg(rest, mode_t) : 0;                              \
        va_end(rest);                                                                                                  \
        MAY_FAIL(is_below(path), #name);                                                                               \
        return REAL(name)(path, flags, mode);                                                                          \
    }

#define OPENAT(name)                                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                                           \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        const mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) ? va_arg(rest, mode_t) : 0;                              \
        va_end(rest);                                                                                                  \
        MAY_FAIL(at_is_below(folder, path), #name);                                                                    \
        return REAL(name)(folder, path, flags, mode);                                                                  \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

#define WRITE_AT(name, offset_type)                                                                                    \
    ssize_t name(int fd, const void *data, size_t nbytes, offset_type offset) {                                        \
        const int error = fd_is_below(fd) ? take_turn(#name) : 0;                                                      \
        if (error > 0) {                                                                                               \
            errno = error;                                                                                             \
            return -1;                                                                                                 \
        }                                                                                                              \
        return REAL(name)(fd, data, error == SHORT && nbytes >= 8192 ? nbytes / 2 / 4096 * 4096 : nbytes, offset);     \
    }

WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t nbytes) {
    const int error = fd_is_below(fd) ? take_turn("write") : 0;
    if (error > 0) {
        errno = error;
        return -1;
    }
    return REAL(write)(fd, data, error == SHORT && nbytes >= 2 ? nbytes / 2 : nbytes);
}

#define OF_FD(name)                                                                                                    \
    int name(int fd) {                                                                                                 \
        MAY_FAIL(fd_is_below(fd), #name);                                                                              \
        return REAL(name)(fd);                                                                                         \
    }

OF_FD(fsync)
OF_FD(fdatasync)

#define TRUNCATE(name, size_type)                                                                                      \
    int name(int fd, size_type nbytes) {                                                                               \
        MAY_FAIL(fd_is_below(fd), #name);                                                                              \
        return REAL(name)(fd, nbytes);                                                                                 \
    }

TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

int fallocate(int fd, int mode, off_t offset, off_t nbytes) {
    MAY_FAIL(fd_is_below(fd), "fallocate");
    return REAL(fallocate)(fd, mode, offset, nbytes);
}

int mkdir(const char *path, mode_t mode) {
    MAY_FAIL(is_below(path), "mkdir");
    return REAL(mkdir)(path, mode);
}

int link(const char *from, const char *to) {
    MAY_FAIL(is_below(to), "link");
    return REAL(link)(from, to);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    MAY_FAIL(at_is_below(to_folder, to), "linkat");
    return REAL(linkat)(from_folder, from, to_folder, to, flags);
}

int rename(const char *from, const char *to) {
    MAY_FAIL(is_below(to), "rename");
    return REAL(rename)(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    MAY_FAIL(at_is_below(to_folder, to), "renameat");
    return REAL(renameat)(from_folder, from, to_folder, to);
}

int unlink(const char *path) {
    MAY_FAIL(is_below(path), "unlink");
    return REAL(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
    MAY_FAIL(at_is_below(folder, path), "unlinkat");
    return REAL(unlinkat)(folder, path, flags);
}

#define OF_RING(name, ...)                                                                                             \
    {                                                                                                                  \
        const int error = fails_with == SHORT ? 0 : take_turn(#name);                                                  \
        return error > 0 ? -error : REAL(name)(__VA_ARGS__);                                                           \
    }

int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags)
    OF_RING(io_uring_queue_init, entries, ring, flags)

int io_uring_register_buffers(struct io_uring *ring, const struct iovec *buffers, unsigned count)
    OF_RING(io_uring_register_buffers, ring, buffers, count)

int io_uring_submit(struct io_uring *ring) OF_RING(io_uring_submit, ring)

/* The completions that have arrived are calls of their own: one may be turned into a failed or a half one. */
int io_uring_submit_and_wait(struct io_uring *ring, unsigned count) {
    const int error = fails_with == SHORT ? 0 : take_turn("io_uring_submit_and_wait");
    if (error > 0) {
        return -error;
    }
    const int submitted = REAL(io_uring_submit_and_wait)(ring, count);
    struct io_uring_cqe *cqe;
    unsigned head;
    io_uring_for_each_cqe(ring, head, cqe) {
        const int of_completion = cqe->res > 0 ? take_turn("completion") : 0;
        if (of_completion > 0) {
            cqe->res = -of_completion;
        } else if (of_completion == SHORT && cqe->res >= 8192) {
            cqe->res = cqe->res / 2 / 4096 * 4096;
        }
    }
    return submitted;
}
