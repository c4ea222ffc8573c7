#include "reader/read.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/files/limits.hpp"
#include "base/start_thread.hpp"
#include "reader/input_file.hpp"

namespace dsh {
namespace {

// Hands the blocks of all files to a few threads, and keeps the first failure. Threads that never take the GIL: the
// caller waits for them here without it.
class ReadThreads {
  public:
    explicit ReadThreads(std::vector<std::unique_ptr<InputFile>> &files) : files_(files) {
        for (std::size_t i = 0; i < files.size(); ++i) {
            for (std::size_t block = 0; block < files[i]->block_count(); ++block) {
                work_.emplace_back(i, block);
            }
        }
    }

    void run(std::size_t depth) {
        {
            std::vector<std::jthread> threads;
            for (std::size_t i = 0; i < std::min(depth, work_.size()); ++i) {
                threads.push_back(start_thread([this] { read_all(); }));
            }
        }
        if (error_) {
            std::rethrow_exception(error_);
        }
    }

  private:
    void read_all() {
        try {
            BounceBuffer bounce;
            for (std::size_t i = turn_.fetch_add(1); i < work_.size() && !stop_; i = turn_.fetch_add(1)) {
                files_[work_[i].first]->read_block(work_[i].second, bounce);
            }
        } catch (...) {
            std::lock_guard lock(mutex_);
            if (!error_) {
                error_ = std::current_exception();
            }
            stop_ = true;
        }
    }

    std::vector<std::unique_ptr<InputFile>> &files_;
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

// The positions of the requests of each file, those without bytes left out, sorted by offset.
std::vector<std::vector<std::size_t>> requests_by_file(std::size_t file_count,
                                                       const std::vector<ReadRequest> &requests) {
    std::vector<std::vector<std::size_t>> by_file(file_count);
    for (std::size_t i = 0; i < requests.size(); ++i) {
        if (requests[i].file >= file_count) {
            throw std::invalid_argument("request " + std::to_string(i) + " names file " +
                                        std::to_string(requests[i].file) + " of " + std::to_string(file_count));
        }
        if (requests[i].extent.nbytes != 0) {
            require_possible(i, requests[i].extent);
            by_file[requests[i].file].push_back(i);
        }
    }
    for (std::vector<std::size_t> &positions : by_file) {
        std::sort(positions.begin(), positions.end(),
                  [&](std::size_t a, std::size_t b) { return requests[a].extent.offset < requests[b].extent.offset; });
    }
    return by_file;
}

} // namespace

std::vector<Digest> read(const std::vector<std::string> &paths, const std::vector<ReadRequest> &requests,
                         std::uint64_t block_bytes, std::size_t depth, bool hashed) {
    require_limits(block_bytes, depth);
    std::vector<std::vector<std::size_t>> by_file = requests_by_file(paths.size(), requests);
    std::vector<std::unique_ptr<InputFile>> files;
    for (std::size_t file = 0; file < paths.size(); ++file) {
        std::vector<Extent> extents;
        extents.reserve(by_file[file].size());
        for (const std::size_t i : by_file[file]) {
            extents.push_back(requests[i].extent);
        }
        if (!extents.empty()) {
            files.push_back(std::make_unique<InputFile>(paths[file], std::move(extents), std::move(by_file[file]),
                                                        block_bytes, hashed));
        }
    }
    ReadThreads(files).run(depth);
    if (!hashed) {
        return {};
    }
    std::vector<Digest> digests(requests.size(), checksum(nullptr, 0)); // what a request without bytes gets
    for (const auto &file : files) {
        file->deliver(digests);
    }
    return digests;
}

} // namespace dsh
