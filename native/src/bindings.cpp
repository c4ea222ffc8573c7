// The Python face of the core: converts arguments, releases the GIL around what can block, translates errors. Nothing
// else.

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/checksum.hpp"
#include "base/file_system_probe.hpp"
#include "base/io_error.hpp"
#include "base/mapped_memory.hpp"
#include "bindings_statistics.hpp"
#include "reader/read.hpp"
#include "writer/writer.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Otherwise nanobind hands out references that take the GIL when the core's threads drop the last one, and whoever
// joins those threads with the GIL in hand hangs.
static_assert(nb::detail::has_shared_from_this_v<dsh::Writer> && nb::detail::has_shared_from_this_v<dsh::Faults> &&
              nb::detail::has_shared_from_this_v<dsh::WritePlan>);

template <typename T> using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr std::uint64_t default_block_bytes = 4 << 20;
constexpr std::size_t default_depth = 8;

// A file being written, and the writer that must outlive it.
struct PyWriteJob {
    std::shared_ptr<dsh::Writer> writer;
    std::shared_ptr<dsh::WriteJob> job;

    PyWriteJob(std::shared_ptr<dsh::Writer> writer, std::shared_ptr<dsh::WriteJob> job)
        : writer(std::move(writer)), job(std::move(job)) {}
    PyWriteJob(PyWriteJob &&) = default;
    ~PyWriteJob() {
        if (job) {
            writer->abandon(job);
        }
    }
};

// A slot on loan to a feeder. It holds the writer, and with it the slot's memory.
struct PyFeed {
    std::shared_ptr<dsh::Writer> writer;
    std::shared_ptr<dsh::WriteJob> job;
    std::optional<dsh::Feed> feed; // none once it is fed

    PyFeed(const PyWriteJob &owner, dsh::Feed feed) : writer(owner.writer), job(owner.job), feed(feed) {}
    PyFeed(PyFeed &&other) noexcept
        : writer(std::move(other.writer)), job(std::move(other.job)), feed(std::exchange(other.feed, std::nullopt)) {}
    ~PyFeed() {
        if (feed) {
            writer->drop(job, *feed);
        }
    }

    const dsh::Feed &held() const {
        if (!feed) {
            throw std::logic_error("this block of " + job->path() + " is fed already");
        }
        return *feed;
    }
};

std::optional<PyFeed> feed_next(const PyWriteJob &self) {
    const auto feed = self.writer->feed_next(self.job);
    return feed ? std::optional<PyFeed>(std::in_place, self, *feed) : std::nullopt;
}

void fed(const PyWriteJob &self, PyFeed &feed) {
    if (feed.job != self.job) {
        throw nb::value_error("this block was handed out by another job");
    }
    // Emptied with the GIL in hand, so that of two threads one only gives the slot back.
    const dsh::Feed held = feed.held();
    feed.feed.reset();
    try {
        nb::gil_scoped_release unlocked;
        self.writer->fed(self.job, held);
    } catch (...) {
        feed.feed = held;
        throw;
    }
}

nb::bytes joined(const std::vector<dsh::Digest> &digests) {
    return nb::bytes(reinterpret_cast<const char *>(digests.data()), digests.size() * sizeof(dsh::Digest));
}

void require_same_length(std::size_t expected, std::size_t got, const char *name) {
    if (expected != got) {
        const std::string text = std::string(name) + " has " + std::to_string(got) + " entries where offsets has " +
                                 std::to_string(expected);
        throw nb::value_error(text.c_str());
    }
}

std::shared_ptr<dsh::WritePlan> make_plan(Column<std::uint64_t> offsets, Column<std::uint64_t> addresses,
                                          Column<std::uint64_t> nbytes, Column<std::uint8_t> eager,
                                          std::uint64_t data_start, std::uint64_t data_end, std::uint64_t align,
                                          std::optional<Column<std::uint8_t>> fed) {
    const std::size_t count = offsets.shape(0);
    require_same_length(count, addresses.shape(0), "addresses");
    require_same_length(count, nbytes.shape(0), "nbytes");
    require_same_length(count, eager.shape(0), "eager");
    require_same_length(count, fed ? fed->shape(0) : count, "fed");
    std::vector<dsh::Extent> extents(count);
    std::size_t eager_count = 0;
    std::size_t fed_count = 0;
    for (std::size_t i = 0; i < count; ++i) {
        extents[i] = {offsets.data()[i], addresses.data()[i], nbytes.data()[i]};
        if (eager.data()[i] != 0) {
            if (eager_count != i) {
                throw nb::value_error(
                    ("extent " + std::to_string(i) + " is eager but follows a lazy one: eager extents come first")
                        .c_str());
            }
            ++eager_count;
        }
        if (fed && fed->data()[i] != 0) {
            if (eager.data()[i] != 0) {
                throw nb::value_error(("extent " + std::to_string(i) + " is both eager and fed").c_str());
            }
            ++fed_count;
        } else if (fed_count != 0) {
            throw nb::value_error(
                ("extent " + std::to_string(i) + " follows a fed one but is not: fed extents come last").c_str());
        }
    }
    return std::make_shared<dsh::WritePlan>(std::move(extents), eager_count, fed_count, data_start, data_end, align);
}

