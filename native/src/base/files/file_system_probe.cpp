#include "base/files/file_system_probe.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <linux/magic.h>
#include <map>
#include <sstream>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>
#include <vector>

#include "base/files/direct_align.hpp"
#include "base/files/io_error.hpp"

namespace dsh {
namespace {

std::string type_name(long magic) {
    static const std::map<long, std::string> names = {
        {EXT4_SUPER_MAGIC, "ext4"}, {XFS_SUPER_MAGIC, "xfs"},           {BTRFS_SUPER_MAGIC, "btrfs"},
        {TMPFS_MAGIC, "tmpfs"},     {OVERLAYFS_SUPER_MAGIC, "overlay"}, {NFS_SUPER_MAGIC, "nfs"},
        {0x0BD00BD0, "lustre"},
    };
    const auto found = names.find(magic);
    if (found != names.end()) {
        return found->second;
    }
    std::ostringstream text;
    text << "0x" << std::hex << magic;
    return text.str();
}

// A temporary file, removed by the destructor.
class Sample {
  public:
    explicit Sample(const std::string &directory) : path_(directory + "/.dshistory-probe-XXXXXX") {
        fd_ = mkostemp(path_.data(), O_CLOEXEC);
        if (fd_ < 0) {
            throw IoError("making a file", directory, 0, errno);
        }
    }
    ~Sample() {
        close(fd_);
        unlink(path_.c_str());
    }
    Sample(const Sample &) = delete;
    Sample &operator=(const Sample &) = delete;

    int fd() const { return fd_; }
    const std::string &path() const { return path_; }

  private:
    std::string path_;
    int fd_;
};

} // namespace

FileSystemFacts probe_file_system(const std::string &directory) {
    const Sample sample(directory);
    FileSystemFacts facts{};
    struct statfs system{};
    struct stat status{};
    if (fstatfs(sample.fd(), &system) < 0 || fstat(sample.fd(), &status) < 0) {
        throw IoError("fstat", sample.path(), 0, errno);
    }
    facts.type = type_name(static_cast<long>(system.f_type));
    facts.block_bytes = static_cast<std::uint64_t>(status.st_blksize);
    const DirectAlign align = direct_align(sample.fd());
    facts.memory_align = align.memory;
    facts.offset_align = align.offset;
    const int fd = open(sample.path().c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC);
    facts.direct = fd >= 0;
    if (fd >= 0) {
        close(fd);
    } else {
        facts.reason = facts.type + " refuses O_DIRECT: " + std::strerror(errno);
    }
    const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    // A huge st_blksize (network and parallel file systems) would pad every run; past 64 KiB the page is enough.
    const std::uint64_t preferred = facts.block_bytes <= (64 << 10) ? facts.block_bytes : page;
    facts.place_align = std::bit_ceil(std::max({page, preferred, facts.memory_align, facts.offset_align}));
    return facts;
}

} // namespace dsh
