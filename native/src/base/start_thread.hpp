// Starts threads that leave the process's signals to others, so that Ctrl-C interrupts Python's main thread.
#pragma once

#include <csignal>
#include <pthread.h>
#include <thread>
#include <utility>

namespace dsh {

// The mask is set before the thread exists, because the new thread inherits it: a signal can't come in between. Throws
// std::system_error when the host gives no more threads.
template <typename Work> std::jthread start_thread(Work &&work) {
    sigset_t blocked;
    sigset_t before;
    sigfillset(&blocked);
    // These signals are raised by a thread's own fault and must reach that thread.
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) {
        sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    struct Restore {
        const sigset_t *mask;
        ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
    } restore{&before};
    return std::jthread(std::forward<Work>(work));
}

} // namespace dsh
