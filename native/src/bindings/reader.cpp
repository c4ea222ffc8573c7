// Binds reader/: many extents of many files in one call.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/files/limits.hpp"
#include "bindings/bind.hpp"
#include "bindings/conversions.hpp"
#include "bindings/without_gil.hpp"
#include "reader/read.hpp"

namespace dsh::bindings {
namespace {

using namespace nb::literals;

nb::bytes read_extents(std::vector<std::string> paths, Column<std::uint32_t> file_index, Column<std::uint64_t> offsets,
                       Column<std::uint64_t> addresses, Column<std::uint64_t> nbytes, std::uint64_t block_bytes,
                       std::size_t depth, bool checksums) {
    const std::size_t count = offsets.shape(0);
    require_same_length(file_index.shape(0), "file_index", count, "offsets");
    require_same_length(addresses.shape(0), "addresses", count, "offsets");
    require_same_length(nbytes.shape(0), "nbytes", count, "offsets");
    std::vector<ReadRequest> requests(count);
    for (std::size_t i = 0; i < count; ++i) {
        requests[i] = {file_index.data()[i], {offsets.data()[i], addresses.data()[i], nbytes.data()[i]}};
    }
    std::vector<Digest> digests;
    {
        const WithoutGil unlocked;
        digests = read(paths, requests, block_bytes, depth, checksums);
    }
    return digest_bytes(digests);
}

} // namespace

void bind_reader(nb::module_ &module) {
    module.def("read", &read_extents, "paths"_a, nb::kw_only(), "file_index"_a, "offsets"_a, "addresses"_a, "nbytes"_a,
               "block_bytes"_a = default_block_bytes, "depth"_a = default_depth, "checksums"_a = true);
}

} // namespace dsh::bindings
