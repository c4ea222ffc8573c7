// Packs one block of numbers without loss: transform, byte planes, and for each plane what makes it smallest.
// docs/format.md has the definition of a block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "planes/coded_bytes.hpp"
#include "planes/forms.hpp"
#include "planes/frame_coder.hpp"

namespace dsh {

// Elements of `itemsize` bytes each: 1, 2, 4 or 8. The last one may be cut off.
struct RawBlock {
    std::span<const std::byte> bytes;
    std::size_t itemsize;
};

// A packed block takes at most so many bytes.
std::size_t most_packed_bytes(const RawBlock &block);

// What one thread has to pack with: one block after the other.
class BlockPacker {
  public:
    // Pack a block; return its size. `base` has as many bytes, or is null where `tried` has no transform that needs
    // one. Of those the one is taken that makes a sample smallest. std::invalid_argument for another itemsize. What is
    // in `block` must stay until it is written.
    std::size_t pack(const RawBlock &block, const std::byte *base, std::span<const Transform> tried);

    // Write what the last `pack` has made.
    void write(std::byte *into) const;

  private:
    enum class Coding : std::uint8_t { stored = 0, frame = 1, constant = 2, quads = 3 };
    enum class Coder : std::uint8_t { none, few_matches, all_matches, quads };

    // Memory that grows, and is used again.
    class Memory {
      public:
        std::byte *of(std::size_t nbytes);

      private:
        std::unique_ptr<std::byte[]> bytes_;
        std::size_t nbytes_ = 0;
    };

    // The bytes of a plane as they are stored: its own, or in memory.
    struct Content {
        Coding coding = Coding::stored;
        std::span<const std::byte> bytes;
        Memory memory;
    };

    // What gathering a plane's quads needs.
    struct Quads {
        Memory quads;
        Memory others;
        std::array<Content, 2> parts;
    };

    std::span<const std::byte> sample(const std::byte *data, std::size_t nbytes, std::size_t itemsize, Memory &memory);
    const std::byte *split(const std::byte *data, const std::byte *base, std::size_t count);
    Coder best_coder(std::span<const std::byte> plane, double size, bool is_whole, Content &content);
    void code(std::span<const std::byte> plane, Coder coder, Content &content);
    void code_quads(std::span<const std::byte> plane, Content &content);

    FrameCoder few_{Matching::few};
    FrameCoder all_{Matching::all};
    Memory planes_;
    Memory sample_;
    Memory base_sample_;
    Quads quads_;
    std::array<Content, 2> tried_;
    std::array<Content, most_planes> contents_;
    Transform transform_ = Transform::plain;
    RawBlock block_{};
};

} // namespace dsh
