#include "writer/queue/hashing_threads.hpp"

#include <algorithm>
#include <system_error>

#include "base/start_thread.hpp"

namespace dsh {
namespace {

// One core hashes about 12 GB/s of memory, and a device's link brings up to 55. A small host gives all its cores, for
// a shorter time: live_checksums.hpp says why.
constexpr unsigned most_threads = 4;

} // namespace

HashingThreads::HashingThreads(WriteQueue &queue) {
    const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1U, most_threads);
    while (threads_.size() < count) {
        try {
            threads_.push_back(start_thread([&queue] {
                while (queue.hash_next(true)) {
                }
            }));
        } catch (const std::system_error &) {
            if (threads_.empty()) {
                throw;
            }
            return;
        }
    }
}

} // namespace dsh
