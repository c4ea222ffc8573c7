// Binds planes/: blocks packed, and elements cut into byte planes and put together again, their quads, and what they
// take coded.

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind.hpp"
#include "bindings/conversions.hpp"
#include "bindings/without_gil.hpp"
#include "planes/block_packer.hpp"
#include "planes/byte_planes.hpp"
#include "planes/coded_bytes.hpp"
#include "planes/parallel_packer.hpp"
#include "planes/quads.hpp"

namespace dsh::bindings {
namespace {

using namespace nb::literals;

const std::byte *bytes_of(const Buffer &buffer) { return static_cast<const std::byte *>(buffer.data()); }
std::byte *bytes_of(const WritableBuffer &buffer) { return static_cast<std::byte *>(buffer.data()); }

Transform transform_of(unsigned number) {
    if (number >= transforms) {
        const std::string text =
            "transform " + std::to_string(number) + ": the known ones are below " + std::to_string(transforms);
        throw nb::value_error(text.c_str());
    }
    return static_cast<Transform>(number);
}

// The base of elements that take `nbytes`, or null for a transform that needs none.
class Base {
  public:
    Base(Transform transform, nb::handle base, std::size_t nbytes) {
        if (needs_base(transform)) {
            buffer_ = std::make_unique<Buffer>(base);
            require_same_length(buffer_->nbytes(), "base", nbytes, "the data");
        }
    }
    const std::byte *data() const { return buffer_ ? bytes_of(*buffer_) : nullptr; }

  private:
    std::unique_ptr<Buffer> buffer_;
};

std::size_t elements_of(std::size_t nbytes, std::size_t itemsize) {
    if (itemsize == 0 || nbytes % itemsize != 0) {
        throw nb::value_error("the data is no whole number of elements");
    }
    return nbytes / itemsize;
}

void split_buffer(nb::handle data, nb::handle into, std::size_t itemsize, unsigned transform, nb::handle base) {
    const Buffer from(data);
    const WritableBuffer planes(into);
    const Transform kind = transform_of(transform);
    require_same_length(planes.nbytes(), "into", from.nbytes(), "the data");
    const std::size_t count = elements_of(from.nbytes(), itemsize);
    const Base other(kind, base, from.nbytes());
    const WithoutGil unlocked;
    split_planes(bytes_of(from), other.data(), count, itemsize, kind, bytes_of(planes));
}

void join_buffers(std::vector<nb::object> planes, nb::handle into, unsigned transform, nb::handle base) {
    const WritableBuffer data(into);
    const Transform kind = transform_of(transform);
    const Base other(kind, base, data.nbytes());
    const std::size_t count = data.nbytes() / (planes.empty() ? 1 : planes.size());
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<Plane> given;
    for (const nb::object &plane : planes) {
        const auto &buffer = buffers.emplace_back(std::make_unique<Buffer>(plane));
        const bool stands_for_all = buffer->nbytes() == 1 && count > 1;
        const std::size_t nbytes = stands_for_all ? count : buffer->nbytes();
        require_same_length(nbytes * planes.size(), "a plane, for all of them,", data.nbytes(), "the data");
        given.push_back({buffer->data(), stands_for_all});
    }
    const WithoutGil unlocked;
    join_planes(given, other.data(), count, kind, bytes_of(data));
}

std::vector<double> coded_bytes_of(nb::handle data, std::size_t itemsize, unsigned transform, nb::handle base) {
    const Buffer from(data);
    const Transform kind = transform_of(transform);
    const std::size_t count = elements_of(from.nbytes(), itemsize);
    const Base other(kind, base, from.nbytes());
    const WithoutGil unlocked;
    const auto found = coded_bytes(bytes_of(from), other.data(), count, itemsize, kind);
    return {found.begin(), found.begin() + static_cast<std::ptrdiff_t>(itemsize)};
}

bool has_one_value(nb::handle plane) {
    const Buffer from(plane);
    const WithoutGil unlocked;
    return is_constant({bytes_of(from), from.nbytes()});
}

std::pair<nb::bytes, nb::bytes> gather(nb::handle plane) {
    const Buffer from(plane);
    const auto quads = std::make_unique_for_overwrite<std::byte[]>(quads_of(from.nbytes()));
    const auto others = std::make_unique_for_overwrite<std::byte[]>(from.nbytes());
    std::size_t found;
    {
        const WithoutGil unlocked;
        found = gather_quads(bytes_of(from), from.nbytes(), quads.get(), others.get());
    }
    return {nb::bytes(quads.get(), quads_of(from.nbytes())), nb::bytes(others.get(), found)};
}

std::size_t spread(nb::handle quads, nb::handle others, nb::handle into) {
    const Buffer from(quads);
    const Buffer large(others);
    const WritableBuffer plane(into);
    require_same_length(from.nbytes(), "quads", quads_of(plane.nbytes()), "into, a fourth of it,");
    const WithoutGil unlocked;
    return spread_quads(bytes_of(from), {bytes_of(large), large.nbytes()}, plane.nbytes(), bytes_of(plane));
}

nb::bytes pack(nb::handle data, std::size_t itemsize, const std::vector<unsigned> &transforms, nb::handle base) {
    // Each thread keeps one: what it has is dear to make.
    thread_local BlockPacker packer;
    const Buffer from(data);
    std::vector<Transform> tried;
    std::unique_ptr<Base> other;
    for (const unsigned number : transforms) {
        tried.push_back(transform_of(number));
        if (needs_base(tried.back()) && !other) {
            other = std::make_unique<Base>(tried.back(), base, from.nbytes());
        }
    }
    if (tried.empty()) {
        throw nb::value_error("transforms is empty: a block has one");
    }
    const RawBlock block{{bytes_of(from), from.nbytes()}, itemsize};
    std::size_t nbytes;
    {
        const WithoutGil unlocked;
        nbytes = packer.pack(block, other ? other->data() : nullptr, tried);
    }
    nb::bytes packed = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes)));
    if (!packed.is_valid()) {
        throw nb::python_error();
    }
    packer.write(reinterpret_cast<std::byte *>(PyBytes_AS_STRING(packed.ptr())));
    return packed;
}

