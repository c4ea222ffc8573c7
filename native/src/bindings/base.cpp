// Binds base/: checksums and the file-system probe.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <nanobind/stl/string.h>

#include "base/checksum.hpp"
#include "base/file_system_probe.hpp"
#include "base/mapped_memory.hpp"
#include "base/sampled_digest.hpp"
#include "bindings/bind.hpp"
#include "bindings/conversions.hpp"
#include "bindings/without_gil.hpp"

namespace dsh::bindings {
namespace {

using namespace nb::literals;

nb::bytes checksum_buffer(nb::handle data) {
    const Buffer buffer(data);
    Digest digest;
    {
        const WithoutGil unlocked;
        digest = checksum(buffer.data(), buffer.nbytes());
    }
    return digest_bytes(std::span(&digest, 1));
}

std::vector<Region> regions_of(const Column<std::uint64_t> &addresses, const Column<std::uint64_t> &nbytes) {
    std::vector<Region> regions(addresses.shape(0));
    require_same_length(nbytes.shape(0), "nbytes", regions.size(), "addresses");
    for (std::size_t i = 0; i < regions.size(); ++i) {
        regions[i] = {addresses.data()[i], nbytes.data()[i]};
    }
    return regions;
}

nb::bytes checksum_regions(Column<std::uint64_t> addresses, Column<std::uint64_t> nbytes) {
    const std::vector<Region> regions = regions_of(addresses, nbytes);
    std::vector<Digest> digests;
    {
        const WithoutGil unlocked;
        digests = checksum_memory(regions);
    }
    return digest_bytes(digests);
}

nb::bytes sample_regions(Column<std::uint64_t> addresses, Column<std::uint64_t> nbytes, std::uint64_t seed) {
    const std::vector<Region> regions = regions_of(addresses, nbytes);
    std::vector<std::uint64_t> digests;
    {
        const WithoutGil unlocked;
        digests = sampled_digests(regions, seed);
    }
    return nb::bytes(reinterpret_cast<const char *>(digests.data()), digests.size() * sizeof(std::uint64_t));
}

nb::dict file_system_dict(const std::string &directory) {
    FileSystemFacts facts;
    {
        const WithoutGil unlocked;
        facts = probe_file_system(directory);
    }
    nb::dict result;
    result["type"] = facts.type;
    result["direct"] = facts.direct;
    result["memory_align"] = facts.memory_align;
    result["offset_align"] = facts.offset_align;
    result["block_bytes"] = facts.block_bytes;
    result["place_align"] = facts.place_align;
    result["reason"] = facts.reason;
    return result;
}

} // namespace

void bind_base(nb::module_ &module) {
    module.def("checksum", &checksum_buffer, "data"_a);
    module.def("checksum_memory", &checksum_regions, nb::kw_only(), "addresses"_a, "nbytes"_a);
    module.def("sampled_digests", &sample_regions, nb::kw_only(), "addresses"_a, "nbytes"_a, "seed"_a = 0);
    module.attr("SAMPLED_WHOLE_BYTES") = sampled_whole_bytes;
    module.def("probe_file_system", &file_system_dict, "directory"_a);
}

} // namespace dsh::bindings
