// The loops over byte planes for processors with AVX2 alone, or whose BMI2 is slow.
#include "planes/kernels/kernel_body.hpp"

namespace dsh {
namespace {

bool works() { return __builtin_cpu_supports("avx2"); }

} // namespace

const PlanesKernel avx2_planes = {
    &works,
    {&split<uint8_t>, &split<uint16_t>, &split<uint32_t>, &split<uint64_t>},
    {&join<uint8_t>, &join<uint16_t>, &join<uint32_t>, &join<uint64_t>},
    &gather,
    &spread,
};

} // namespace dsh
