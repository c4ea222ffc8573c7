// Runs work on the threads of the OpenMP runtime that the process has loaded, if it has: those of PyTorch.
#pragma once

#include <cstddef>
#include <functional>

namespace dsh {

// Run `work`, which throws nothing, in each of the `threads` threads that a parallel region of the calling thread has,
// itself among them. False where GNU's runtime is not loaded: then nothing has run.
//
// After a region its threads wait for the next one actively, for milliseconds: what other threads compute meanwhile
// shares the processors with them. A region of as many threads as the one before it starts none, and ends none.
bool run_on_openmp_team(std::size_t threads, std::function<void()> work);

} // namespace dsh
