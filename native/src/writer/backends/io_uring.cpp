// One io_uring and one thread, which submits writes in batches and sleeps in the kernel while the device works.
//
// Guarantee: a write counts as in flight until the kernel has answered it, and is then reported exactly once.
//   - A short write is resumed from its last aligned byte, for O_DIRECT takes no other offset. -EINTR and -EAGAIN mean
//     that the kernel did nothing, so the write is submitted again.
//   - When the ring itself fails, the writes that the kernel did take are still waited for, since the device may be
//     reading live memory, and `release` may not return before that ends. The writes it did not take fail with the
//     ring's error. Later ones wait until nothing is in flight any more, and then go through a new ring.
//   - The thread never takes the GIL. It touches only the queue, the ring and the files of jobs, so the barrier can
//   wait
//     for it from any Python thread.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <liburing.h>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/memory/aligned_memory.hpp"
#include "base/start_thread.hpp"
#include "writer/backends/backend.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t batch_below_bytes = 256 << 10;
constexpr std::uint64_t most_registered_bytes = 1 << 30; // the kernel's limit for one registered buffer

// A place for one write in flight; its address identifies the write in the kernel's completions.
struct Flight {
    std::optional<Write> write; // none while the place is free
    std::uint64_t done = 0;     // bytes written so far
    std::uint64_t turn = 0;     // position among all submissions, counted from 1
};

class IoUringBackend : public Backend {
  public:
    IoUringBackend(WriteQueue &queue, std::size_t depth) : queue_(queue), flights_(depth) {
        if (const int code = make_ring()) {
            throw std::system_error(code, std::generic_category(), "io_uring_queue_init");
        }
        for (Flight &flight : flights_) {
            free_.push_back(&flight);
        }
        completions_.reserve(depth);
        try {
            thread_ = start_thread([this] { work(); });
        } catch (...) {
            io_uring_queue_exit(&ring_);
            throw;
        }
    }

    ~IoUringBackend() override {
        thread_.join();
        io_uring_queue_exit(&ring_);
    }

    bool registered() const override { return registered_; }

  private:
    // Put a new ring in the place of the one before. Returns errno when it can't be made, and the one before stays.
    int make_ring() {
        io_uring fresh{};
        const int result = io_uring_queue_init(static_cast<unsigned>(flights_.size()), &fresh, 0);
        if (result < 0) {
            return -result;
        }
        if (made_) {
            io_uring_queue_exit(&ring_);
        }
        ring_ = fresh;
        made_ = true;
        broken_ = 0;
        register_budget();
        return 0;
    }

    // Registered buffers are pinned once instead of once a write. RLIMIT_MEMLOCK may forbid it; writes then go out as
    // plain ones, with the same result.
    void register_budget() {
        std::vector<iovec> parts;
        for (std::uint64_t at = 0; at < queue_.staging().budget_bytes(); at += most_registered_bytes) {
            parts.push_back(
                {queue_.staging().data() + at, std::min(most_registered_bytes, queue_.staging().budget_bytes() - at)});
        }
        registered_ = io_uring_register_buffers(&ring_, parts.data(), static_cast<unsigned>(parts.size())) == 0;
    }

    std::size_t in_flight() const { return flights_.size() - free_.size(); }

    void work() {
        for (;;) {
            // A broken ring gets no new writes: the next one waits for those in flight, and then for a new ring.
            while (!free_.empty() && (broken_ == 0 || in_flight() == 0)) {
                // With writes in flight the thread must not sleep in the queue: it would leave their completions
                // unread.
                auto write = queue_.next(in_flight() == 0);
                if (!write) {
                    break;
                }
                Flight *flight = free_.back();
                free_.pop_back();
                *flight = {.write = std::move(write)};
                submit_rest(flight);
            }
            if (in_flight() == 0) {
                return;
            }
            reap();
        }
    }

    // Put one submission for the rest of a write into the ring; a planned fault completes it at once.
    void submit_rest(Flight *flight) {
        const Write &write = *flight->write;
        OutputFile &file = write.job->file();
        std::uint64_t want = write.nbytes - flight->done;
        if (file.faults()) {
            const std::int64_t admitted = file.faults()->admit(want, file.align());
            if (admitted < 0) {
                complete(flight, static_cast<int>(-admitted));
                return;
            }
            want = static_cast<std::uint64_t>(admitted);
        }
        // This write's own flight is counted. When another one is still with the broken ring, or no new ring can be
        // made, this write fails; the next one tries again.
        if (broken_ != 0 && (in_flight() > 1 || make_ring() != 0)) {
            complete(flight, broken_);
            return;
        }
        io_uring_sqe *sqe = io_uring_get_sqe(&ring_); // never null: the ring has a place for every flight
        prepare(sqe, write, flight->done, want);
        io_uring_sqe_set_data(sqe, flight);
        flight->turn = ++turn_;
        // Large writes are submitted before the next block is hashed, so that the device never waits for a checksum;
        // small ones are submitted together. An error here is not lost: `reap` submits again and sees it.
        if (want >= batch_below_bytes) {
            io_uring_submit(&ring_);
        }
    }

