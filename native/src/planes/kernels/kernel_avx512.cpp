// The loops over byte planes for processors with AVX-512 that compress and expand bytes.
#include "planes/kernels/kernel_body.hpp"

namespace dsh {
namespace {

bool works() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("bmi2");
}

} // namespace

const PlanesKernel avx512_planes = kernel_that(&works);

} // namespace dsh
