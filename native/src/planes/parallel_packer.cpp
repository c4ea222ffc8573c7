#include "planes/parallel_packer.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/openmp_team.hpp"
#include "base/start_thread.hpp"

namespace dsh {
namespace {

constexpr std::array transforms_without_base = {Transform::plain, Transform::rotated};

// Shares some blocks among threads: each takes the next one, and writes it once it is known where the one before ends.
class Work {
  public:
    Work(std::span<const RawBlock> blocks, std::byte *into) : blocks_(blocks), into_(into), packed_(blocks.size()) {}

    void run(BlockPacker &packer) {
        try {
            for (std::size_t i; (i = next_.fetch_add(1)) < blocks_.size();) {
                const std::size_t nbytes = packer.pack(blocks_[i], nullptr, transforms_without_base, true);
                const auto at = place(i, nbytes);
                if (!at) {
                    return;
                }
                packer.write(into_ + *at);
                packed_[i] = {nbytes, checksum(into_ + *at, nbytes)};
            }
        } catch (...) {
            const std::scoped_lock lock(mutex_);
            if (!failure_) {
                failure_ = std::current_exception();
            }
            changed_.notify_all();
        }
    }

    // Return the blocks, or throw what a thread has thrown. Only once no thread runs any more.
    std::vector<PackedBlock> result() {
        if (failure_) {
            std::rethrow_exception(failure_);
        }
        return std::move(packed_);
    }

  private:
    // Return where block `i` begins, once all before it are packed; nothing when a thread has failed.
    std::optional<std::size_t> place(std::size_t i, std::size_t nbytes) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return placed_ == i || failure_; });
        if (failure_) {
            return std::nullopt;
        }
        const std::size_t at = end_;
        end_ += nbytes;
        ++placed_;
        changed_.notify_all();
        return at;
    }

    std::span<const RawBlock> blocks_;
    std::byte *into_;
    std::vector<PackedBlock> packed_;
    std::atomic<std::size_t> next_ = 0;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::size_t placed_ = 0;
    std::size_t end_ = 0;
    std::exception_ptr failure_;
};

// Run `work` in the calling thread and in others, `threads` together.
void run_in_threads(std::size_t threads, const std::function<void()> &work) {
    std::vector<std::jthread> others;
    for (std::size_t i = 1; i < threads; ++i) {
        try {
            others.push_back(start_thread(work));
        } catch (const std::system_error &) {
            break; // the host gives no more threads: those that there are do it
        }
    }
    work();
}

} // namespace

ParallelPacker::ParallelPacker(std::size_t threads) {
    if (threads == 0) {
        throw std::invalid_argument("threads is 0: blocks are packed by one at least");
    }
    for (std::size_t i = 0; i < threads; ++i) {
        packers_.push_back(std::make_unique<BlockPacker>());
    }
}

std::vector<PackedBlock> ParallelPacker::pack(std::span<const RawBlock> blocks, std::span<std::byte> into,
                                              std::size_t team) {
    std::size_t most = 0;
    for (const RawBlock &block : blocks) {
        most += most_packed_bytes(block);
    }
    if (most > into.size()) {
        throw std::invalid_argument("into has " + std::to_string(into.size()) + " bytes where the blocks may take " +
                                    std::to_string(most));
    }
    const std::scoped_lock lock(mutex_);
    Work work(blocks, into.data());
    std::atomic<std::size_t> next = 0;
    const auto run = [&] {
        const std::size_t mine = next.fetch_add(1);
        if (mine < packers_.size()) {
            work.run(*packers_[mine]);
        }
    };
    if (team == 0 || !run_on_openmp_team(team, run)) {
        run_in_threads(std::min(packers_.size(), blocks.size()), run);
    }
    return work.result();
}

} // namespace dsh
