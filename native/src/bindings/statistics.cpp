// Binds statistics/: the statistics of a buffer, as views into the object that owns them.

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind.hpp"
#include "bindings/conversions.hpp"
#include "bindings/without_gil.hpp"
#include "statistics/statistics.hpp"

namespace dsh::bindings {
namespace {

using namespace nb::literals;

template <typename T> using Array = nb::ndarray<nb::numpy, const T, nb::ndim<1>>;

Statistics buffer_statistics(nb::handle data, const std::string &dtype, std::uint64_t start, std::uint64_t key,
                             std::uint64_t buckets, const std::string &kernel) {
    const Buffer buffer(data);
    const WithoutGil unlocked;
    return statistics({buffer.data(), buffer.nbytes(), dtype, start}, key, buckets, kernel);
}

std::optional<double> unless_all_nan(const Statistics &self, double value) {
    return self.count == self.nan ? std::nullopt : std::optional(value);
}

} // namespace

void bind_statistics(nb::module_ &module) {
    nb::class_<Statistics>(module, "Statistics")
        .def_ro("count", &Statistics::count)
        .def_ro("nan", &Statistics::nan)
        .def_ro("inf", &Statistics::inf)
        .def_ro("zeros", &Statistics::zeros)
        .def_prop_ro("min", [](const Statistics &self) { return unless_all_nan(self, self.min); })
        .def_prop_ro("max", [](const Statistics &self) { return unless_all_nan(self, self.max); })
        .def_ro("sum", &Statistics::sum)
        .def_ro("sum_of_squares", &Statistics::sum_of_squares)
        .def_prop_ro(
            "exponents",
            [](const Statistics &self) { return Array<std::uint64_t>(self.exponents.data(), {self.exponents.size()}); },
            nb::rv_policy::reference_internal)
        .def_prop_ro(
            "sketch", [](const Statistics &self) { return Array<double>(self.sketch.data(), {self.sketch.size()}); },
            nb::rv_policy::reference_internal)
        .def_prop_ro("checksum", [](const Statistics &self) { return digest_bytes(std::span(&self.checksum, 1)); });
    module.def("statistics", &buffer_statistics, "data"_a, "dtype"_a, nb::kw_only(), "start"_a = 0, "key"_a = 0,
               "buckets"_a = 256, "kernel"_a = "");
    module.def("statistics_kernels", &statistics_kernels);
}

} // namespace dsh::bindings
