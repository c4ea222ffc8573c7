// The loops over byte planes for any processor.
#include "planes/kernels/kernel_body.hpp"

namespace dsh {
namespace {

bool works() { return true; }

} // namespace

const PlanesKernel portable_planes = {
    &works,
    {&split<uint8_t>, &split<uint16_t>, &split<uint32_t>, &split<uint64_t>},
    {&join<uint8_t>, &join<uint16_t>, &join<uint32_t>, &join<uint64_t>},
    &gather,
    &spread,
};

} // namespace dsh
