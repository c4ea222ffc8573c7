// The checksum for processors with AVX2.
#include "base/checksums/checksum_kernel_body.hpp"

namespace dsh {
namespace {

bool works() { return __builtin_cpu_supports("avx2"); }

} // namespace

const ChecksumKernel avx2_checksum = {&works, &whole, &begin, &add, &end};

} // namespace dsh
