#include "writer/file/output_file.hpp"

#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

#include "base/files/io_error.hpp"
#include "base/memory/aligned_memory.hpp"

namespace dsh {
namespace {

// Call again for as long as a signal has interrupted the call before it did anything.
template <typename Call> int uninterrupted(Call call) {
    int result = 0;
    do {
        result = call();
    } while (result < 0 && errno == EINTR);
    return result;
}

} // namespace

OutputFile::OutputFile(std::string path, std::uint64_t nbytes, std::uint64_t align, std::shared_ptr<Faults> faults)
    : path_(std::move(path)), align_(align), faults_(std::move(faults)), owner_(getpid()) {
    constexpr int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
    // O_EXCL refuses whatever has the name, a symbolic link or a FIFO too, without following or opening it.
    fd_ = uninterrupted([&] { return open(path_.c_str(), flags | O_DIRECT, 0644); });
    if (fd_ < 0 && errno == EINVAL) {
        // Some file systems create the name before they refuse O_DIRECT.
        unlink(path_.c_str());
        direct_ = false;
        fd_ = uninterrupted([&] { return open(path_.c_str(), flags, 0644); });
    }
    if (fd_ < 0) {
        throw IoError("open", path_, 0, errno);
    }
    try {
        preallocate(nbytes);
    } catch (const IoError &) {
        discard();
        throw;
    }
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::preallocate(std::uint64_t nbytes) {
    const int result = uninterrupted([&] { return fallocate(fd_, 0, 0, static_cast<off_t>(nbytes)); });
    if (result < 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
        throw IoError("fallocate of " + std::to_string(nbytes) + " bytes", path_, 0, errno);
    }
}

int OutputFile::write(const void *data, std::uint64_t offset, std::uint64_t nbytes) {
    const auto *bytes = static_cast<const std::byte *>(data);
    std::uint64_t done = 0;
    while (done < nbytes) {
        std::uint64_t want = nbytes - done;
        if (faults_) {
            const std::int64_t admitted = faults_->admit(want, align_);
            if (admitted < 0) {
                return static_cast<int>(-admitted);
            }
            want = static_cast<std::uint64_t>(admitted);
        }
        const ssize_t result = pwrite(fd_, bytes + done, want, static_cast<off_t>(offset + done));
        if (result < 0) {
            if (errno == EINTR || errno == EAGAIN) {
                continue;
            }
            return errno;
        }
        // A short direct write is resumed at the last aligned offset, for O_DIRECT takes no other.
        const std::uint64_t kept =
            direct_ ? round_down(static_cast<std::uint64_t>(result), align_) : static_cast<std::uint64_t>(result);
        if (kept == 0) {
            // Not one aligned block was written: the disk is full, or the file has reached its limit.
            return ENOSPC;
        }
        done += kept;
    }
    return 0;
}

void OutputFile::seal(std::uint64_t nbytes) {
    if (uninterrupted([&] { return ftruncate(fd_, static_cast<off_t>(nbytes)); }) < 0) {
        throw IoError("ftruncate to " + std::to_string(nbytes) + " bytes", path_, 0, errno);
    }
    if (uninterrupted([&] { return fdatasync(fd_); }) < 0) {
        throw IoError("fdatasync", path_, 0, errno);
    }
    const int fd = fd_;
    fd_ = -1;
    // An interrupted close has closed the descriptor, and everything is on the disk already.
    if (close(fd) < 0 && errno != EINTR) {
        throw IoError("close", path_, 0, errno);
    }
    ours_ = false;
}

void OutputFile::discard() noexcept {
    if (fd_ >= 0) {
        close(fd_);
        fd_ = -1;
    }
    if (ours_ && owner_ == getpid()) {
        unlink(path_.c_str());
    }
    ours_ = false;
}

} // namespace dsh
