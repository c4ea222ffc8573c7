// A device that writes into memory, so that tests can look at the bytes written, and the sanitizers see a read of live
// bytes after the barrier as a race.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "writer/queue/queue.hpp"

namespace dsh::test {

// Threads that copy every write into the image of its job, and as many that hash.
class MemoryDevice {
  public:
    MemoryDevice(WriteQueue &queue, std::size_t threads, bool fails) : queue_(queue), fails_(fails) {
        for (std::size_t i = 0; i < threads; ++i) {
            threads_.emplace_back([this] { work(); });
            threads_.emplace_back([this] {
                while (queue_.hash_next(true)) {
                }
            });
        }
    }
    ~MemoryDevice() { queue_.stop(); }

    // Return the bytes written for a settled job, and forget them: the next job may have its address.
    std::vector<std::byte> take_image(const WriteJob *job) {
        std::lock_guard lock(mutex_);
        return std::move(images_.extract(job).mapped());
    }

  private:
    void work() {
        while (auto write = queue_.next(true)) {
            std::vector<std::byte> copy(write->data, write->data + write->nbytes);
            std::this_thread::yield();
            int code = 0;
            {
                std::lock_guard lock(mutex_);
                auto &image = images_[write->job.get()];
                image.resize(std::max<std::size_t>(image.size(), write->offset + write->nbytes));
                std::memcpy(image.data() + write->offset, copy.data(), copy.size());
                code = fails_ && ++turn_ % 9 == 0 ? EIO : 0;
            }
            queue_.completed(std::move(*write), code);
        }
    }

    WriteQueue &queue_;
    bool fails_;
    std::uint64_t turn_ = 0;
    std::mutex mutex_;
    std::map<const WriteJob *, std::vector<std::byte>> images_;
    std::vector<std::jthread> threads_;
};

} // namespace dsh::test
