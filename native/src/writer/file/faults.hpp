// Deterministic faults on data writes: tests slow, shorten, fail and reorder what the kernel would do.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

namespace dsh {

struct FaultSettings {
    std::uint64_t delay_us = 0;          // sleep before each write
    std::int64_t fail_after = -1;        // so many writes succeed, all others fail; negative: none fails
    int code = EIO;                      // of the writes that fail
    std::uint64_t short_write_every = 0; // each n-th write is cut in half; 0: none
    bool reorder = false;                // report completions last in, first out
};

class Faults : public std::enable_shared_from_this<Faults> {
  public:
    explicit Faults(FaultSettings settings) : settings(settings) {}

    // Return how many bytes the next data write of `nbytes` may write, or a negative errno.
    std::int64_t admit(std::uint64_t nbytes, std::uint64_t granule) {
        if (settings.delay_us != 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(settings.delay_us));
        }
        const std::uint64_t turn = count_.fetch_add(1);
        if (settings.fail_after >= 0 && turn >= static_cast<std::uint64_t>(settings.fail_after)) {
            return -settings.code;
        }
        if (settings.short_write_every != 0 && (turn + 1) % settings.short_write_every == 0 && nbytes >= 2 * granule) {
            return static_cast<std::int64_t>(nbytes / 2 / granule * granule);
        }
        return static_cast<std::int64_t>(nbytes);
    }

    const FaultSettings settings;

  private:
    std::atomic<std::uint64_t> count_{0};
};

} // namespace dsh
