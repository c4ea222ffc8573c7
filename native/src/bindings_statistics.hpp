// The part of the extension that binds the statistics kernel.
#pragma once

#include <nanobind/nanobind.h>

void bind_statistics(nanobind::module_ &module);
