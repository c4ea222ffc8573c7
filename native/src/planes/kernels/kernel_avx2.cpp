// The loops over byte planes for processors with AVX2 alone, or whose BMI2 is slow.
#include "planes/kernels/kernel_body.hpp"

namespace dsh {
namespace {

bool works() { return __builtin_cpu_supports("avx2"); }

} // namespace

const PlanesKernel avx2_planes = kernel_that(&works);

} // namespace dsh