    void prepare(io_uring_sqe *sqe, const Write &write, std::uint64_t done, std::uint64_t nbytes) {
        const int fd = write.job->file().descriptor();
        const std::byte *data = write.data + done;
        const std::uint64_t offset = write.offset + done;
        if (write.slot && registered_) {
            const auto begin = static_cast<std::uint64_t>(data - queue_.staging().data());
            const std::uint64_t part = begin / most_registered_bytes;
            // A slot that crosses from one registered buffer into the next belongs to neither.
            if ((begin + nbytes - 1) / most_registered_bytes == part) {
                io_uring_prep_write_fixed(sqe, fd, data, static_cast<unsigned>(nbytes), offset, static_cast<int>(part));
                return;
            }
        }
        io_uring_prep_write(sqe, fd, data, static_cast<unsigned>(nbytes), offset);
    }

    // Wait for at least one completion, and take all that have come.
    void reap() {
        // For a test that reorders, all completions are awaited before the first is reported, the last one first.
        completions_.clear();
        bool reorder = false;
        do {
            if (broken_ == 0) {
                submit_and_wait();
            } else {
                // A broken ring takes no calls, yet the kernel still posts the completions of what it has taken.
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            io_uring_cqe *cqe = nullptr;
            while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
                completions_.emplace_back(static_cast<Flight *>(io_uring_cqe_get_data(cqe)), cqe->res);
                io_uring_cqe_seen(&ring_, cqe);
                const auto &faults = completions_.back().first->write->job->file().faults();
                reorder = reorder || (faults && faults->settings.reorder);
            }
        } while (reorder && completions_.size() < in_flight());
        if (reorder) {
            std::reverse(completions_.begin(), completions_.end());
        }
        for (const auto &[flight, result] : completions_) {
            account(flight, result);
        }
    }

    void submit_and_wait() {
        const int result = io_uring_submit_and_wait(&ring_, 1);
        if (result == -EAGAIN || result == -EBUSY) {
            // The kernel is short of memory or of completion entries: `reap` takes completions before the next try.
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        } else if (result < 0 && result != -EINTR) {
            broken_ = -result;
            // The kernel takes submissions in order, so those still in the ring are the last ones.
            const std::uint64_t taken = turn_ - io_uring_sq_ready(&ring_);
            for (Flight &flight : flights_) {
                if (flight.write && flight.turn > taken) {
                    complete(&flight, broken_);
                }
            }
        }
    }

    void account(Flight *flight, int result) {
        OutputFile &file = flight->write->job->file();
        if (result == -EINTR || result == -EAGAIN) {
            submit_rest(flight);
            return;
        }
        if (result < 0) {
            complete(flight, -result);
            return;
        }
        const auto written = static_cast<std::uint64_t>(result);
        const std::uint64_t kept = file.direct() ? round_down(written, file.align()) : written;
        flight->done += kept;
        if (flight->done == flight->write->nbytes) {
            complete(flight, 0);
        } else if (kept == 0) {
            // Not one aligned block was written: the disk is full, or the file has reached its limit.
            complete(flight, ENOSPC);
        } else {
            submit_rest(flight);
        }
    }

    void complete(Flight *flight, int code) {
        queue_.completed(std::move(*flight->write), code);
        flight->write.reset();
        free_.push_back(flight);
    }

    WriteQueue &queue_;
    std::vector<Flight> flights_;
    std::vector<Flight *> free_;
    std::vector<std::pair<Flight *, int>> completions_;
    std::uint64_t turn_ = 0; // submissions so far
    int broken_ = 0;         // errno of the ring itself, once it has failed
    io_uring ring_{};
    bool made_ = false; // there is a ring
    bool registered_ = false;
    std::jthread thread_;
};

} // namespace

std::unique_ptr<Backend> make_io_uring_backend(WriteQueue &queue, std::size_t depth) {
    return std::make_unique<IoUringBackend>(queue, depth);
}

std::string probe_io_uring() {
    io_uring ring{};
    const int result = io_uring_queue_init(2, &ring, 0);
    if (result < 0) {
        return std::string("io_uring_queue_init failed: ") + std::strerror(-result) +
               " (containers often forbid it by seccomp, and sysctl kernel.io_uring_disabled does)";
    }
    io_uring_queue_exit(&ring);
    return "";
}

} // namespace dsh
