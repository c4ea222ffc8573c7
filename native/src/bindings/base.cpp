// Binds base/: checksums, rounding and the file-system probe.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/checksums/checksum.hpp"
#include "base/files/file_system_probe.hpp"
#include "base/files/io_error.hpp"
#include "base/memory/huge_pages.hpp"
#include "base/memory/mapped_memory.hpp"
#include "base/memory/sampled_digest.hpp"
#include "base/rounding.hpp"
#include "bindings/bind.hpp"
#include "bindings/conversions.hpp"
#include "bindings/without_gil.hpp"

namespace dsh::bindings {
namespace {

using namespace nb::literals;

constexpr std::uint64_t most_copied_bytes = 1 << 30; // by one call of copy_memory

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

void add_buffer(RunningChecksum &self, nb::handle data) {
    const Buffer buffer(data);
    const WithoutGil unlocked;
    self.add(buffer.data(), buffer.nbytes());
}

void copy_region(std::uint64_t address, nb::handle into) {
    const WritableBuffer buffer(into);
    const WithoutGil unlocked;
    for (std::uint64_t done = 0; done < buffer.nbytes();) {
        const std::uint64_t piece = std::min(most_copied_bytes, buffer.nbytes() - done);
        const CopiedRegion region{static_cast<std::byte *>(buffer.data()) + done, {address + done, piece}};
        if (const auto failure = copy_memory(std::span(&region, 1))) {
            throw IoError("copying memory that is no longer mapped,", "", 0, failure->code);
        }
        done += piece;
    }
}

void move_region(std::uint64_t address, std::uint64_t nbytes) {
    const WithoutGil unlocked;
    if (const int code = move_to_huge_pages({address, nbytes})) {
        throw IoError("moving memory into huge pages,", "", 0, code);
    }
}

Half half_of(const std::string &dtype) {
    if (dtype != "BF16" && dtype != "F16") {
        const std::string text = "dtype " + dtype + ": numbers are rounded to BF16 or F16";
        throw nb::value_error(text.c_str());
    }
    return dtype == "BF16" ? Half::bf16 : Half::fp16;
}

void round_region(std::uint64_t address, std::uint64_t target, std::uint64_t numel, const std::string &dtype) {
    const Half to = half_of(dtype);
    const WithoutGil unlocked;
    round_to_half(reinterpret_cast<const std::byte *>(address), numel, to, reinterpret_cast<std::byte *>(target));
}

bool add_rounded(RoundedComparison &self, std::uint64_t masters, std::uint64_t weights, std::uint64_t numel) {
    const WithoutGil unlocked;
    return self.add({masters, 4 * numel}, {weights, 2 * numel});
}

std::pair<nb::bytes, nb::bytes> end_rounded(const RoundedComparison &self) {
    const RoundedDigests digests = self.end();
    return {digest_bytes(std::span(&digests.halves, 1)), digest_bytes(std::span(&digests.numbers, 1))};
}

nb::bytes sample_rounded(Column<std::uint64_t> masters, Column<std::uint64_t> weights, Column<std::uint64_t> numel,
                         const std::string &dtype) {
    const Half to = half_of(dtype);
    std::vector<char> same(masters.shape(0));
    require_same_length(weights.shape(0), "weights", same.size(), "masters");
    require_same_length(numel.shape(0), "numel", same.size(), "masters");
    for (std::size_t i = 0; i < same.size(); ++i) {
        const std::uint64_t count = numel.data()[i];
        same[i] = sample_is_rounded({masters.data()[i], 4 * count}, {weights.data()[i], 2 * count}, to) ? 1 : 0;
    }
    return nb::bytes(same.data(), same.size());
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
    nb::class_<RunningChecksum>(module, "RunningChecksum")
        .def(nb::init<>())
        .def("add", &add_buffer, "data"_a)
        .def("end", [](const RunningChecksum &self) {
            const Digest digest = self.end();
            return digest_bytes(std::span(&digest, 1));
        });
    module.def("copy_memory", &copy_region, nb::kw_only(), "address"_a, "into"_a);
    module.def("move_to_huge_pages", &move_region, nb::kw_only(), "address"_a, "nbytes"_a);
    module.attr("HUGE_PAGE_BYTES") = huge_page_bytes;
    module.def("round_memory", &round_region, nb::kw_only(), "address"_a, "target"_a, "numel"_a, "dtype"_a);
    nb::class_<RoundedComparison>(module, "RoundedComparison")
        .def(
            "__init__",
            [](RoundedComparison *self, const std::string &dtype) { new (self) RoundedComparison(half_of(dtype)); },
            "dtype"_a)
        .def("add", &add_rounded, nb::kw_only(), "masters"_a, "weights"_a, "numel"_a)
        .def("end", &end_rounded);
    module.def("samples_are_rounded", &sample_rounded, nb::kw_only(), "masters"_a, "weights"_a, "numel"_a, "dtype"_a);
    module.def("sampled_digests", &sample_regions, nb::kw_only(), "addresses"_a, "nbytes"_a, "seed"_a = 0);
    module.attr("SAMPLED_WHOLE_BYTES") = sampled_whole_bytes;
    module.def("probe_file_system", &file_system_dict, "directory"_a);
}

} // namespace dsh::bindings
