// Codes byte planes as frames of Zstandard, with settings under which Huffman's code does nearly all of the work.
#pragma once

#include <cstddef>
#include <memory>

struct ZSTD_CCtx_s;

namespace dsh {

// How many of the repetitions in a plane zstd looks for.
enum class Matching {
    few, // exponents repeat by chance: to say where costs more than to code them one by one
    all, // runs, as of zeros, are worth finding
};

// Codes one plane after the other: to make a coder anew for each takes longer than to code many a plane. One thread at
// a time may use it.
class FrameCoder {
  public:
    // std::bad_alloc without memory for it; std::runtime_error when the library of zstd doesn't know a setting.
    explicit FrameCoder(Matching matching);

    // Return how much room the frame of so many bytes needs at most.
    static std::size_t most_bytes(std::size_t count);

    // Write one frame, which says how many bytes it stands for; return its size. `into` has most_bytes(count) bytes.
    std::size_t code(const std::byte *plane, std::size_t count, std::byte *into);

  private:
    struct Free {
        void operator()(ZSTD_CCtx_s *context) const;
    };
    std::unique_ptr<ZSTD_CCtx_s, Free> context_;
};

} // namespace dsh
