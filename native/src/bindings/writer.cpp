// Binds writer/: plans, jobs, feeds and the writer itself.

#include <cerrno>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "base/files/limits.hpp"
#include "bindings/bind.hpp"
#include "bindings/conversions.hpp"
#include "bindings/job_handles.hpp"
#include "bindings/without_gil.hpp"
#include "writer/backends/backend.hpp"
#include "writer/writer.hpp"

namespace dsh::bindings {
namespace {

using namespace nb::literals;

// Without enable_shared_from_this nanobind would hand out references that take the GIL when an I/O thread drops the
// last one, and whoever joins those threads with the GIL held would wait for ever.
static_assert(nb::detail::has_shared_from_this_v<Writer> && nb::detail::has_shared_from_this_v<Faults> &&
              nb::detail::has_shared_from_this_v<WritePlan>);

std::shared_ptr<WritePlan> make_plan(Column<std::uint64_t> offsets, Column<std::uint64_t> addresses,
                                     Column<std::uint64_t> nbytes, Column<std::uint8_t> eager, std::uint64_t data_start,
                                     std::uint64_t data_end, std::uint64_t align,
                                     std::optional<Column<std::uint8_t>> fed) {
    const std::size_t count = offsets.shape(0);
    require_same_length(addresses.shape(0), "addresses", count, "offsets");
    require_same_length(nbytes.shape(0), "nbytes", count, "offsets");
    require_same_length(eager.shape(0), "eager", count, "offsets");
    require_same_length(fed ? fed->shape(0) : count, "fed", count, "offsets");
    std::vector<Extent> extents(count);
    for (std::size_t i = 0; i < count; ++i) {
        extents[i] = {offsets.data()[i], addresses.data()[i], nbytes.data()[i]};
    }
    const auto kinds = count_kinds(std::span(eager.data(), count),
                                   fed ? std::span(fed->data(), count) : std::span<const std::uint8_t>());
    return std::make_shared<WritePlan>(std::move(extents), kinds.eager, kinds.fed, data_start, data_end, align);
}

// Run the handlers of signals that have come, in the main thread; what they raise, such as KeyboardInterrupt, is
// thrown.
void check_signals() {
    nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() != 0) {
        throw nb::python_error();
    }
}

std::optional<FeedHandle> feed_next(const JobHandle &self) {
    const auto feed = self.writer->feed_next(self.job);
    return feed ? std::optional<FeedHandle>(std::in_place, self, *feed) : std::nullopt;
}

void fed(const JobHandle &self, FeedHandle &feed) {
    if (feed.job != self.job) {
        throw nb::value_error("this block was handed out by another job");
    }
    // The handle is emptied while the GIL is held, so that only one of two threads gives the slot back.
    const Feed held = feed.held();
    feed.feed.reset();
    try {
        const WithoutGil unlocked;
        self.writer->fed(self.job, held);
    } catch (...) {
        feed.feed = held;
        throw;
    }
}

AppendixHandle append(const JobHandle &self, Column<std::uint64_t> nbytes) {
    std::vector<std::uint64_t> sizes(nbytes.data(), nbytes.data() + nbytes.shape(0));
    return {self.writer, self.writer->append(self.job, std::move(sizes))};
}

nb::bytes end(AppendixHandle &self) {
    std::vector<Digest> digests;
    {
        const WithoutGil unlocked;
        digests = self.writer->end(*self.appendix);
    }
    return digest_bytes(digests);
}

nb::dict stats_dict(const WriteStats &stats) {
    nb::dict result;
    result["bytes_direct"] = stats.bytes_direct;
    result["bytes_copied"] = stats.bytes_copied;
    result["write_s"] = stats.write_s;
    result["stall_s"] = stats.stall_s;
    result["eager_s"] = stats.eager_s;
    result["direct"] = stats.direct;
    return result;
}

} // namespace

