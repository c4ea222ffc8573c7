// One file being read: the blocks that cover its extents, and the checksum of each extent.
//
// Blocks may be read by any threads in any order. A direct block is the aligned interior of a large extent whose
// address is congruent to its offset: the kernel puts its bytes straight where they belong. Every other byte, the edges
// of those extents too, passes through the reading thread's bounce buffer, because O_DIRECT takes only aligned
// addresses, offsets and sizes. Checksums need the bytes of a file in order, so of the threads that finish a block one
// at a time hashes on, as far as everything before has been read.
//
// Only regular files are opened, and never through a symbolic link as the last part of the path: a history may come
// from anywhere, and a FIFO would hang its reader for ever. Where the file system refuses O_DIRECT, at the opening or
// at any read, the file is read through the page cache.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "base/memory/aligned_memory.hpp"
#include "blocks/cutting.hpp"

namespace dsh {

// A thread's block of memory, allocated when the first block has to pass through it.
class BounceBuffer {
  public:
    // Return memory of `nbytes` on a boundary of `align`, which both files and blocks may ask for differently. It holds
    // until the next call. Throws std::bad_alloc.
    std::byte *data(std::uint64_t align, std::uint64_t nbytes);

  private:
    std::uint64_t align_ = 0;
    std::uint64_t nbytes_ = 0;
    AlignedMemory data_;
};

// An open file; closes it also when the constructor of its owner throws.
struct Descriptor {
    int fd = -1;

    Descriptor() = default;
    ~Descriptor();
    Descriptor(const Descriptor &) = delete;
    Descriptor &operator=(const Descriptor &) = delete;
};

class InputFile {
  public:
    // Opens the file. `extents` are sorted by offset and not empty; `requests` holds the position of each in the
    // caller's list. Throws std::invalid_argument when two extents overlap, IoError when the file does not open or is
    // no regular file.
    InputFile(const std::string &path, std::vector<Extent> extents, std::vector<std::size_t> requests,
              std::uint64_t block_bytes, bool hashed);
    std::size_t block_count() const { return blocks_.size(); }

    // Read one block to its extents, each block once. Throws IoError.
    void read_block(std::size_t index, BounceBuffer &bounce);

    // Put the checksum of each extent at the position of its request. Only when all blocks have been read, of a file
    // that is hashed.
    void deliver(std::vector<Digest> &digests) const;

  private:
    void open_file();
    void require_regular() const;
    void choose_align();
    bool read_buffered();
    void fill(std::byte *target, const Block &block);
    void hash_ready(std::size_t index);

    std::string path_;
    std::vector<Extent> extents_;
    std::vector<std::size_t> requests_;
    std::vector<Block> blocks_;
    Digests digests_; // belongs to the holder of `hashing_`
    bool hashed_;
    Descriptor file_;
    std::atomic<bool> direct_ = true; // the file is read with O_DIRECT
    std::uint64_t align_;             // of blocks: what O_DIRECT demands here

    std::mutex mutex_;              // guards the three below
    std::vector<bool> read_;        // by block
    std::size_t hashed_blocks_ = 0; // so many, from the first on
    bool hashing_ = false;          // one thread is hashing
};

} // namespace dsh
