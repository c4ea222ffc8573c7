// A packed block is what the format says, takes no more than it may, and one that can't be packed harms no other.

#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "harness.hpp"
#include "planes/block_packer.hpp"

namespace dsh::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::array plain = {Transform::plain};
constexpr std::array all = {Transform::plain, Transform::rotated, Transform::exclusive, Transform::rotated_xor,
                            Transform::difference};
constexpr std::size_t head_bytes = 11;
constexpr std::size_t row_bytes = 9;

Bytes some_bytes(std::size_t count, std::uint64_t most, Random &random) {
    Bytes bytes(count);
    for (std::byte &byte : bytes) {
        byte = static_cast<std::byte>(random.between(0, most));
    }
    return bytes;
}

// Return the block in memory that has no byte more than it says.
Bytes packed_by(BlockPacker &packer, const RawBlock &block, const std::byte *base,
                std::span<const Transform> transforms) {
    Bytes packed(packer.pack(block, base, transforms));
    packer.write(packed.data());
    return packed;
}

} // namespace

TEST(a_block_has_its_head_the_table_its_planes_and_what_is_left) {
    BlockPacker packer;
    const std::array<unsigned char, 7> data = {1, 7, 2, 7, 3, 7, 9};
    const Bytes found = packed_by(packer, {std::as_bytes(std::span(data)), 2}, nullptr, plain);
    const std::array<unsigned char, 33> expected = {1, 0, 2,                   // version, transform, itemsize
                                                    7, 0, 0, 0, 0, 0, 0, 0,    // raw bytes
                                                    0, 3, 0, 0, 0, 0, 0, 0, 0, // stored
                                                    2, 1, 0, 0, 0, 0, 0, 0, 0, // one value
                                                    1, 2, 3, 7};
    // 9 is behind the last whole element.
    CHECK(found.size() == expected.size() + 1 && found.back() == std::byte{9});
    CHECK(std::memcmp(found.data(), expected.data(), expected.size()) == 0);
}

TEST(no_block_takes_more_than_it_may) {
    Random random(41);
    BlockPacker packer;
    for (unsigned turn = 0; turn < 120; ++turn) {
        const std::size_t itemsize = std::size_t{1} << turn % 4;
        const std::size_t count = random.coin() ? random.between(0, 70) : random.between(0, 60'000);
        const Bytes data = some_bytes(count, turn % 3 == 0 ? 2 : 255, random);
        Bytes base = some_bytes(count, 255, random);
        if (turn % 5 == 0) {
            base = data;
        }
        const RawBlock block{data, itemsize};
        CHECK(packed_by(packer, block, nullptr, plain).size() <= most_packed_bytes(block));
        const Bytes against = packed_by(packer, block, base.data(), all);
        CHECK(against.size() <= most_packed_bytes(block));
        CHECK(turn % 5 != 0 || against.size() <= head_bytes + itemsize * (row_bytes + 1) + 7);
    }
    CHECK(most_packed_bytes({{}, 4}) == head_bytes + 4 * row_bytes);
}

TEST(an_indexed_block_takes_no_more_than_it_may_and_one_that_is_found_to_have_other_mantissas_is_cut) {
    Random random(43);
    BlockPacker packer;
    for (unsigned turn = 0; turn < 60; ++turn) {
        const std::size_t count = 2500 + random.between(0, 9000);
        std::vector<float> numbers(count);
        for (float &number : numbers) {
            const auto half = static_cast<std::uint32_t>(random.between(0x3000, 0x4000)) << 16;
            std::memcpy(&number, &half, sizeof half);
            number *= 0.3F;
        }
        const bool is_odd = turn % 2 == 0;
        if (is_odd) {
            numbers[random.between(0, count - 1)] = 0.1234567F;
        }
        const RawBlock block{std::as_bytes(std::span(numbers)), sizeof(float)};
        Bytes packed(packer.pack(block, nullptr, plain, true));
        CHECK(packed.size() <= most_packed_bytes(block));
        packer.write(packed.data());
        CHECK((packed[1] == std::byte{5}) == !is_odd);
        CHECK(!is_odd || packed == packed_by(packer, block, nullptr, plain));
    }
}

TEST(a_block_that_can_not_be_packed_is_refused_and_the_next_one_is_packed) {
    Random random(42);
    const Bytes data = some_bytes(20'000, 60, random);
    BlockPacker packer;
    const Bytes expected = packed_by(packer, {data, 4}, nullptr, plain);
    for (const std::size_t itemsize : {0, 3, 16}) {
        bool was_refused = false;
        try {
            packer.pack({data, itemsize}, nullptr, plain);
        } catch (const std::invalid_argument &) {
            was_refused = true;
        }
        CHECK(was_refused);
        CHECK(packed_by(packer, {data, 4}, nullptr, plain) == expected);
    }
    bool was_refused = false;
    try {
        packer.pack({data, 4}, nullptr, {});
    } catch (const std::invalid_argument &) {
        was_refused = true;
    }
    CHECK(was_refused);
}

} // namespace dsh::test
