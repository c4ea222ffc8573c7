// Binds planes/: the packing of blocks, and of their unpacking what Python would do slowly.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
#include "planes/few_mantissas.hpp"
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

// Holds the base of data that takes `nbytes`, or nothing where no transform needs one.
class Base {
  public:
    Base(std::span<const Transform> transforms, nb::handle base, std::size_t nbytes) {
        const auto needing = std::ranges::find_if(transforms, needs_base);
        if (needing == transforms.end()) {
            return;
        }
        if (base.is_none()) {
            const std::string text = "transform " + std::to_string(static_cast<unsigned>(*needing)) + " needs a base";
            throw nb::value_error(text.c_str());
        }
        buffer_ = std::make_unique<Buffer>(base);
        require_same_length(buffer_->nbytes(), "base", nbytes, "the data");
    }
    const std::byte *data() const { return buffer_ ? bytes_of(*buffer_) : nullptr; }

  private:
    std::unique_ptr<Buffer> buffer_;
};

void join_buffers(std::vector<nb::object> planes, nb::handle into, unsigned transform, nb::handle base) {
    const WritableBuffer data(into);
    const Transform kind = transform_of(transform);
    const Base other({&kind, 1}, base, data.nbytes());
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

std::size_t spread(nb::handle quads, nb::handle others, nb::handle into) {
    const Buffer from(quads);
    const Buffer large(others);
    const WritableBuffer plane(into);
    require_same_length(from.nbytes(), "quads", quads_of(plane.nbytes()), "into, a fourth of it,");
    const WithoutGil unlocked;
    return spread_quads(bytes_of(from), {bytes_of(large), large.nbytes()}, plane.nbytes(), bytes_of(plane));
}

void join_indices(nb::handle indices, nb::handle exponents, nb::handle mantissas, nb::handle into) {
    const Buffer index(indices);
    const Buffer exponent(exponents);
    const Buffer table(mantissas);
    const WritableBuffer data(into);
    const std::size_t count = data.nbytes() / sizeof(std::uint32_t);
    const auto plane = [&](const Buffer &buffer, const char *name) {
        const bool stands_for_all = buffer.nbytes() == 1 && count > 1;
        require_same_length((stands_for_all ? count : buffer.nbytes()) * sizeof(std::uint32_t), name, data.nbytes(),
                            "into, four times it,");
        return Plane{buffer.data(), stands_for_all};
    };
    const Plane of_indices = plane(index, "indices");
    const Plane of_exponents = plane(exponent, "exponents");
    std::vector<std::uint32_t> known(table.nbytes() / sizeof(std::uint32_t));
    std::memcpy(known.data(), table.data(), known.size() * sizeof(std::uint32_t));
    std::size_t highest;
    {
        const WithoutGil unlocked;
        highest = join_indexed(of_indices, of_exponents, known, count, bytes_of(data));
    }
    if (count != 0 && highest >= known.size()) {
        const std::string text =
            "index " + std::to_string(highest) + " of a mantissa, where there are " + std::to_string(known.size());
        throw nb::value_error(text.c_str());
    }
}

nb::bytes pack(nb::handle data, std::size_t itemsize, const std::vector<unsigned> &transforms, nb::handle base,
               bool may_index) {
    // Each thread keeps one: what it has is dear to make.
    thread_local BlockPacker packer;
    const Buffer from(data);
    std::vector<Transform> tried;
    for (const unsigned number : transforms) {
        tried.push_back(transform_of(number));
    }
    const Base other(tried, base, from.nbytes());
    const RawBlock block{{bytes_of(from), from.nbytes()}, itemsize};
    std::size_t nbytes;
    {
        const WithoutGil unlocked;
        nbytes = packer.pack(block, other.data(), tried, may_index);
    }
    nb::bytes packed = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes)));
    if (!packed.is_valid()) {
        throw nb::python_error();
    }
    packer.write(reinterpret_cast<std::byte *>(PyBytes_AS_STRING(packed.ptr())));
    return packed;
}

using Packed = std::vector<std::pair<std::size_t, nb::bytes>>;

Packed pack_all(ParallelPacker &packer, const std::vector<std::pair<nb::object, std::size_t>> &blocks, nb::handle into,
                std::size_t team) {
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
        found = packer.pack(given, {bytes_of(room), room.nbytes()}, team);
    }
    Packed packed;
    for (const PackedBlock &block : found) {
        packed.emplace_back(block.nbytes, digest_bytes({&block.checksum, 1}));
    }
    return packed;
}

} // namespace

void bind_planes(nb::module_ &module) {
    module.def("pack_block", &pack, "data"_a, nb::kw_only(), "itemsize"_a, "transforms"_a, "base"_a = nb::none(),
               "may_index"_a = false);
    nb::class_<ParallelPacker>(module, "ParallelPacker")
        .def(nb::init<std::size_t>(), nb::kw_only(), "threads"_a)
        .def("pack", &pack_all, "blocks"_a, nb::kw_only(), "into"_a, "team"_a = 0);
    module.def("join_planes", &join_buffers, "planes"_a, nb::kw_only(), "into"_a, "transform"_a, "base"_a = nb::none());
    module.def("join_indexed", &join_indices, "indices"_a, "exponents"_a, nb::kw_only(), "mantissas"_a, "into"_a);
    module.def("spread_quads", &spread, "quads"_a, nb::kw_only(), "others"_a, "into"_a);
}

} // namespace dsh::bindings
