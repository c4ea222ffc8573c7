// Packs many blocks in several threads at once, one behind the other as if one thread had packed them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "planes/block_packer.hpp"

namespace dsh {

struct PackedBlock {
    std::size_t nbytes;
    Digest checksum; // of the packed bytes
};

// Packs with as many threads as it is told. Beside a training whose threads share each operation, work in one thread
// lets all of them wait for the one that it has pushed from its processor: the same work in as many threads as those
// are lets them wait for a part of it.
class ParallelPacker {
  public:
    // Use the calling thread and others, `threads` together, or fewer where the host gives no more.
    // std::invalid_argument for none.
    explicit ParallelPacker(std::size_t threads);
    ParallelPacker(const ParallelPacker &) = delete;
    ParallelPacker &operator=(const ParallelPacker &) = delete;

    // Pack blocks in order, without a base. The other threads end before it returns, or throws. std::invalid_argument
    // unless `into` has room for the most that the blocks may take, and for an unknown itemsize; `into` holds anything
    // then. A call waits for those of other threads to end. With a `team` the other threads are those of the calling
    // thread's OpenMP team of so many (base/openmp_team.hpp), where there is one; only a thread that has one already
    // should ask for that.
    std::vector<PackedBlock> pack(std::span<const RawBlock> blocks, std::span<std::byte> into, std::size_t team = 0);

  private:
    std::mutex mutex_; // of the packers
    std::vector<std::unique_ptr<BlockPacker>> packers_;
};

} // namespace dsh
