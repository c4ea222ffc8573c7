// Threads that leave the process's signals to others: a Ctrl-C must interrupt the main thread, not a thread of ours.
#pragma once

#include <csignal>
#include <pthread.h>
#include <thread>
#include <utility>

namespace dsh {

// Throws std::system_error when the host gives no more threads.
template <typename Work> std::jthread start_thread(Work &&work) {
    sigset_t blocked;
    sigset_t before;
    sigfillset(&blocked);
    // These belong to the thread that caused them.
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
