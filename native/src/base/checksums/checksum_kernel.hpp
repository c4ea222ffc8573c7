// XXH3-128 once for each width of vector registers, of which the processor's widest is chosen when the program runs.
//
// Each kernel is a file of its own, compiled for its processors. XXH_INLINE_ALL gives every function of xxhash.h
// internal linkage there, so that the linker can't take the copy of one processor for all; for the same reason those
// files include no header with inline functions of external linkage.
#pragma once

#include <stddef.h>

namespace dsh {

constexpr size_t checksum_bytes = 16;
constexpr size_t checksum_state_bytes = 576;

struct ChecksumKernel {
    bool (*works)(); // on this processor
    void (*whole)(const void *data, size_t nbytes, unsigned char *digest);
    // The same of data that comes in pieces. A state has checksum_state_bytes and lies on a multiple of 64.
    void (*begin)(void *state);
    void (*add)(void *state, const void *data, size_t nbytes);
    void (*end)(const void *state, unsigned char *digest);
};

extern const ChecksumKernel portable_checksum;
extern const ChecksumKernel avx2_checksum;
extern const ChecksumKernel avx512_checksum;

} // namespace dsh
