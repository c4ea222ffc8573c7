// The failure of a system call: the operation, the file, the position in it, and errno.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dsh {

class IoError : public std::runtime_error {
  public:
    IoError(std::string operation, std::string path, std::uint64_t offset, int code)
        : std::runtime_error(operation + " at offset " + std::to_string(offset)), operation(std::move(operation)),
          path(std::move(path)), offset(offset), code(code) {}

    std::string operation;
    std::string path;
    std::uint64_t offset;
    int code;
};

} // namespace dsh
