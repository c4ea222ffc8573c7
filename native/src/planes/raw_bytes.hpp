// Bytes as the kernels take them, which include no header of C++.
#pragma once

#include <cstddef>

namespace dsh {

inline const unsigned char *raw(const std::byte *bytes) { return reinterpret_cast<const unsigned char *>(bytes); }
inline unsigned char *raw(std::byte *bytes) { return reinterpret_cast<unsigned char *>(bytes); }

} // namespace dsh
