// The Python face of the statistics kernel.

#include "bindings_statistics.hpp"

#include <optional>
#include <string>

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "statistics/statistics.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T> using Array = nb::ndarray<nb::numpy, const T, nb::ndim<1>>;

// A readable contiguous buffer, held as long as this lives.
class Buffer {
  public:
    explicit Buffer(nb::handle data) {
        if (PyObject_GetBuffer(data.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) {
            throw nb::python_error();
        }
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    const Py_buffer &view() const { return view_; }

  private:
    Py_buffer view_;
};

dsh::Statistics statistics(nb::handle data, const std::string &dtype, std::uint64_t start, std::uint64_t key,
                           std::uint64_t buckets, const std::string &kernel) {
    const Buffer buffer(data);
    const Py_buffer &view = buffer.view();
    nb::gil_scoped_release unlocked;
    return dsh::statistics({view.buf, static_cast<std::size_t>(view.len), dtype, start}, key, buckets, kernel);
}

std::optional<double> unless_infinite_of_nothing(const dsh::Statistics &self, double value) {
    return self.count == self.nan ? std::nullopt : std::optional(value);
}

} // namespace

void bind_statistics(nb::module_ &module) {
    using dsh::Statistics;

    nb::class_<Statistics>(module, "Statistics")
        .def_ro("count", &Statistics::count)
        .def_ro("nan", &Statistics::nan)
        .def_ro("inf", &Statistics::inf)
        .def_ro("zeros", &Statistics::zeros)
        .def_prop_ro("min", [](const Statistics &self) { return unless_infinite_of_nothing(self, self.min); })
        .def_prop_ro("max", [](const Statistics &self) { return unless_infinite_of_nothing(self, self.max); })
        .def_ro("sum", &Statistics::sum)
        .def_ro("sum_of_squares", &Statistics::sum_of_squares)
        .def_prop_ro(
            "exponents",
            [](const Statistics &self) { return Array<std::uint64_t>(self.exponents.data(), {self.exponents.size()}); },
            nb::rv_policy::reference_internal)
        .def_prop_ro(
            "sketch", [](const Statistics &self) { return Array<double>(self.sketch.data(), {self.sketch.size()}); },
            nb::rv_policy::reference_internal)
        .def_prop_ro("checksum", [](const Statistics &self) {
            return nb::bytes(reinterpret_cast<const char *>(self.checksum.data()), self.checksum.size());
        });
    module.def("statistics", &statistics, "data"_a, "dtype"_a, nb::kw_only(), "start"_a = 0, "key"_a = 0,
               "buckets"_a = 256, "kernel"_a = "");
    module.def("statistics_kernels", &dsh::statistics_kernels);
}
