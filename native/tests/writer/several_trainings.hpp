// Several trainings at one write queue: threads that share its slots and its device.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <mutex>
#include <thread>
#include <vector>

#include "harness.hpp"
#include "writer/memory_device.hpp"
#include "writer/queue/queue.hpp"

namespace dsh::test {

// Runs `train(queue, device, seed, fails)` in a thread for each seed. Throws what one of them has thrown. At the end
// every slot must be back.
template <typename Train>
void several_trainings(std::initializer_list<std::uint64_t> seeds, std::uint64_t block, bool fails, Train train) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    const std::uint64_t all = queue.free_bytes();
    std::mutex mutex;
    std::exception_ptr error;
    {
        MemoryDevice device(queue, 3, fails);
        std::vector<std::jthread> threads;
        for (std::uint64_t seed : seeds) {
            threads.emplace_back([&, seed] {
                try {
                    train(queue, device, seed, fails);
                } catch (...) {
                    std::lock_guard lock(mutex);
                    error = std::current_exception();
                }
            });
        }
        threads.clear();
    }
    if (error) {
        std::rethrow_exception(error);
    }
    CHECK(queue.free_bytes() == all);
}

} // namespace dsh::test
