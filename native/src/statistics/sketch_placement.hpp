// The bucket and the sign of every element in the sketch, as docs/sketches.md defines them.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Kernels for several processors include this, so everything has internal linkage: the linker must not take the copy
// that was compiled for one processor for the others.
namespace dsh {
namespace {

constexpr size_t block_elements = 16; // consecutive global indices that one hash places
constexpr uint64_t sketch_seed = 0x4453486973746f72U;

// Output `block` of SplitMix64 with this state.
inline uint64_t block_hash(uint64_t state, uint64_t block) {
    uint64_t mixed = state + (block + 1) * 0x9e3779b97f4a7c15U;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9U;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebU;
    return mixed ^ mixed >> 31;
}

inline unsigned signs_of(uint64_t hash) { return static_cast<unsigned>(hash & 0xffffU); }
inline unsigned turn_of(uint64_t hash) { return static_cast<unsigned>(hash >> 16 & 15U); }
inline uint64_t row_of(uint64_t hash, uint64_t row_mask) { return hash >> 32 & row_mask; }

} // namespace
} // namespace dsh
