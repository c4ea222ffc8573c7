// The functions of a checksum kernel, for the processors that the including file is compiled for.
#pragma once

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/checksums/checksum_kernel.hpp"

namespace dsh {
namespace {

static_assert(sizeof(XXH3_state_t) <= checksum_state_bytes);

void canonical(XXH128_hash_t hash, unsigned char *digest) {
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    memcpy(digest, bytes.digest, checksum_bytes);
}

void whole(const void *data, size_t nbytes, unsigned char *digest) { canonical(XXH3_128bits(data, nbytes), digest); }
void begin(void *state) { XXH3_128bits_reset(static_cast<XXH3_state_t *>(state)); }
void add(void *state, const void *data, size_t nbytes) {
    XXH3_128bits_update(static_cast<XXH3_state_t *>(state), data, nbytes);
}
void end(const void *state, unsigned char *digest) {
    canonical(XXH3_128bits_digest(static_cast<const XXH3_state_t *>(state)), digest);
}

} // namespace
} // namespace dsh
