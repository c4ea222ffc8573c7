// One file being written: created exclusively, preallocated, with O_DIRECT where the file system accepts it.
//
// Until it is sealed the file belongs to this object, which unlinks it when it is destroyed. A forked child has a copy
// of the object but not the file: there the descriptor is closed and the name is left to the parent.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <sys/types.h>

#include "writer/file/faults.hpp"

namespace dsh {

class OutputFile {
  public:
    // Creates `path` (it must not exist) and preallocates `nbytes`. Throws IoError, and leaves no file behind when it
    // does.
    OutputFile(std::string path, std::uint64_t nbytes, std::uint64_t align, std::shared_ptr<Faults> faults);
    ~OutputFile();
    OutputFile(const OutputFile &) = delete;
    OutputFile &operator=(const OutputFile &) = delete;

    // Write all bytes at `offset`, resuming short writes at an aligned offset. `data`, `offset` and `nbytes` are
    // aligned. Returns 0 or errno.
    int write(const void *data, std::uint64_t offset, std::uint64_t nbytes);
    // Cut to `nbytes`, fdatasync, close. Throws IoError.
    void seal(std::uint64_t nbytes);
    // Close and unlink. Does nothing to a sealed file; in a forked child it only closes.
    void discard() noexcept;

    int descriptor() const { return fd_; }
    bool direct() const { return direct_; }
    std::uint64_t align() const { return align_; }
    const std::string &path() const { return path_; }
    const std::shared_ptr<Faults> &faults() const { return faults_; }

  private:
    void preallocate(std::uint64_t nbytes);

    std::string path_;
    std::uint64_t align_;
    std::shared_ptr<Faults> faults_;
    pid_t owner_;
    int fd_ = -1;
    bool direct_ = true;
    bool ours_ = true; // the name is this object's to unlink, until the file is sealed or unlinked
};

} // namespace dsh
