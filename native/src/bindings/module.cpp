// The extension module `native._core`.

#include "bindings/bind.hpp"

NB_MODULE(_core, module) {
    // A session that the main module still holds at exit is no leak worth a report on the user's terminal.
    nanobind::set_leak_warnings(false);
    dsh::bindings::bind_errors();
    dsh::bindings::bind_base(module);
    dsh::bindings::bind_planes(module);
    dsh::bindings::bind_writer(module);
    dsh::bindings::bind_reader(module);
    dsh::bindings::bind_statistics(module);
}
