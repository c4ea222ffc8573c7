#include "reader/input_file.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <stdexcept>
#include <unistd.h>

#include "base/io_error.hpp"
#include "base/limits.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t align = block_granule;
constexpr std::uint64_t max_gap_bytes = 64 << 10; // reading so much for nothing costs less than a second request

} // namespace

std::byte *BounceBuffer::data() {
    if (!data_) {
        data_ = aligned_memory(align, block_bytes_);
    }
    return data_.get();
}

InputFile::InputFile(const std::string &path, std::vector<Extent> extents, std::vector<std::size_t> requests,
                     std::uint64_t block_bytes)
    : path_(path), extents_(std::move(extents)), requests_(std::move(requests)), digests_(extents_.size()) {
    for (std::size_t i = 1; i < extents_.size(); ++i) {
        if (extents_[i].offset < extents_[i - 1].end()) {
            throw std::invalid_argument("two extents asked of " + path + " overlap at offset " +
                                        std::to_string(extents_[i].offset));
        }
    }
    const std::uint64_t end = round_up(extents_.back().end(), align);
    blocks_ = cut(extents_, 0, end,
                  {.align = align, .block_bytes = block_bytes, .max_gap_bytes = max_gap_bytes, .gathered_extents = 0});
    read_.resize(blocks_.size());
    open_file();
}

InputFile::~InputFile() {
    if (fd_ >= 0) {
        close(fd_);
    }
}

void InputFile::read_block(std::size_t index, BounceBuffer &bounce) {
    const Block &block = blocks_[index];
    if (block.direct()) {
        fill(reinterpret_cast<std::byte *>(block.source), block);
    } else {
        fill(bounce.data(), block);
        each_piece(extents_, block, [&](std::size_t i, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
            std::memcpy(reinterpret_cast<std::byte *>(extents_[i].address) + position, bounce.data() + at, nbytes);
        });
    }
    hash_ready(index);
}

void InputFile::deliver(std::vector<Digest> &digests) const {
    for (std::size_t i = 0; i < requests_.size(); ++i) {
        digests[requests_[i]] = digests_.values()[i];
    }
}

void InputFile::open_file() {
    fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (fd_ < 0 && errno == EINVAL) {
        fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    }
    if (fd_ < 0) {
        throw IoError("open", path_, 0, errno);
    }
}

// Read every byte of the block that an extent needs. The file may end inside the aligned rest, so a read may come back
// short there, and only there.
void InputFile::fill(std::byte *target, const Block &block) {
    std::uint64_t needed = 0;
    each_piece(extents_, block,
               [&](std::size_t, std::uint64_t, std::uint64_t at, std::uint64_t nbytes) { needed = at + nbytes; });
    std::uint64_t done = 0;
    while (done < needed) {
        const ssize_t result = pread(fd_, target + done, block.nbytes - done, static_cast<off_t>(block.offset + done));
        if (result < 0 && errno == EINTR) {
            continue;
        }
        if (result < 0) {
            throw IoError("read of " + std::to_string(block.nbytes) + " bytes", path_, block.offset + done, errno);
        }
        if (result == 0) {
            throw IoError("the file ends early: read", path_, block.offset + done, EIO);
        }
        done += static_cast<std::uint64_t>(result);
        if (done < needed && done % align != 0) {
            done = round_down(done, align);
            if (static_cast<std::uint64_t>(result) < align) {
                throw IoError("the file ends early: read", path_, block.offset + done, EIO);
            }
        }
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
    while (hashed_ < blocks_.size() && read_[hashed_]) {
        const Block &block = blocks_[hashed_];
        lock.unlock();
        each_piece(extents_, block, [&](std::size_t i, std::uint64_t position, std::uint64_t, std::uint64_t nbytes) {
            const auto *data = reinterpret_cast<const std::byte *>(extents_[i].address) + position;
            digests_.feed(i, position, extents_[i].nbytes, data, nbytes);
        });
        lock.lock();
        ++hashed_;
    }
    hashing_ = false;
}

} // namespace dsh