nb::bytes read_extents(std::vector<std::string> paths, Column<std::uint32_t> file_index, Column<std::uint64_t> offsets,
                       Column<std::uint64_t> addresses, Column<std::uint64_t> nbytes, std::uint64_t block_bytes,
                       std::size_t depth) {
    const std::size_t count = offsets.shape(0);
    require_same_length(count, file_index.shape(0), "file_index");
    require_same_length(count, addresses.shape(0), "addresses");
    require_same_length(count, nbytes.shape(0), "nbytes");
    std::vector<dsh::ReadRequest> requests(count);
    for (std::size_t i = 0; i < count; ++i) {
        requests[i] = {file_index.data()[i], {offsets.data()[i], addresses.data()[i], nbytes.data()[i]}};
    }
    std::vector<dsh::Digest> digests;
    {
        nb::gil_scoped_release unlocked;
        digests = dsh::read(paths, requests, block_bytes, depth);
    }
    return joined(digests);
}

nb::bytes checksum(nb::handle data) {
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_C_CONTIGUOUS) != 0) {
        throw nb::python_error();
    }
    dsh::Digest digest;
    {
        nb::gil_scoped_release unlocked;
        digest = dsh::checksum(view.buf, static_cast<std::size_t>(view.len));
    }
    PyBuffer_Release(&view);
    return nb::bytes(reinterpret_cast<const char *>(digest.data()), digest.size());
}

nb::bytes checksum_memory(Column<std::uint64_t> addresses, Column<std::uint64_t> nbytes) {
    std::vector<dsh::Region> regions(addresses.shape(0));
    if (nbytes.shape(0) != regions.size()) {
        throw nb::value_error("addresses and nbytes must be of one length");
    }
    for (std::size_t i = 0; i < regions.size(); ++i) {
        regions[i] = {addresses.data()[i], nbytes.data()[i]};
    }
    std::vector<dsh::Digest> digests;
    {
        nb::gil_scoped_release unlocked;
        digests = dsh::checksum_memory(regions);
    }
    return joined(digests);
}

nb::dict stats_dict(const dsh::WriteStats &stats) {
    nb::dict result;
    result["bytes_direct"] = stats.bytes_direct;
    result["bytes_copied"] = stats.bytes_copied;
    result["write_s"] = stats.write_s;
    result["stall_s"] = stats.stall_s;
    result["eager_s"] = stats.eager_s;
    result["direct"] = stats.direct;
    return result;
}

nb::dict file_system(const std::string &directory) {
    const dsh::FileSystemFacts facts = dsh::probe_file_system(directory);
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

void translate(const std::exception_ptr &pointer, void *) {
    try {
        std::rethrow_exception(pointer);
    } catch (const dsh::IoError &error) {
        const std::string text = std::string(std::strerror(error.code)) + ": " + error.what();
        PyObject *value = PyObject_CallFunction(PyExc_OSError, "iss", error.code, text.c_str(), error.path.c_str());
        if (value != nullptr) {
            PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(value)), value);
            Py_DECREF(value);
        }
    } catch (const std::system_error &error) {
        PyObject *value = PyObject_CallFunction(PyExc_OSError, "is", error.code().value(), error.what());
        if (value != nullptr) {
            PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(value)), value);
            Py_DECREF(value);
        }
    }
}

