// The checksum for every processor.
#include "base/checksums/checksum_kernel_body.hpp"

namespace dsh {
namespace {

bool works() { return true; }

} // namespace

const ChecksumKernel portable_checksum = {&works, &whole, &begin, &add, &end};

} // namespace dsh
