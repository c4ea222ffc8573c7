// Python's buffers and numpy's columns as the core's arguments, and the core's checksums as bytes.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "base/checksums/checksum.hpp"

namespace dsh::bindings {

namespace nb = nanobind;

// A one-dimensional contiguous numpy array, borrowed for the call.
template <typename T> using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Throws ValueError unless column `name` has as many entries as the one it is compared with.
inline void require_same_length(std::size_t count, const char *name, std::size_t expected, const char *other) {
    if (count != expected) {
        const std::string text = std::string(name) + " has " + std::to_string(count) + " entries where " + other +
                                 " has " + std::to_string(expected);
        throw nb::value_error(text.c_str());
    }
}

// A readable contiguous buffer, kept from being resized or freed while this exists. Made and destroyed with the GIL
// held.
class Buffer {
  public:
    explicit Buffer(nb::handle data, int flags = 0) {
        if (PyObject_GetBuffer(data.ptr(), &view_, PyBUF_C_CONTIGUOUS | flags) != 0) {
            throw nb::python_error();
        }
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    const void *data() const { return view_.buf; }
    std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }

  protected:
    Py_buffer view_;
};

// A Buffer that may be written to; BufferError for one that may not.
class WritableBuffer : public Buffer {
  public:
    explicit WritableBuffer(nb::handle data) : Buffer(data, PyBUF_WRITABLE) {}

    void *data() const { return view_.buf; }
};

// 16 bytes for each, in order.
inline nb::bytes digest_bytes(std::span<const Digest> digests) {
    return nb::bytes(reinterpret_cast<const char *>(digests.data()), digests.size_bytes());
}

} // namespace dsh::bindings
