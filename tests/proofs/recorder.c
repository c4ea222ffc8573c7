/* Records the calls with which a process changes files below one folder, and kills the process before one of them.
 *
 * Preloaded into a program (LD_PRELOAD), it stands before the functions of the C library. Each call that changes files
 * below $DSHISTORY_RECORD_ROOT is performed while a lock is held that all recorded processes share, and then appended
 * to the file $DSHISTORY_RECORD_LOG, so that the order in the log is the order of the calls. `file_calls.py` reads the
 * log.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum op { CREATE = 1, MKDIR, WRITE, RESIZE, RENAME, LINK, UNLINK, RMDIR, SYNC, NOTE };

struct record {
    uint32_t op;
    uint32_t process;
    uint64_t inode;
    int64_t offset; /* of a write; the new size of a file that is resized */
    uint32_t path_bytes;
    uint32_t other_bytes;
    uint64_t data_bytes;
};

#define REAL(name) ((__typeof__(&name))real(#name))

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static pid_t log_owner = 0;
static long calls = 0, kill_at = 0;

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* A forked child opens the log again: a lock that it inherited would also be its parent's. */
static int log_file(void) {
    const char *path = getenv("DSHISTORY_RECORD_LOG");
    if (log_owner != getpid()) {
        log_owner = getpid();
        log_fd = path ? REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
    }
    return log_fd;
}

static void take_turn(void) {
    pthread_mutex_lock(&mutex);
    if (log_file() >= 0) {
        while (flock(log_fd, LOCK_EX) < 0 && errno == EINTR) {
        }
    }
}

static void enter(void) {
    take_turn();
    if (++calls == kill_at) {
        kill(getpid(), SIGKILL);
        pause();
    }
}

static void leave(void) {
    const int error = errno;
    if (log_fd >= 0) {
        flock(log_fd, LOCK_UN);
    }
    pthread_mutex_unlock(&mutex);
    errno = error;
}

static void append(enum op op, uint64_t inode, int64_t offset, const char *path, const char *other, const void *data,
                   uint64_t data_bytes) {
    if (log_fd < 0) {
        return;
    }
    const struct record record = {
        op, (uint32_t)getpid(), inode, offset, (uint32_t)strlen(path), (uint32_t)strlen(other), data_bytes};
    const struct iovec parts[] = {{(void *)&record, sizeof record},
                                  {(void *)path, record.path_bytes},
                                  {(void *)other, record.other_bytes},
                                  {(void *)data, data_bytes}};
    if (REAL(writev)(log_fd, parts, 4) !=
        (ssize_t)(sizeof record + record.path_bytes + record.other_bytes + data_bytes)) {
        abort();
    }
}

static int recorded(const char *path) {
    const char *root = getenv("DSHISTORY_RECORD_ROOT");
    const size_t length = root ? strlen(root) : 0;
    return root && strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* Writes the absolute form of a path, and returns whether it lies below the root. */
static int absolute(int folder, const char *path, char *out) {
    char base[PATH_MAX] = "", link[64];
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
    } else {
        if (folder == AT_FDCWD) {
            snprintf(link, sizeof link, "/proc/self/cwd");
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        }
        const ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) {
            return 0;
        }
        base[length] = 0;
        if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) {
            return 0;
        }
    }
    return recorded(out);
}

static int path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) {
        return 0;
    }
    out[length] = 0;
    return recorded(out);
}

static uint64_t inode_of(int fd) {
    struct stat facts;
    return fstat(fd, &facts) == 0 ? (uint64_t)facts.st_ino : 0;
}

static uint64_t inode_at(const char *path) {
    struct stat facts;
    return lstat(path, &facts) == 0 ? (uint64_t)facts.st_ino : 0;
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
    char at[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !absolute(folder, path, at)) {
        return REAL(openat)(folder, path, flags, mode);
    }
    enter();
    const int there = inode_at(at) != 0;
    const int fd = REAL(openat)(folder, path, flags, mode);
    if (fd >= 0 && !there) {
        append(CREATE, inode_of(fd), 0, at, "", "", 0);
    } else if (fd >= 0 && (flags & O_TRUNC)) {
        append(RESIZE, inode_of(fd), 0, at, "", "", 0);
    }
    leave();
    return fd;
}

