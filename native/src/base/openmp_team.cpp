#include "base/openmp_team.hpp"

#include <dlfcn.h>

namespace dsh {
namespace {

// What compilers call for a parallel region: the function, its argument, the number of threads, and flags.
using ParallelRegion = void (*)(void (*)(void *), void *, unsigned, unsigned);

// Only a runtime that is there has threads that wait. Never closed: its threads run as long as the process.
ParallelRegion loaded_region() {
    void *const runtime = dlopen("libgomp.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return runtime == nullptr ? nullptr : reinterpret_cast<ParallelRegion>(dlsym(runtime, "GOMP_parallel"));
}

} // namespace

bool run_on_openmp_team(std::size_t threads, std::function<void()> work) {
    const ParallelRegion region = loaded_region();
    if (region == nullptr) {
        return false;
    }
    const auto run = [](void *function) { (*static_cast<std::function<void()> *>(function))(); };
    region(run, &work, static_cast<unsigned>(threads), 0);
    return true;
}

} // namespace dsh