void bind_writer(nb::module_ &module) {
    using Unlocked = nb::call_guard<WithoutGil>;

    nb::class_<Faults>(module, "Faults")
        .def(nb::new_([](std::uint64_t delay_us, std::int64_t fail_after, int code, std::uint64_t short_write_every,
                         bool reorder) {
                 return std::make_shared<Faults>(FaultSettings{delay_us, fail_after, code, short_write_every, reorder});
             }),
             nb::kw_only(), "delay_us"_a = 0, "fail_after"_a = -1, "errno"_a = EIO, "short_write_every"_a = 0,
             "reorder"_a = false);

    nb::class_<WritePlan>(module, "WritePlan")
        .def(nb::new_(&make_plan), nb::kw_only(), "offsets"_a, "addresses"_a, "nbytes"_a, "eager"_a, "data_start"_a,
             "data_end"_a, "align"_a, "fed"_a.none() = nb::none())
        .def_prop_ro("extents", [](const WritePlan &plan) { return plan.extents().size(); })
        .def_prop_ro("total_bytes", &WritePlan::total_bytes)
        .def_prop_ro("direct_bytes", &WritePlan::direct_bytes);

    nb::class_<FeedHandle>(module, "Feed")
        .def_prop_ro("address",
                     [](const FeedHandle &self) { return reinterpret_cast<std::uint64_t>(self.held().slot.data); })
        .def_prop_ro("offset", [](const FeedHandle &self) { return self.job->block(self.held().index).offset; })
        .def_prop_ro("nbytes", [](const FeedHandle &self) { return self.job->block(self.held().index).nbytes; });

    nb::class_<AppendixHandle>(module, "Appendix")
        .def_prop_ro("offset", [](const AppendixHandle &self) { return self.appendix->offset(); })
        .def(
            "add",
            [](AppendixHandle &self, std::uint64_t address, std::uint64_t nbytes) {
                self.writer->add(*self.appendix, address, nbytes);
            },
            nb::kw_only(), "address"_a, "nbytes"_a, Unlocked())
        .def("end", &end);

    nb::class_<JobHandle>(module, "WriteJob")
        .def("feed_next", &feed_next, Unlocked())
        .def("fed", &fed, "feed"_a)
        .def(
            "release", [](JobHandle &self) { return self.writer->release(self.job, check_signals); }, Unlocked())
        .def("released", [](JobHandle &self) { return self.writer->released(*self.job); })
        .def(
            "wait", [](JobHandle &self, double timeout_s) { return self.writer->wait(*self.job, timeout_s); },
            "timeout_s"_a = -1.0, Unlocked())
        .def("checksums", [](JobHandle &self) { return digest_bytes(self.writer->digests(*self.job)); })
        .def("append", &append, "nbytes"_a)
        .def(
            "finish",
            [](JobHandle &self, nb::bytes header, nb::bytes trailer) {
                const std::string_view header_view(header.c_str(), header.size());
                const std::string_view trailer_view(trailer.c_str(), trailer.size());
                const WithoutGil unlocked;
                return self.writer->finish(*self.job, header_view, trailer_view);
            },
            nb::kw_only(), "header"_a, "trailer"_a)
        .def(
            "abort", [](JobHandle &self) { self.writer->abort(self.job); }, Unlocked())
        .def_prop_ro("stats", [](JobHandle &self) { return stats_dict(self.writer->stats(*self.job)); });

    nb::class_<Writer>(module, "Writer", nb::is_weak_referenceable())
        .def(nb::new_([](std::string backend, std::uint64_t budget_bytes, std::uint64_t block_bytes, std::size_t depth,
                         std::shared_ptr<Faults> faults) {
                 const WithoutGil unlocked;
                 return std::make_shared<Writer>(std::move(backend), budget_bytes, block_bytes, depth,
                                                 std::move(faults));
             }),
             nb::kw_only(), "backend"_a, "budget_bytes"_a, "block_bytes"_a = default_block_bytes,
             "depth"_a = default_depth, "faults"_a.none() = nb::none())
        .def_prop_ro("backend", &Writer::backend_name)
        .def_prop_ro("budget_bytes", &Writer::budget_bytes)
        .def_prop_ro("block_bytes", &Writer::block_bytes)
        .def_prop_ro("depth", &Writer::depth)
        .def_prop_ro("registered", &Writer::registered)
        .def_prop_ro("staging",
                     [](const Writer &self) {
                         return std::pair(reinterpret_cast<std::uint64_t>(self.staging()), self.budget_bytes());
                     })
        .def("budget_free_bytes", &Writer::free_bytes)
        .def(
            "start",
            [](std::shared_ptr<Writer> self, std::shared_ptr<WritePlan> plan, std::string path) {
                auto job = self->start(std::move(plan), std::move(path), check_signals);
                return JobHandle(std::move(self), std::move(job));
            },
            "plan"_a, "path"_a, Unlocked())
        .def("close", &Writer::close, Unlocked());
    module.def("probe_io_uring", &probe_io_uring);
}

} // namespace dsh::bindings
