// The loops over byte planes once for each kind of processor, of which the best is chosen when the program runs.
//
// Each kernel is a file of its own, compiled for its processors. So that the linker can't take a function that was
// compiled for one processor for all, those files include no header with inline functions of external linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "planes/kernels/forms.hpp"

namespace dsh {

// How many kinds of elements there are: of 1, 2, 4 and 8 bytes, in this order.
constexpr size_t element_kinds = 4;

struct PlanesKernel {
    bool (*works)(); // on this processor
    // See byte_planes.hpp, for elements of one size.
    void (*split[element_kinds])(const unsigned char *data, const unsigned char *base, size_t count,
                                 Transform transform, unsigned char *planes);
    void (*join[element_kinds])(const Plane *planes, const unsigned char *base, size_t count, Transform transform,
                                unsigned char *data);
    // See quads.hpp.
    size_t (*gather_quads)(const unsigned char *plane, size_t count, unsigned char *quads, unsigned char *others);
    size_t (*spread_quads)(const unsigned char *quads, const unsigned char *others, size_t known, size_t count,
                           unsigned char *plane);
    // Take float32 numbers apart, at any address, into as many bytes each of signs (the highest bit) and exponents, and
    // mantissas, of which zeros get `of_zeros`. False, whatever was written then, where a number is a denormal.
    bool (*take_apart)(const unsigned char *numbers, size_t count, uint32_t of_zeros, uint32_t *mantissas,
                       unsigned char *signs, unsigned char *exponents);
    // As above for numbers whose lower halves are zero, as those of bfloat16 are: the seven bits of their mantissas
    // stand beside the signs. False also where there is another number.
    bool (*take_halves_apart)(const unsigned char *numbers, size_t count, unsigned char *signs_and_mantissas,
                              unsigned char *exponents);
};

extern const PlanesKernel portable_planes;
extern const PlanesKernel avx2_planes;
extern const PlanesKernel bmi2_planes;
extern const PlanesKernel avx512_planes;

// The best of them on this processor.
const PlanesKernel &planes_kernel();

} // namespace dsh
