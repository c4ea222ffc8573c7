// Memory in huge pages, where the host has them: the kernel looks up and pins one page where it would take 512.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

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

} // namespace dsh
