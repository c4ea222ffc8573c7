#include "reader/input_file.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files/direct_align.hpp"
#include "base/files/io_error.hpp"
#include "base/files/limits.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t max_gap_bytes = 64 << 10; // reading so much for nothing costs less than a second request

} // namespace

std::byte *BounceBuffer::data(std::uint64_t align, std::uint64_t nbytes) {
    if (align_ < align || nbytes_ < nbytes) {
        align_ = std::max(align_, align);
        nbytes_ = round_up(std::max(nbytes_, nbytes), align_);
        data_ = aligned_memory(align_, nbytes_);
    }
    return data_.get();
}

InputFile::InputFile(const std::string &path, std::vector<Extent> extents, std::vector<std::size_t> requests,
                     std::uint64_t block_bytes, bool hashed)
    : path_(path), extents_(std::move(extents)), requests_(std::move(requests)), digests_(extents_.size()),
      hashed_(hashed) {
    for (std::size_t i = 1; i < extents_.size(); ++i) {
        if (extents_[i].offset < extents_[i - 1].end()) {
            throw std::invalid_argument("two extents asked of " + path + " overlap at offset " +
                                        std::to_string(extents_[i].offset));
        }
    }
    open_file();
    choose_align();
    blocks_ = cut(extents_, 0, round_up(extents_.back().end(), align_),
                  {.align = align_,
                   .block_bytes = round_up(block_bytes, align_),
                   .max_gap_bytes = max_gap_bytes,
                   .gathered_extents = 0});
    read_.resize(blocks_.size());
}

Descriptor::~Descriptor() {
    if (fd >= 0) {
        close(fd);
    }
}

void InputFile::read_block(std::size_t index, BounceBuffer &bounce) {
    const Block &block = blocks_[index];
    if (block.direct()) {
        fill(reinterpret_cast<std::byte *>(block.source), block);
    } else {
        std::byte *data = bounce.data(align_, block.nbytes);
        fill(data, block);
        each_piece(extents_, block, [&](std::size_t i, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
            std::memcpy(reinterpret_cast<std::byte *>(extents_[i].address) + position, data + at, nbytes);
        });
    }
    if (hashed_) {
        hash_ready(index);
    }
}

void InputFile::deliver(std::vector<Digest> &digests) const {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
        digests[requests_[i]] = digests_.values()[i];
    }
}

// O_NONBLOCK lets the opening of a FIFO return, so that it can be refused; on regular files it has no effect.
void InputFile::open_file() {
    constexpr int flags = O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    file_.fd = open(path_.c_str(), flags | O_DIRECT);
    if (file_.fd < 0 && errno == EINVAL) {
        direct_ = false;
        file_.fd = open(path_.c_str(), flags);
    }
    if (file_.fd < 0) {
        throw IoError(errno == ELOOP ? "open of a symbolic link, where only a regular file is read," : "open", path_, 0,
                      errno);
    }
    require_regular();
}

void InputFile::require_regular() const {
    struct stat status{};
    if (fstat(file_.fd, &status) < 0) {
        throw IoError("fstat", path_, 0, errno);
    }
    if (!S_ISREG(status.st_mode)) {
        const char *type = S_ISDIR(status.st_mode) ? "a folder" : S_ISFIFO(status.st_mode) ? "a FIFO" : "a device";
        throw IoError(std::string("open of ") + type + ", where only a regular file is read,", path_, 0,
                      S_ISDIR(status.st_mode) ? EISDIR : EINVAL);
    }
}

void InputFile::choose_align() {
    const DirectAlign demanded = direct_align(file_.fd);
    align_ = std::bit_ceil(std::max<std::uint64_t>({block_granule, demanded.memory, demanded.offset}));
    if (direct_ && demanded.known && demanded.memory == 0) {
        read_buffered();
    }
}

// Go on without O_DIRECT, for all threads. Returns false when that can't be.
bool InputFile::read_buffered() {
    direct_ = false;
    const int flags = fcntl(file_.fd, F_GETFL);
    return flags >= 0 && fcntl(file_.fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

// Read every byte of the block that an extent needs. The file may end inside the aligned rest, so a read may come back
// short there, and only there.
void InputFile::fill(std::byte *target, const Block &block) {
    std::uint64_t needed = 0;
    each_piece(extents_, block,
               [&](std::size_t, std::uint64_t, std::uint64_t at, std::uint64_t nbytes) { needed = at + nbytes; });
    std::uint64_t done = 0;
    while (done < needed) {
        const bool direct = direct_;
        const ssize_t result =
            pread(file_.fd, target + done, block.nbytes - done, static_cast<off_t>(block.offset + done));
        if (result < 0 && errno == EINTR) {
            continue;
        }
        if (result < 0 && errno == EINVAL && direct && read_buffered()) {
            // The file system refuses a direct read only now, because of its alignment or for reasons of its own.
            continue;
        }
        if (result < 0) {
            throw IoError("read of " + std::to_string(block.nbytes) + " bytes", path_, block.offset + done, errno);
        }
        // A short direct read is resumed at the last aligned offset, for O_DIRECT takes no other.
        const std::uint64_t reached = done + static_cast<std::uint64_t>(result);
        const std::uint64_t next = direct && reached < needed ? round_down(reached, align_) : reached;
        if (next == done) {
            throw IoError("the file ends early: read", path_, block.offset + reached, EIO);
        }
        done = next;
    }
}

// Mark a block as read, and hash on from the first block that is not hashed yet, as far as all have been read. A thread
// that finds another one hashing leaves its block to that one, which looks again under the mutex before it stops.
void InputFile::hash_ready(std::size_t index) {
    std::unique_lock lock(mutex_);
    read_[index] = true;
    if (hashing_) {
        return;
    }
    hashing_ = true;
    while (hashed_blocks_ < blocks_.size() && read_[hashed_blocks_]) {
        const Block &block = blocks_[hashed_blocks_];
        lock.unlock();
        each_piece(extents_, block, [&](std::size_t i, std::uint64_t position, std::uint64_t, std::uint64_t nbytes) {
            const auto *data = reinterpret_cast<const std::byte *>(extents_[i].address) + position;
            digests_.feed(i, position, extents_[i].nbytes, data, nbytes);
        });
        lock.lock();
        ++hashed_blocks_;
    }
    hashing_ = false;
}

} // namespace dsh
