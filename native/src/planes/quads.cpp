#include "planes/quads.hpp"

#include "planes/kernels/kernel.hpp"

namespace dsh {
namespace {

const unsigned char *raw(const std::byte *bytes) { return reinterpret_cast<const unsigned char *>(bytes); }
unsigned char *raw(std::byte *bytes) { return reinterpret_cast<unsigned char *>(bytes); }

} // namespace

std::size_t gather_quads(const std::byte *plane, std::size_t count, std::byte *quads, std::byte *others) {
    return planes_kernel().gather_quads(raw(plane), count, raw(quads), raw(others));
}

std::size_t spread_quads(const std::byte *quads, std::span<const std::byte> others, std::size_t count,
                         std::byte *plane) {
    return planes_kernel().spread_quads(raw(quads), raw(others.data()), others.size(), count, raw(plane));
}

} // namespace dsh
