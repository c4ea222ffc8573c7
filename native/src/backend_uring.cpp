// One io_uring and one thread: submits in batches, sleeps in the kernel while the device works.

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <liburing.h>
#include <system_error>
#include <thread>
#include <vector>

#include "backend.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t batch_below_bytes = 256 << 10;

struct Flight {
    Write write;
    std::uint64_t done = 0;
    int code = 0;
};

class UringBackend : public Backend {
  public:
    UringBackend(WriteQueue &queue, std::size_t depth) : queue_(queue), depth_(depth) {
        const int result = io_uring_queue_init(static_cast<unsigned>(depth), &ring_, 0);
        if (result < 0) {
            throw std::system_error(-result, std::generic_category(), "io_uring_queue_init");
        }
        // Registration pins the budget once instead of once a write; RLIMIT_MEMLOCK may forbid it, and nothing depends
        // on it.
        iovec budget{queue.staging().data(), queue.staging().budget_bytes()};
        registered_ = io_uring_register_buffers(&ring_, &budget, 1) == 0;
        thread_ = std::jthread([this] { work(); });
    }

    ~UringBackend() override {
        thread_.join();
        io_uring_queue_exit(&ring_);
    }

    bool registered() const override { return registered_; }

  private:
    void work() {
        for (;;) {
            while (flying_ < depth_) {
                auto write = queue_.next(flying_ == 0);
                if (!write) {
                    break;
                }
                ++flying_;
                launch(new Flight{std::move(*write)});
            }
            if (flying_ == 0) {
                return;
            }
            reap();
        }
    }

    // Put one submission for what is left of a flight into the ring; a planned fault lands it at once.
    void launch(Flight *flight) {
        const Write &write = flight->write;
        File &file = write.job->file();
        std::uint64_t want = write.nbytes - flight->done;
        if (file.faults()) {
            const std::int64_t admitted = file.faults()->admit(want, file.align());
            if (admitted < 0) {
                flight->code = static_cast<int>(-admitted);
                land(flight);
                return;
            }
            want = static_cast<std::uint64_t>(admitted);
        }
        io_uring_sqe *sqe = io_uring_get_sqe(&ring_);
        const std::byte *data = write.data + flight->done;
        const std::uint64_t offset = write.offset + flight->done;
        if (write.slot && registered_) {
            io_uring_prep_write_fixed(sqe, file.descriptor(), data, static_cast<unsigned>(want), offset, 0);
        } else {
            io_uring_prep_write(sqe, file.descriptor(), data, static_cast<unsigned>(want), offset);
        }
        io_uring_sqe_set_data(sqe, flight);
        ++submitted_;
        // Large writes go out before the next block is hashed, so that the device never waits for us; small ones go
        // together.
        if (want >= batch_below_bytes) {
            io_uring_submit(&ring_);
        }
    }

    // Submit what is queued, wait for at least one completion, take all that are there.
    void reap() {
        if (submitted_ == 0) {
            return;
        }
        // Completions held back for a reordering test all come in before the first is reported, last one first.
        std::vector<io_uring_cqe> completions;
        bool reorder = false;
        do {
            const int result = io_uring_submit_and_wait(&ring_, 1);
            if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY) {
                throw std::system_error(-result, std::generic_category(), "io_uring_submit_and_wait");
            }
            io_uring_cqe *cqe = nullptr;
            while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
                completions.push_back(*cqe);
                io_uring_cqe_seen(&ring_, cqe);
                const auto *flight = static_cast<const Flight *>(io_uring_cqe_get_data(&completions.back()));
                const auto &faults = flight->write.job->file().faults();
                reorder = reorder || (faults && faults->settings.reorder);
                --submitted_;
            }
        } while (reorder && submitted_ > 0);
        if (reorder) {
            std::reverse(completions.begin(), completions.end());
        }
        for (const io_uring_cqe &completion : completions) {
            account(static_cast<Flight *>(io_uring_cqe_get_data(&completion)), completion.res);
        }
    }

    void account(Flight *flight, int result) {
        File &file = flight->write.job->file();
        if (result == -EINTR || result == -EAGAIN) {
            launch(flight);
            return;
        }
        if (result < 0) {
            flight->code = -result;
            land(flight);
            return;
        }
        const auto moved = static_cast<std::uint64_t>(result);
        const std::uint64_t kept = file.direct() ? round_down(moved, file.align()) : moved;
        flight->done += kept;
        if (flight->done < flight->write.nbytes) {
            if (kept == 0) {
                flight->code = ENOSPC;
                land(flight);
                return;
            }
            launch(flight);
            return;
        }
        land(flight);
    }

    void land(Flight *flight) {
        queue_.completed(std::move(flight->write), flight->code);
        delete flight;
        --flying_;
    }

    WriteQueue &queue_;
    std::size_t depth_;
    std::size_t flying_ = 0;    // taken from the queue and not reported
    std::size_t submitted_ = 0; // of them, those that the kernel will answer
    io_uring ring_{};
    bool registered_ = false;
    std::jthread thread_;
};

} // namespace

std::unique_ptr<Backend> make_uring_backend(WriteQueue &queue, std::size_t depth) {
    return std::make_unique<UringBackend>(queue, depth);
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