static mode_t mode_of(int flags, va_list rest) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; }

#define OPEN(name, parameters, folder)                                                                                 \
    int name parameters {                                                                                              \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        const mode_t mode = mode_of(flags, rest);                                                                      \
        va_end(rest);                                                                                                  \
        return opened(folder, path, flags, mode);                                                                      \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD)
OPEN(openat, (int folder, const char *path, int flags, ...), folder)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder)
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* Performs a write, whose bytes are joined in `data`, and records as many as were written. */
#define WRITING(fd, at, call, data)                                                                                    \
    char path[PATH_MAX];                                                                                               \
    if (!path_of(fd, path)) {                                                                                          \
        return call;                                                                                                   \
    }                                                                                                                  \
    enter();                                                                                                           \
    const int64_t offset = at;                                                                                         \
    const ssize_t done = call;                                                                                         \
    if (done > 0) {                                                                                                    \
        append(WRITE, inode_of(fd), offset, path, "", data, (uint64_t)done);                                           \
    }                                                                                                                  \
    leave();                                                                                                           \
    return done

static int64_t position(int fd) {
    struct stat facts;
    return (fcntl(fd, F_GETFL) & O_APPEND) && fstat(fd, &facts) == 0 ? facts.st_size : lseek(fd, 0, SEEK_CUR);
}

ssize_t write(int fd, const void *data, size_t nbytes) {
    WRITING(fd, position(fd), REAL(write)(fd, data, nbytes), data);
}
ssize_t pwrite(int fd, const void *data, size_t nbytes, off_t offset_) {
    WRITING(fd, offset_, REAL(pwrite)(fd, data, nbytes, offset_), data);
}
ssize_t pwrite64(int fd, const void *data, size_t nbytes, off_t offset_) {
    WRITING(fd, offset_, REAL(pwrite)(fd, data, nbytes, offset_), data);
}

