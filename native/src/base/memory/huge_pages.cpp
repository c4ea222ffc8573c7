#include "base/memory/huge_pages.hpp"

#include <cerrno>
#include <string>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>

#include "base/memory/aligned_memory.hpp"

namespace dsh {

void Unmap::operator()(std::byte *data) const { munmap(data, nbytes); }

HugePages huge_pages(std::uint64_t nbytes, const char *wanted_for) {
    const std::uint64_t mapped = round_up(nbytes, static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)));
    const std::uint64_t reserved = mapped + huge_page_bytes;
    void *mapping = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(),
                                "mmap of " + std::string(wanted_for) + " of " + std::to_string(nbytes) + " bytes");
    }
    const auto address = reinterpret_cast<std::uint64_t>(mapping);
    const std::uint64_t skipped = round_up(address, huge_page_bytes) - address;
    auto *data = static_cast<std::byte *>(mapping) + skipped;
    if (skipped != 0) {
        munmap(mapping, skipped);
    }
    munmap(data + mapped, reserved - skipped - mapped);
    madvise(data, mapped, MADV_HUGEPAGE); // only advice: pages of any size hold the same bytes
    return {data, Unmap{mapped}};
}

int move_to_huge_pages(Region memory) {
    constexpr int collapse = 25; // MADV_COLLAPSE, which the headers of older systems lack
    if (memory.address % huge_page_bytes != 0 || memory.nbytes % huge_page_bytes != 0) {
        return EINVAL;
    }
    return madvise(reinterpret_cast<void *>(memory.address), memory.nbytes, collapse) == 0 ? 0 : errno;
}

} // namespace dsh
