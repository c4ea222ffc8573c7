// XXH3-128, seed 0, in its canonical (big-endian) form: the checksum and the content hash of every extent.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace dsh {

using Digest = std::array<std::uint8_t, 16>;

inline Digest canonical(XXH128_hash_t hash) {
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    Digest digest;
    for (std::size_t i = 0; i < digest.size(); ++i) {
        digest[i] = bytes.digest[i];
    }
    return digest;
}

inline Digest checksum(const void *data, std::size_t nbytes) { return canonical(XXH3_128bits(data, nbytes)); }

// One extent's checksum, fed piece by piece in order. The state is 64-byte aligned by its type; keep it in an aligned
// place.
class Checksum {
  public:
    Checksum() { reset(); }

    void reset() { XXH3_128bits_reset(&state_); }

    void update(const void *data, std::size_t nbytes) { XXH3_128bits_update(&state_, data, nbytes); }

    Digest digest() const { return canonical(XXH3_128bits_digest(&state_)); }

  private:
    XXH3_state_t state_;
};

} // namespace dsh
