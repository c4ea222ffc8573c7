// One file being read: the blocks that cover its extents, and the checksum of each extent.
//
// Blocks may be read by any threads in any order. A direct block is the aligned interior of a large extent whose
// address is congruent to its offset: the kernel puts its bytes straight where they belong. Every other byte, the edges
// of those extents too, passes through the reading thread's bounce buffer, because O_DIRECT takes only aligned
// addresses, offsets and sizes. Checksums need the bytes of a file in order, so of the threads that finish a block one
// at a time hashes on, as far as everything before has been read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/aligned_memory.hpp"
#include "base/checksum.hpp"
#include "blocks/cutting.hpp"

namespace dsh {

// A thread's block of memory, allocated when the first block has to pass through it.
class BounceBuffer {
  public:
    explicit BounceBuffer(std::uint64_t block_bytes) : block_bytes_(block_bytes) {}

    // Throws std::bad_alloc.
    std::byte *data();

  private:
    std::uint64_t block_bytes_;
    AlignedMemory data_;
};

class InputFile {
  public:
    // Opens the file. `extents` are sorted by offset and not empty; `requests` holds the position of each in the
    // caller's list. Throws std::invalid_argument when two extents overlap, IoError when the file does not open.
    InputFile(const std::string &path, std::vector<Extent> extents, std::vector<std::size_t> requests,
              std::uint64_t block_bytes);
    ~InputFile();
    InputFile(const InputFile &) = delete;
    InputFile &operator=(const InputFile &) = delete;

    std::size_t block_count() const { return blocks_.size(); }

    // Read one block to its extents, each block once. Throws IoError.
    void read_block(std::size_t index, BounceBuffer &bounce);

    // Put the checksum of each extent at the position of its request. Only when all blocks have been read.
    void deliver(std::vector<Digest> &digests) const;

  private:
    void open_file();
    void fill(std::byte *target, const Block &block);
    void hash_ready(std::size_t index);

    std::string path_;
    std::vector<Extent> extents_;
    std::vector<std::size_t> requests_;
    std::vector<Block> blocks_;
    Digests digests_; // belongs to the holder of `hashing_`
    int fd_ = -1;

    std::mutex mutex_;       // guards the three below
    std::vector<bool> read_; // by block
    std::size_t hashed_ = 0; // so many blocks, from the first on
    bool hashing_ = false;   // one thread is hashing
};

} // namespace dsh