void bind_writer(nb::module_ &module) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;

    nb::class_<dsh::Faults>(module, "Faults")
        .def(nb::new_([](std::uint64_t delay_us, std::int64_t fail_after, int code, std::uint64_t short_write_every,
                         bool reorder) {
                 return std::make_shared<dsh::Faults>(
                     dsh::FaultSettings{delay_us, fail_after, code, short_write_every, reorder});
             }),
             nb::kw_only(), "delay_us"_a = 0, "fail_after"_a = -1, "errno"_a = EIO, "short_write_every"_a = 0,
             "reorder"_a = false);

    nb::class_<dsh::WritePlan>(module, "WritePlan")
        .def(nb::new_(&make_plan), nb::kw_only(), "offsets"_a, "addresses"_a, "nbytes"_a, "eager"_a, "data_start"_a,
             "data_end"_a, "align"_a, "fed"_a.none() = nb::none())
        .def_prop_ro("extents", [](const dsh::WritePlan &plan) { return plan.extents().size(); })
        .def_prop_ro("total_bytes", &dsh::WritePlan::total_bytes)
        .def_prop_ro("direct_bytes", &dsh::WritePlan::direct_bytes);

    nb::class_<PyFeed>(module, "Feed")
        .def_prop_ro("address",
                     [](const PyFeed &self) { return reinterpret_cast<std::uint64_t>(self.held().slot.data); })
        .def_prop_ro("offset", [](const PyFeed &self) { return self.job->block(self.held().index).offset; })
        .def_prop_ro("nbytes", [](const PyFeed &self) { return self.job->block(self.held().index).nbytes; });

    nb::class_<PyWriteJob>(module, "WriteJob")
        .def("feed_next", &feed_next, Unlocked())
        .def("fed", &fed, "feed"_a)
        .def(
            "release", [](PyWriteJob &self) { return self.writer->release(self.job); }, Unlocked())
        .def("released", [](PyWriteJob &self) { return self.writer->released(*self.job); })
        .def(
            "wait", [](PyWriteJob &self, double timeout_s) { return self.writer->wait(*self.job, timeout_s); },
            "timeout_s"_a = -1.0, Unlocked())
        .def("checksums", [](PyWriteJob &self) { return joined(self.writer->digests(*self.job)); })
        .def(
            "finish",
            [](PyWriteJob &self, nb::bytes header, nb::bytes tail) {
                const std::string_view header_view(header.c_str(), header.size());
                const std::string_view tail_view(tail.c_str(), tail.size());
                nb::gil_scoped_release unlocked;
                return self.writer->finish(*self.job, header_view, tail_view);
            },
            nb::kw_only(), "header"_a, "tail"_a)
        .def(
            "abort", [](PyWriteJob &self) { self.writer->abort(self.job); }, Unlocked())
        .def_prop_ro("stats", [](PyWriteJob &self) { return stats_dict(self.writer->stats(*self.job)); });

    nb::class_<dsh::Writer>(module, "Writer", nb::is_weak_referenceable())
        .def(nb::new_([](std::string backend, std::uint64_t budget_bytes, std::uint64_t block_bytes, std::size_t depth,
                         std::shared_ptr<dsh::Faults> faults) {
                 nb::gil_scoped_release unlocked;
                 return std::make_shared<dsh::Writer>(std::move(backend), budget_bytes, block_bytes, depth,
                                                      std::move(faults));
             }),
             nb::kw_only(), "backend"_a, "budget_bytes"_a, "block_bytes"_a = default_block_bytes,
             "depth"_a = default_depth, "faults"_a.none() = nb::none())
        .def_prop_ro("backend", &dsh::Writer::backend_name)
        .def_prop_ro("budget_bytes", &dsh::Writer::budget_bytes)
        .def_prop_ro("block_bytes", &dsh::Writer::block_bytes)
        .def_prop_ro("depth", &dsh::Writer::depth)
        .def_prop_ro("registered", &dsh::Writer::registered)
        .def_prop_ro("staging",
                     [](const dsh::Writer &self) {
                         return std::pair(reinterpret_cast<std::uint64_t>(self.staging()), self.budget_bytes());
                     })
        .def("budget_free_bytes", &dsh::Writer::free_bytes)
        .def(
            "start",
            [](std::shared_ptr<dsh::Writer> self, std::shared_ptr<dsh::WritePlan> plan, std::string path) {
                auto job = self->start(std::move(plan), std::move(path));
                return PyWriteJob(std::move(self), std::move(job));
            },
            "plan"_a, "path"_a, Unlocked())
        .def("close", &dsh::Writer::close, Unlocked());
}

} // namespace

NB_MODULE(_core, module) {
    // A session that the main module still holds at exit is no leak worth a report on the user's terminal.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(translate);
    bind_writer(module);
    bind_statistics(module);
    module.def("read", &read_extents, "paths"_a, nb::kw_only(), "file_index"_a, "offsets"_a, "addresses"_a, "nbytes"_a,
               "block_bytes"_a = default_block_bytes, "depth"_a = default_depth);
    module.def("checksum", &checksum, "data"_a);
    module.def("checksum_memory", &checksum_memory, nb::kw_only(), "addresses"_a, "nbytes"_a);
    module.def("probe_io_uring", &dsh::probe_io_uring);
    module.def("probe_file_system", &file_system, "directory"_a);
}