/* Several pieces are written as one: the state of the file is the same. */
static ssize_t write_all(int fd, const struct iovec *parts, int count, off_t at) {
    size_t total = 0;
    for (int i = 0; i < count; ++i) {
        total += parts[i].iov_len;
    }
    char *data = malloc(total + 1), *end = data;
    for (int i = 0; i < count; ++i) {
        end = mempcpy(end, parts[i].iov_base, parts[i].iov_len);
    }
    const ssize_t done = at < 0 ? write(fd, data, total) : pwrite(fd, data, total, at);
    free(data);
    return done;
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    return path_of(fd, path) ? write_all(fd, parts, count, -1) : REAL(writev)(fd, parts, count);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    char path[PATH_MAX];
    return path_of(fd, path) ? write_all(fd, parts, count, at) : REAL(pwritev)(fd, parts, count, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) { return pwritev(fd, parts, count, at); }

/* Performs a call that may change the size of a file, and records the size after it. */
#define RESIZING(fd, call)                                                                                             \
    char path[PATH_MAX];                                                                                               \
    if (!path_of(fd, path)) {                                                                                          \
        return call;                                                                                                   \
    }                                                                                                                  \
    enter();                                                                                                           \
    const int result = call;                                                                                           \
    struct stat facts;                                                                                                 \
    if (result == 0 && fstat(fd, &facts) == 0) {                                                                       \
        append(RESIZE, (uint64_t)facts.st_ino, facts.st_size, path, "", "", 0);                                        \
    }                                                                                                                  \
    leave();                                                                                                           \
    return result

int ftruncate(int fd, off_t size) { RESIZING(fd, REAL(ftruncate)(fd, size)); }
int ftruncate64(int fd, off_t size) { RESIZING(fd, REAL(ftruncate)(fd, size)); }
int fallocate(int fd, int mode, off_t at, off_t size) { RESIZING(fd, REAL(fallocate)(fd, mode, at, size)); }
int fallocate64(int fd, int mode, off_t at, off_t size) { RESIZING(fd, REAL(fallocate)(fd, mode, at, size)); }
int posix_fallocate(int fd, off_t at, off_t size) { RESIZING(fd, REAL(posix_fallocate)(fd, at, size)); }
int posix_fallocate64(int fd, off_t at, off_t size) { RESIZING(fd, REAL(posix_fallocate)(fd, at, size)); }

#define SYNCING(fd, call)                                                                                              \
    char path[PATH_MAX];                                                                                               \
    if (!path_of(fd, path)) {                                                                                          \
        return call;                                                                                                   \
    }                                                                                                                  \
    enter();                                                                                                           \
    const int result = call;                                                                                           \
    if (result == 0) {                                                                                                 \
        append(SYNC, inode_of(fd), 0, path, "", "", 0);                                                                \
    }                                                                                                                  \
    leave();                                                                                                           \
    return result

int fsync(int fd) { SYNCING(fd, REAL(fsync)(fd)); }
int fdatasync(int fd) { SYNCING(fd, REAL(fdatasync)(fd)); }

/* Performs a call that changes the names in folders. */
#define NAMING(op, inode, from_folder, from, to_folder, to, call)                                                      \
    char path[PATH_MAX], other[PATH_MAX] = "";                                                                         \
    int ours = absolute(from_folder, from, path);                                                                      \
    if (*to) {                                                                                                         \
        ours |= absolute(to_folder, to, other);                                                                        \
    }                                                                                                                  \
    if (!ours) {                                                                                                       \
        return call;                                                                                                   \
    }                                                                                                                  \
    enter();                                                                                                           \
    const int result = call;                                                                                           \
    if (result == 0) {                                                                                                 \
        append(op, inode, 0, path, other, "", 0);                                                                      \
    }                                                                                                                  \
    leave();                                                                                                           \
    return result

int rename(const char *from, const char *to) {
    NAMING(RENAME, 0, AT_FDCWD, from, AT_FDCWD, to, REAL(rename)(from, to));
}
int renameat(int folder, const char *from, int to_folder, const char *to) {
    NAMING(RENAME, 0, folder, from, to_folder, to, REAL(renameat)(folder, from, to_folder, to));
}
int renameat2(int folder, const char *from, int to_folder, const char *to, unsigned flags) {
    NAMING(RENAME, 0, folder, from, to_folder, to, REAL(renameat2)(folder, from, to_folder, to, flags));
}
int link(const char *from, const char *to) { NAMING(LINK, 0, AT_FDCWD, from, AT_FDCWD, to, REAL(link)(from, to)); }
int linkat(int folder, const char *from, int to_folder, const char *to, int flags) {
    NAMING(LINK, 0, folder, from, to_folder, to, REAL(linkat)(folder, from, to_folder, to, flags));
}
int mkdir(const char *at, mode_t mode) { NAMING(MKDIR, inode_at(path), AT_FDCWD, at, 0, "", REAL(mkdir)(at, mode)); }
int mkdirat(int folder, const char *at, mode_t mode) {
    NAMING(MKDIR, inode_at(path), folder, at, 0, "", REAL(mkdirat)(folder, at, mode));
}
int unlink(const char *at) { NAMING(UNLINK, 0, AT_FDCWD, at, 0, "", REAL(unlink)(at)); }
int rmdir(const char *at) { NAMING(RMDIR, 0, AT_FDCWD, at, 0, "", REAL(rmdir)(at)); }
int unlinkat(int folder, const char *at, int flags) {
    NAMING(flags & AT_REMOVEDIR ? RMDIR : UNLINK, 0, folder, at, 0, "", REAL(unlinkat)(folder, at, flags));
}
int remove(const char *at) {
    struct stat facts;
    return lstat(at, &facts) == 0 && S_ISDIR(facts.st_mode) ? rmdir(at) : unlink(at);
}

/* Called by the recorded program through ctypes: puts a word of its own between the calls. */
void recorder_note(const char *text) {
    take_turn();
    append(NOTE, 0, 0, text, "", "", 0);
    leave();
}

/* Kills this process right before its n-th recorded call from now on; 0: never. */
void recorder_kill_before(long n) {
    pthread_mutex_lock(&mutex);
    calls = 0;
    kill_at = n;
    pthread_mutex_unlock(&mutex);
}

long recorder_calls(void) { return calls; }
