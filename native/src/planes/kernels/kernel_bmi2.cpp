// The loops over byte planes for processors with AVX2 and BMI2.
#include "planes/kernels/kernel_body.hpp"

namespace dsh {
namespace {

// Zen 1 and 2 have pext and pdep, but take hundreds of cycles for one.
bool works() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && !__builtin_cpu_is("amdfam17h");
}

} // namespace

const PlanesKernel bmi2_planes = kernel_that(&works);

} // namespace dsh
