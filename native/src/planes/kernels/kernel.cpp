#include "planes/kernels/kernel.hpp"

#include <initializer_list>

namespace dsh {

const PlanesKernel &planes_kernel() {
    static const PlanesKernel &chosen = []() -> const PlanesKernel & {
#ifdef __x86_64__
        for (const PlanesKernel *kernel : {&avx512_planes, &bmi2_planes, &avx2_planes}) {
            if (kernel->works()) {
                return *kernel;
            }
        }
#endif
        return portable_planes;
    }();
    return chosen;
}

} // namespace dsh
