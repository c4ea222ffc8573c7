#include "planes/quads.hpp"

#include "planes/kernels/kernel.hpp"
#include "planes/raw_bytes.hpp"

namespace dsh {

std::size_t gather_quads(const std::byte *plane, std::size_t count, std::byte *quads, std::byte *others) {
    return planes_kernel().gather_quads(raw(plane), count, raw(quads), raw(others));
}

std::size_t spread_quads(const std::byte *quads, std::span<const std::byte> others, std::size_t count,
                         std::byte *plane) {
    return planes_kernel().spread_quads(raw(quads), raw(others.data()), others.size(), count, raw(plane));
}

} // namespace dsh
