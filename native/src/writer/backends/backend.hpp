// The way prepared blocks reach the kernel. A backend owns threads that take writes from the queue and report each one
// exactly once. Its threads never take the GIL.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "writer/queue/queue.hpp"

namespace dsh {

class Backend {
  public:
    // Joins the threads, which end only when the queue has been stopped.
    virtual ~Backend() = default;
    // Return true when the staging memory is registered with the kernel.
    virtual bool registered() const = 0;
};

// Throws std::system_error when the host forbids io_uring.
std::unique_ptr<Backend> make_io_uring_backend(WriteQueue &queue, std::size_t depth);
std::unique_ptr<Backend> make_posix_backend(WriteQueue &queue, std::size_t depth);

// Return an empty string when an io_uring can be made here, else the reason why not, as one sentence.
std::string probe_io_uring();

} // namespace dsh
