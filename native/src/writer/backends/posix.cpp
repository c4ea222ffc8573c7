// pwrite from a pool of threads, for hosts that forbid io_uring. Each thread has one write in flight at a time.

#include <thread>
#include <vector>

#include "base/start_thread.hpp"
#include "writer/backends/backend.hpp"

namespace dsh {
namespace {

class PosixBackend : public Backend {
  public:
    PosixBackend(WriteQueue &queue, std::size_t depth) : queue_(queue) {
        try {
            for (std::size_t i = 0; i < depth; ++i) {
                threads_.push_back(start_thread([this, i] { work(i); }));
            }
        } catch (...) {
            // The threads that did start wait for work until the queue stops; they are joined when `threads_` goes.
            queue_.stop();
            throw;
        }
    }

    bool registered() const override { return false; }

  private:
    void work(std::size_t index) {
        while (auto write = queue_.next(true)) {
            OutputFile &file = write->job->file();
            const int code = file.write(write->data, write->offset, write->nbytes);
            if (file.faults() && file.faults()->settings.reorder && index % 2 == 0) {
                // Hold every other thread's completion back behind the ones submitted after it.
                std::this_thread::sleep_for(std::chrono::microseconds(500));
            }
            queue_.completed(std::move(*write), code);
        }
    }

    WriteQueue &queue_;
    std::vector<std::jthread> threads_;
};

} // namespace

std::unique_ptr<Backend> make_posix_backend(WriteQueue &queue, std::size_t depth) {
    return std::make_unique<PosixBackend>(queue, depth);
}

} // namespace dsh
