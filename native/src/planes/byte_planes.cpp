#include "planes/byte_planes.hpp"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "planes/kernels/kernel.hpp"
#include "planes/raw_bytes.hpp"

namespace dsh {
namespace {

static_assert(most_planes == std::size_t{1} << (element_kinds - 1));

// The place of the loops for elements of so many bytes.
std::size_t kind_of(std::size_t itemsize) {
    require_itemsize(itemsize);
    return static_cast<std::size_t>(std::countr_zero(itemsize));
}

} // namespace

void require_itemsize(std::size_t itemsize) {
    if (!std::has_single_bit(itemsize) || itemsize > most_planes) {
        throw std::invalid_argument("itemsize is " + std::to_string(itemsize) + " where 1, 2, 4 or 8 bytes are known");
    }
}

void split_planes(const std::byte *data, const std::byte *base, std::size_t count, std::size_t itemsize,
                  Transform transform, std::byte *planes) {
    planes_kernel().split[kind_of(itemsize)](raw(data), raw(base), count, transform, raw(planes));
}

void join_planes(std::span<const Plane> planes, const std::byte *base, std::size_t count, Transform transform,
                 std::byte *data) {
    planes_kernel().join[kind_of(planes.size())](planes.data(), raw(base), count, transform, raw(data));
}

bool is_constant(std::span<const std::byte> plane) {
    return plane.empty() || std::memcmp(plane.data(), plane.data() + 1, plane.size() - 1) == 0;
}

} // namespace dsh
