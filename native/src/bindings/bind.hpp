// The parts of the extension, one for each room of the core. Binding files convert arguments and results, and release
// the GIL around everything that can block; what an argument must be is checked by the core.
#pragma once

#include <nanobind/nanobind.h>

namespace dsh::bindings {

// The core's IoError and std::system_error become OSError with errno, in one place for all calls.
void bind_errors();
void bind_base(nanobind::module_ &module);
void bind_writer(nanobind::module_ &module);
void bind_planes(nanobind::module_ &module);
void bind_reader(nanobind::module_ &module);
void bind_statistics(nanobind::module_ &module);

} // namespace dsh::bindings
