#include "reader.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>
#include <unistd.h>

#include "base/aligned_memory.hpp"
#include "base/io_error.hpp"
#include "base/limits.hpp"
#include "base/start_thread.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t align = block_granule;
constexpr std::uint64_t min_direct_bytes = 1 << 20;
constexpr std::uint64_t max_gap_bytes = 64 << 10;

// A thread's block of memory, taken when the first block has to pass through it.
class Bounce {
  public:
    explicit Bounce(std::uint64_t block_bytes) : block_bytes_(block_bytes) {}

    std::byte *data() {
        if (!data_) {
            data_ = aligned_memory(align, block_bytes_);
        }
        return data_.get();
    }

  private:
    std::uint64_t block_bytes_;
    AlignedMemory data_;
};

// One file's share: its extents, the blocks to read, and how far hashing has come.
class Source {
  public:
    Source(const std::string &path, std::vector<Extent> extents, std::vector<std::size_t> order,
           std::uint64_t block_bytes)
        : path_(path), extents_(std::move(extents)), order_(std::move(order)), digests_(extents_.size()) {
        for (std::size_t i = 1; i < extents_.size(); ++i) {
            if (extents_[i].offset < extents_[i - 1].end()) {
                throw std::invalid_argument("two extents asked of " + path + " overlap at offset " +
                                            std::to_string(extents_[i].offset));
            }
        }
        const std::uint64_t end = extents_.empty() ? 0 : round_up(extents_.back().end(), align);
        blocks_ = cut(extents_, 0, end,
                      {.align = align,
                       .block_bytes = block_bytes,
                       .min_direct_bytes = min_direct_bytes,
                       .max_gap_bytes = max_gap_bytes,
                       .gathered_extents = 0});
        read_.resize(blocks_.size());
        open_file();
    }

    ~Source() {
        if (fd_ >= 0) {
            close(fd_);
        }
    }
    Source(const Source &) = delete;
    Source &operator=(const Source &) = delete;

    std::size_t block_count() const { return blocks_.size(); }

    // Read one block to where it belongs. Throws IoError.
    void fetch(std::size_t index, Bounce &bounce) {
        const Block &block = blocks_[index];
        if (block.direct()) {
            fill(reinterpret_cast<std::byte *>(block.source), block);
        } else {
            fill(bounce.data(), block);
            each_piece(extents_, block,
                       [&](std::size_t i, std::uint64_t position, std::uint64_t at, std::uint64_t nbytes) {
                           std::memcpy(reinterpret_cast<std::byte *>(extents_[i].address) + position,
                                       bounce.data() + at, nbytes);
                       });
        }
        hash_ready(index);
    }

    void deliver(std::vector<Digest> &digests) const {
        for (std::size_t i = 0; i < order_.size(); ++i) {
            digests[order_[i]] = digests_.values()[i];
        }
    }

  private:
    void open_file() {
        fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        if (fd_ < 0 && errno == EINVAL) {
            fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
        }
        if (fd_ < 0) {
            throw IoError("open", path_, 0, errno);
        }
    }

