// Memory in huge pages, where the host has them: the kernel looks up and pins one page where it would take 512.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/memory/mapped_memory.hpp"

namespace dsh {

constexpr std::uint64_t huge_page_bytes = 2 << 20; // less than this is never in a huge page

struct Unmap {
    std::uint64_t nbytes;

    void operator()(std::byte *data) const;
};

using HugePages = std::unique_ptr<std::byte, Unmap>;

// Map zeroed private memory that begins on the boundary of a huge page. No page exists before it is touched. Throws
// std::system_error, which says what the memory was `wanted_for`.
HugePages huge_pages(std::uint64_t nbytes, const char *wanted_for);

// Have the kernel (from Linux 6.1 on) copy memory that is in use into huge pages, which take the place of small ones at
// the same addresses. Returns 0 when all of the region is in huge pages now, or was before; else the errno of the last
// huge page that is not: EINVAL for a region that does not begin and end on the boundary of one, and for memory of
// another kind; EAGAIN when a device has pinned a page, or a thread is using it in the kernel; ENOMEM when it is not
// all mapped or no huge page is to be had; EBUSY when a limit of the control group allows none. What comes after one
// that failed may not have been tried.
int move_to_huge_pages(Region memory);

} // namespace dsh
