// The loops over byte planes for any processor.
#include "planes/kernels/kernel_body.hpp"

namespace dsh {
namespace {

bool works() { return true; }

} // namespace

const PlanesKernel portable_planes = kernel_that(&works);

} // namespace dsh
