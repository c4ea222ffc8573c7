// The checksum for processors with AVX-512.
#include "base/checksums/checksum_kernel_body.hpp"

namespace dsh {
namespace {

bool works() { return __builtin_cpu_supports("avx512f"); }

} // namespace

const ChecksumKernel avx512_checksum = {&works, &whole, &begin, &add, &end};

} // namespace dsh
