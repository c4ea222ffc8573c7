#include "base/checksum.hpp"

#include "base/checksum_kernel.hpp"

namespace dsh {
namespace {

const ChecksumKernel &fastest() {
    static const ChecksumKernel &chosen = []() -> const ChecksumKernel & {
#ifdef __x86_64__
        for (const ChecksumKernel *kernel : {&avx512_checksum, &avx2_checksum}) {
            if (kernel->works()) {
                return *kernel;
            }
        }
#endif
        return portable_checksum;
    }();
    return chosen;
}

static_assert(std::tuple_size_v<Digest> == checksum_bytes);

} // namespace

Digest checksum(const void *data, std::size_t nbytes) {
    Digest digest;
    fastest().whole(data, nbytes, digest.data());
    return digest;
}

struct Digests::Running {
    alignas(64) std::byte state[checksum_state_bytes];
};

Digests::Digests(std::size_t count) : running_(std::make_unique<Running>()), values_(count, checksum(nullptr, 0)) {}

Digests::~Digests() = default;

void Digests::feed(std::size_t index, std::uint64_t position, std::uint64_t whole, const void *data,
                   std::uint64_t nbytes) {
    if (nbytes == whole) {
        values_[index] = checksum(data, nbytes);
        return;
    }
    if (position == 0) {
        fastest().begin(running_->state);
    }
    fastest().add(running_->state, data, nbytes);
    if (position + nbytes == whole) {
        fastest().end(running_->state, values_[index].data());
    }
}

} // namespace dsh
