// System calls that fail a few times as told, and then go on to the kernel. The linker puts them in the place of the
// real ones (--wrap), so the core is built as it always is.
#pragma once

#include <atomic>

namespace dsh::test {

struct FailingCall {
    std::atomic<int> code = 0;  // errno
    std::atomic<int> times = 0; // still to come

    void fail(int with, int how_often) {
        code = with;
        times = how_often;
    }
    // Take one failure.
    bool fails() { return times.load() > 0 && times.fetch_sub(1) > 0; }
};

extern FailingCall failing_pread, failing_ftruncate, failing_fdatasync, failing_mmap;

} // namespace dsh::test