    // All bytes of the block that any extent needs; the file may end inside the aligned rest.
    void fill(std::byte *target, const Block &block) {
        std::uint64_t needed = 0;
        each_piece(extents_, block,
                   [&](std::size_t, std::uint64_t, std::uint64_t at, std::uint64_t nbytes) { needed = at + nbytes; });
        std::uint64_t done = 0;
        while (done < needed) {
            const ssize_t result =
                pread(fd_, target + done, block.nbytes - done, static_cast<off_t>(block.offset + done));
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

    // Mark a block as read; whoever finds the next block in order ready, hashes on from there.
    void hash_ready(std::size_t index) {
        std::unique_lock lock(mutex_);
        read_[index] = true;
        if (hashing_) {
            return;
        }
        hashing_ = true;
        while (hashed_ < blocks_.size() && read_[hashed_]) {
            const Block &block = blocks_[hashed_];
            lock.unlock();
            each_piece(extents_, block,
                       [&](std::size_t i, std::uint64_t position, std::uint64_t, std::uint64_t nbytes) {
                           const auto *data = reinterpret_cast<const std::byte *>(extents_[i].address) + position;
                           digests_.feed(i, position, extents_[i].nbytes, data, nbytes);
                       });
            lock.lock();
            ++hashed_;
        }
        hashing_ = false;
    }

    std::string path_;
    std::vector<Extent> extents_;
    std::vector<std::size_t> order_; // place of each extent in the caller's list
    std::vector<Block> blocks_;
    Digests digests_;
    int fd_ = -1;

    std::mutex mutex_;
    std::vector<bool> read_;
    std::size_t hashed_ = 0;
    bool hashing_ = false;
};

// Hands the blocks of all files to a few threads, and keeps the first failure.
class Crew {
  public:
    Crew(std::vector<std::unique_ptr<Source>> &sources, std::uint64_t block_bytes)
        : sources_(sources), block_bytes_(block_bytes) {
        for (std::size_t i = 0; i < sources.size(); ++i) {
            for (std::size_t block = 0; block < sources[i]->block_count(); ++block) {
                work_.emplace_back(i, block);
            }
        }
    }

    void run(std::size_t depth) {
        {
            std::vector<std::jthread> threads;
            for (std::size_t i = 0; i < std::min(depth, work_.size()); ++i) {
                threads.push_back(start_thread([this] { fetch_all(); }));
            }
        }
        if (error_) {
            std::rethrow_exception(error_);
        }
    }

  private:
    void fetch_all() {
        try {
            Bounce bounce(block_bytes_);
            for (std::size_t i = turn_.fetch_add(1); i < work_.size() && !stop_; i = turn_.fetch_add(1)) {
                sources_[work_[i].first]->fetch(work_[i].second, bounce);
            }
        } catch (...) {
            std::lock_guard lock(mutex_);
            if (!error_) {
                error_ = std::current_exception();
            }
            stop_ = true;
        }
    }

    std::vector<std::unique_ptr<Source>> &sources_;
    std::uint64_t block_bytes_;
    std::vector<std::pair<std::size_t, std::size_t>> work_;
    std::atomic<std::size_t> turn_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::exception_ptr error_;
};

void require_possible(std::size_t index, const Extent &extent) {
    constexpr std::uint64_t most = std::numeric_limits<std::int64_t>::max() - most_block_bytes;
    if (extent.nbytes > most || extent.offset > most - extent.nbytes) {
        throw std::invalid_argument("extent " + std::to_string(index) + " has " + std::to_string(extent.nbytes) +
                                    " bytes at offset " + std::to_string(extent.offset) + ", where no file reaches");
    }
    require_memory(index, extent);
}

} // namespace

std::vector<Digest> read(const std::vector<std::string> &paths, const std::vector<ReadRequest> &requests,
                         std::uint64_t block_bytes, std::size_t depth) {
    require_limits(block_bytes, depth);
    std::vector<std::vector<std::size_t>> by_file(paths.size());
    for (std::size_t i = 0; i < requests.size(); ++i) {
        if (requests[i].file >= paths.size()) {
            throw std::invalid_argument("request " + std::to_string(i) + " names file " +
                                        std::to_string(requests[i].file) + " of " + std::to_string(paths.size()));
        }
        if (requests[i].extent.nbytes == 0) {
            continue;
        }
        require_possible(i, requests[i].extent);
        by_file[requests[i].file].push_back(i);
    }
    std::vector<std::unique_ptr<Source>> sources;
    for (std::size_t file = 0; file < paths.size(); ++file) {
        std::vector<std::size_t> &order = by_file[file];
        std::sort(order.begin(), order.end(),
                  [&](std::size_t a, std::size_t b) { return requests[a].extent.offset < requests[b].extent.offset; });
        std::vector<Extent> extents;
        extents.reserve(order.size());
        for (const std::size_t i : order) {
            extents.push_back(requests[i].extent);
        }
        if (!order.empty()) {
            sources.push_back(std::make_unique<Source>(paths[file], std::move(extents), std::move(order), block_bytes));
        }
    }
    Crew(sources, block_bytes).run(depth);
    std::vector<Digest> digests(requests.size(), checksum(nullptr, 0));
    for (const auto &source : sources) {
        source->deliver(digests);
    }
    return digests;
}

} // namespace dsh
