// Bytes that have no place in a job's plan: they are written behind the planned ones, as they come.
//
// The sizes are known when it begins, the bytes are given piece by piece, in order. They are hashed in the buffer from
// which they are written, so a checksum is always that of the bytes in the file. Between two calls no memory of others
// is needed, and besides one small buffer none is taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "base/memory/aligned_memory.hpp"

namespace dsh {

class WriteJob;

class Appendix {
  public:
    // Extents of these sizes, back to back from the present end of the job's file on.
    Appendix(std::shared_ptr<WriteJob> job, std::vector<std::uint64_t> sizes);

    // Take the next `nbytes` of the extents from memory, which is read only inside the call. Throws IoError when a
    // write fails or the memory is not mapped (EFAULT), std::invalid_argument when these are more bytes than are left.
    void add(std::uint64_t address, std::uint64_t nbytes);
    // Fill up with zeros to the job's alignment, and make this the file's end; returns the checksums of the extents.
    // Throws std::logic_error while bytes are missing.
    std::vector<Digest> end();

    std::uint64_t offset() const { return offset_; }
    const std::shared_ptr<WriteJob> &job() const { return job_; }

  private:
    void write_out();

    std::shared_ptr<WriteJob> job_;
    std::vector<std::uint64_t> sizes_;
    Digests digests_;
    AlignedMemory buffer_;
    std::uint64_t room_;
    std::uint64_t filled_ = 0;   // bytes in the buffer
    std::uint64_t offset_;       // of the first extent in the file
    std::uint64_t at_;           // of the buffer in the file
    std::size_t extent_ = 0;     // whose bytes come next
    std::uint64_t position_ = 0; // in that extent
    bool ended_ = false;
};

} // namespace dsh