using Packed = std::vector<std::pair<std::size_t, nb::bytes>>;

Packed pack_all(ParallelPacker &packer, const std::vector<std::pair<nb::object, std::size_t>> &blocks,
                nb::handle into) {
    const WritableBuffer room(into);
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<RawBlock> given;
    for (const auto &[data, itemsize] : blocks) {
        const auto &buffer = buffers.emplace_back(std::make_unique<Buffer>(data));
        given.push_back({{bytes_of(*buffer), buffer->nbytes()}, itemsize});
    }
    std::vector<PackedBlock> found;
    {
        const WithoutGil unlocked;
        found = packer.pack(given, {bytes_of(room), room.nbytes()});
    }
    Packed packed;
    for (const PackedBlock &block : found) {
        packed.emplace_back(block.nbytes, digest_bytes({&block.checksum, 1}));
    }
    return packed;
}

} // namespace

void bind_planes(nb::module_ &module) {
    module.def("pack_block", &pack, "data"_a, nb::kw_only(), "itemsize"_a, "transforms"_a, "base"_a = nb::none());
    nb::class_<ParallelPacker>(module, "ParallelPacker")
        .def(nb::init<std::size_t>(), nb::kw_only(), "threads"_a)
        .def("pack", &pack_all, "blocks"_a, nb::kw_only(), "into"_a);
    module.def("split_planes", &split_buffer, "data"_a, nb::kw_only(), "into"_a, "itemsize"_a, "transform"_a,
               "base"_a = nb::none());
    module.def("join_planes", &join_buffers, "planes"_a, nb::kw_only(), "into"_a, "transform"_a, "base"_a = nb::none());
    module.def("coded_bytes", &coded_bytes_of, "data"_a, nb::kw_only(), "itemsize"_a, "transform"_a,
               "base"_a = nb::none());
    module.def("is_constant", &has_one_value, "plane"_a);
    module.def("gather_quads", &gather, "plane"_a);
    module.def("spread_quads", &spread, "quads"_a, nb::kw_only(), "others"_a, "into"_a);
}

} // namespace dsh::bindings
