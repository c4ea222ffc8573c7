// Addresses and offsets on a boundary, and memory that begins on one. O_DIRECT takes nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace dsh {

inline std::uint64_t round_up(std::uint64_t value, std::uint64_t align) { return (value + align - 1) / align * align; }
inline std::uint64_t round_down(std::uint64_t value, std::uint64_t align) { return value / align * align; }

struct FreeAligned {
    void operator()(std::byte *data) const { std::free(data); }
};

using AlignedMemory = std::unique_ptr<std::byte, FreeAligned>;

// `align` is a power of two, `nbytes` a multiple of it. The bytes are undefined. Throws std::bad_alloc.
inline AlignedMemory aligned_memory(std::uint64_t align, std::uint64_t nbytes) {
    AlignedMemory memory(static_cast<std::byte *>(std::aligned_alloc(align, nbytes)));
    if (!memory) {
        throw std::bad_alloc();
    }
    return memory;
}

} // namespace dsh
