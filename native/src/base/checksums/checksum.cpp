#include "base/checksums/checksum.hpp"

#include "base/checksums/checksum_kernel.hpp"

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

RunningChecksum::RunningChecksum() {
    static_assert(sizeof(state_) == checksum_state_bytes);
    fastest().begin(state_.data());
}

void RunningChecksum::add(const void *data, std::uint64_t nbytes) { fastest().add(state_.data(), data, nbytes); }

Digest RunningChecksum::end() const {
    Digest digest;
    fastest().end(state_.data(), digest.data());
    return digest;
}

Digests::Digests(std::size_t count) : values_(count, checksum(nullptr, 0)) {}

void Digests::feed(std::size_t index, std::uint64_t position, std::uint64_t whole, const void *data,
                   std::uint64_t nbytes) {
    if (nbytes == whole) {
        values_[index] = checksum(data, nbytes);
        return;
    }
    if (position == 0) {
        running_.emplace();
    }
    running_->add(data, nbytes);
    if (position + nbytes == whole) {
        values_[index] = running_->end();
    }
}

} // namespace dsh
