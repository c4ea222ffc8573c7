// Releases Python's lock while native code works, also in a thread that outlives the interpreter.

#pragma once

#include <Python.h>
#include <unistd.h>

namespace dsh::bindings {

// Holds the GIL released from its construction to its destruction.
//
// A daemon thread that asks for the GIL while the interpreter is being torn down is ended by CPython before 3.14 with
// pthread_exit, whose unwinding aborts the process in any C++ function that may not throw. It sleeps here instead until
// the process has ended, as CPython 3.14 lets it.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil &) = delete;
    WithoutGil &operator=(const WithoutGil &) = delete;
    ~WithoutGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) { // the unwinding has no exception to which a reference could be bound
            for (;;) {
                pause();
            }
        }
    }

  private:
    PyThreadState *state_;
};

} // namespace dsh::bindings
