// The checksums of a job's live extents.
//
// A training shares each operation out to its cores, and when a thread beside it takes one core, the others wait for
// that one: what one thread does in 100 ms costs the training 100 ms, and two threads at the same time cost it 50. So
// extents that the device reads from memory are hashed in portions, by several threads side by side, all at once right
// after the step. The others are copied into slots anyway: they are hashed on the way, in file order, while the copy is
// in the processor's cache.
//
// An extent is hashed in one of these two ways as a whole, so that one running checksum is enough for it, also when its
// unaligned edges are copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "blocks/cutting.hpp"

namespace dsh {

class LiveChecksums {
  public:
    // Neighbouring extents, and how far they are hashed. One thread at a time holds a portion.
    struct Portion {
        std::size_t first;
        std::size_t last; // exclusive
        std::size_t extent = first;
        std::uint64_t position = 0; // in the extent
        Digests digests{last - first};

        bool done() const { return extent == last; }
    };

    // `extents` are a job's live ones, `blocks` those that hold them; the extents outlive this.
    LiveChecksums(std::span<const Extent> extents, std::span<const Block> blocks);

    // What is to be hashed from memory, the largest first, so that several threads end at about the same time.
    std::vector<Portion> portions() const;
    // Hash some more of a portion. Returns 0; or errno, when the memory of its `extent` can't be read.
    int hash(Portion &portion);
    // Take bytes of an extent that were copied, unless it belongs to a portion. In file order, one caller at a time.
    void copied(std::size_t extent, std::uint64_t position, const std::byte *data, std::uint64_t nbytes);

    // One for each live extent, in order. Only when every portion is hashed and all else is copied.
    std::vector<Digest> values() const;

  private:
    std::span<const Extent> extents_;
    std::vector<bool> in_portion_; // by extent
    std::vector<Digest> hashed_;   // by extent; threads write different ones
    Digests copied_;
};

} // namespace dsh
