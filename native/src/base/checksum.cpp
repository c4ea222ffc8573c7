#include "base/checksum.hpp"

#include <algorithm>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace dsh {
namespace {

Digest canonical(XXH128_hash_t hash) {
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    Digest digest;
    std::copy(std::begin(bytes.digest), std::end(bytes.digest), digest.begin());
    return digest;
}

} // namespace

Digest checksum(const void *data, std::size_t nbytes) { return canonical(XXH3_128bits(data, nbytes)); }

struct Digests::Running {
    XXH3_state_t state; // 64-byte aligned by its type
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
        XXH3_128bits_reset(&running_->state);
    }
    XXH3_128bits_update(&running_->state, data, nbytes);
    if (position + nbytes == whole) {
        values_[index] = canonical(XXH3_128bits_digest(&running_->state));
    }
}

} // namespace dsh
