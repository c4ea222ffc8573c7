// XXH3-128, seed 0, in its canonical (big-endian) form: the checksum and the content hash of every extent.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace dsh {

using Digest = std::array<std::uint8_t, 16>;

Digest checksum(const void *data, std::size_t nbytes);

// The checksum of bytes that come in pieces, in order. Beginning it costs nothing; `end` gives the checksum so far.
class RunningChecksum {
  public:
    RunningChecksum();
    void add(const void *data, std::uint64_t nbytes);
    Digest end() const;

  private:
    alignas(64) std::array<std::byte, 576> state_;
};

// The checksums of many extents, fed in the order of the file. The bytes of one extent are complete before another's
// begin, so one running state is enough for all. An extent without bytes has the checksum of nothing from the start.
class Digests {
  public:
    explicit Digests(std::size_t count);

    // Add `nbytes` at `position` of extent `index`, which has `whole` bytes.
    void feed(std::size_t index, std::uint64_t position, std::uint64_t whole, const void *data, std::uint64_t nbytes);

    const std::vector<Digest> &values() const { return values_; }

  private:
    std::optional<RunningChecksum> running_;
    std::vector<Digest> values_;
};

} // namespace dsh
