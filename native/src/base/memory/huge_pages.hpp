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

// Have the kernel (from Linux 6.1 on) copy memory that is in use into huge pages, which takes the place of small ones at
// the same addresses. The region begins and ends on the boundary of a huge page. Returns 0 when all of it is in huge
// pages now, or was before. Else an errno, and a part of it may have been moved: EAGAIN when a device has pinned a page,
// ENOMEM when it is not all mapped or there is no huge page to be had, EINVAL for memory of another kind.
int move_to_huge_pages(Region memory);

} // namespace dsh
