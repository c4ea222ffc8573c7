// The checksums of a job's fed extents, computed by several threads side by side.
//
// The bytes of one extent are added in order, because a checksum has one running state, while different extents are
// independent of each other. So a block is hashed in at most two parts:
//   - its *continued* piece, of an extent that began in an earlier block: its turn comes when all before it is hashed;
//   - its *own* pieces, of the extents that begin in it: at any time.
// Functions marked (queue) are called with the write queue's mutex held; `hash` runs without it, once for each part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "blocks/cutting.hpp"

namespace dsh {

class FedChecksums {
  public:
    // A part of a filled block, whose bytes are at `data`.
    struct Part {
        const Block *block;
        const std::byte *data;
        bool continued;
    };

    // An extent of which a part has hashed the bytes up to `position`, and not all.
    struct Unfinished {
        std::size_t extent;
        std::uint64_t position;
        RunningChecksum running;
    };

    // `extents` are all of a plan, the last `fed` of them fed ones; both outlive this.
    FedChecksums(const std::vector<Extent> &extents, std::size_t fed);

    // Return the parts of a filled block, none for one that is all gaps.
    std::vector<Part> parts(const Block &block, const std::byte *data) const;
    // (queue) Whether `hash` may be called for the part now.
    bool ready(const Part &part) const;
    // (queue) Take what the parts before have left for this one, for `hash`; nothing for own pieces.
    std::optional<RunningChecksum> begin(const Part &part);
    // Hash the part. Returns the last extent when it goes on in the next block, for `end`.
    std::optional<Unfinished> hash(const Part &part, std::optional<RunningChecksum> before);
    // (queue) Leave an extent to the part that continues it.
    void end(std::optional<Unfinished> unfinished);

    // One for each fed extent, in order. Only when every block is hashed.
    const std::vector<Digest> &values() const { return values_; }

  private:
    const std::vector<Extent> &extents_;
    std::size_t first_;
    std::vector<Digest> values_;
    std::map<std::size_t, Unfinished> unfinished_; // (queue) by extent
};

} // namespace dsh
