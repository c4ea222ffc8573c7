// Failures of system calls as Python's OSError. nanobind itself translates std::invalid_argument to ValueError and
// std::logic_error and std::runtime_error to RuntimeError.

#include <cstring>
#include <exception>
#include <string>
#include <system_error>

#include "base/files/io_error.hpp"
#include "bindings/bind.hpp"

namespace dsh::bindings {
namespace {

// OSError's constructor chooses the subclass that belongs to errno, such as FileExistsError.
void raise_os_error(PyObject *value) {
    if (value != nullptr) {
        PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(value)), value);
        Py_DECREF(value);
    }
}

void translate(const std::exception_ptr &pointer, void *) {
    try {
        std::rethrow_exception(pointer);
    } catch (const IoError &error) {
        const std::string text = std::string(std::strerror(error.code)) + ": " + error.what();
        raise_os_error(PyObject_CallFunction(PyExc_OSError, "iss", error.code, text.c_str(), error.path.c_str()));
    } catch (const std::system_error &error) {
        raise_os_error(PyObject_CallFunction(PyExc_OSError, "is", error.code().value(), error.what()));
    }
}

} // namespace

void bind_errors() { nanobind::register_exception_translator(translate); }

} // namespace dsh::bindings
