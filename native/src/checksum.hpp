// XXH3-128, seed 0, in its canonical (big-endian) form: the checksum and the content hash of every extent.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

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

// The checksums of many extents, fed in the order of the file: the bytes of one are complete before another's begin.
class Digests {
  public:
    explicit Digests(std::size_t count) : values_(count, checksum(nullptr, 0)) {}

    // `nbytes` at `position` of extent `index`, which has `whole` bytes.
    void feed(std::size_t index, std::uint64_t position, std::uint64_t whole, const void *data, std::uint64_t nbytes) {
        if (nbytes == whole) {
            values_[index] = checksum(data, nbytes);
            return;
        }
        if (position == 0) {
            XXH3_128bits_reset(&running_);
        }
        XXH3_128bits_update(&running_, data, nbytes);
        if (position + nbytes == whole) {
            values_[index] = canonical(XXH3_128bits_digest(&running_));
        }
    }

    const std::vector<Digest> &values() const { return values_; }

  private:
    XXH3_state_t running_; // 64-byte aligned by its type
    std::vector<Digest> values_;
};

} // namespace dsh
