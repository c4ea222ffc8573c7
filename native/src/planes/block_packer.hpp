// Packs one block of numbers without loss: transform, byte planes, and for each plane what makes it smallest.
// docs/format.md has the definition of a block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "planes/byte_planes.hpp"
#include "planes/few_mantissas.hpp"
#include "planes/frame_coder.hpp"
#include "planes/kernels/forms.hpp"

namespace dsh {

// Elements of `itemsize` bytes each: 1, 2, 4 or 8. The last one may be cut off.
struct RawBlock {
    std::span<const std::byte> bytes;
    std::size_t itemsize;
};

// Return how many bytes a block takes at most, packed.
std::size_t most_packed_bytes(const RawBlock &block);

// Packs one block after the other, in memory that it keeps from each to the next. One thread at a time may use it.
class BlockPacker {
  public:
    // Pack a block, in the one of the transforms that makes a sample of it smallest; return the size. `base` has as
    // many bytes as the block, or is null where no transform needs one. std::invalid_argument for another itemsize, and
    // without a transform. Where `may_index`, elements of 4 bytes are indexed instead if that makes them smaller. The
    // bytes of the block must stay until `write` has returned.
    std::size_t pack(const RawBlock &block, const std::byte *base, std::span<const Transform> transforms,
                     bool may_index = false);

    // Write what the last `pack` has made: as many bytes as it has returned.
    void write(std::byte *into) const;

  private:
    // What a block says of the bytes of a plane; the numbers are those of the format.
    enum class Coding : std::uint8_t { stored = 0, frame = 1, constant = 2, quads = 3 };
    // What is tried on a plane. Whichever it is, a plane of one value is a constant, and one that gets no smaller is
    // stored.
    enum class Coder : std::uint8_t { none, few_matches, all_matches, quads };

    // Memory that only grows. What it held is lost when it does.
    class Memory {
      public:
        std::byte *of(std::size_t nbytes);

      private:
        std::unique_ptr<std::byte[]> bytes_;
        std::size_t nbytes_ = 0;
    };

    // A plane as it is stored. The bytes are in `memory`, or are those of the plane itself and live as long as it does.
    struct Content {
        Coding coding = Coding::stored;
        std::span<const std::byte> bytes;
        Memory memory;
    };

    // The parts of a plane of quads, and the memory in which they are made.
    struct Quads {
        Memory quads;
        Memory others;
        std::array<Content, 2> parts;
    };

    bool pack_indexed(std::span<const std::byte> whole, std::span<const std::byte> some, double other);
    std::span<const std::byte> sample(std::span<const std::byte> data, Memory &memory) const;
    const std::byte *split(const std::byte *data, const std::byte *base, std::size_t count);
    std::array<Coder, most_planes> best_coders(const std::byte *planes, std::size_t count,
                                               std::span<const double> sizes, bool is_whole, std::size_t first);
    void code_all(const std::byte *planes, std::size_t count, std::span<const Coder> coders, std::size_t first);
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
    FewMantissas mantissas_;
    Transform transform_ = Transform::plain;
    bool is_indexed_ = false;
    RawBlock block_{{}, 1};
};

} // namespace dsh
