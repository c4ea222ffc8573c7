// Packs many blocks in several threads at once, one behind the other as if one thread had packed them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "planes/block_packer.hpp"

namespace dsh {

struct PackedBlock {
    std::size_t nbytes;
    Digest checksum; // of the packed bytes
};

// Beside a training whose threads share each operation, work in one thread lets all of them wait for the one that it
// has pushed from its processor: the same work in as many threads as those are lets them wait for a part of it.
class ParallelPacker {
  public:
    // Use the calling thread and others, `threads` together; std::invalid_argument for none.
    explicit ParallelPacker(std::size_t threads);
    ParallelPacker(const ParallelPacker &) = delete;
    ParallelPacker &operator=(const ParallelPacker &) = delete;

    // Pack blocks that need no base, in order. std::invalid_argument unless `into` has room for the most that they
    // may take, or where an itemsize is unknown. To be called by one thread at a time.
    std::vector<PackedBlock> pack(std::span<const RawBlock> blocks, std::span<std::byte> into);

  private:
    std::vector<std::unique_ptr<BlockPacker>> packers_;
};

} // namespace dsh
