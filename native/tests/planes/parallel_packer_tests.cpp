// Blocks that several threads pack are those that one packs, one behind the other; what fails ends all of them.

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/checksums/checksum.hpp"
#include "harness.hpp"
#include "planes/parallel_packer.hpp"

namespace dsh::test {
namespace {

// Blocks of any size: floats whose exponents are much alike, zeros, noise, and nothing.
std::vector<std::vector<std::byte>> some_blocks(std::size_t count, Random &random) {
    std::vector<std::vector<std::byte>> blocks(count);
    for (auto &block : blocks) {
        const std::size_t floats = random.between(0, 3) == 0 ? random.between(0, 60) : random.between(0, 60'000);
        block.resize(4 * floats + random.between(0, 3));
        const auto kind = random.between(0, 2);
        for (std::size_t i = 0; i < floats && kind != 0; ++i) {
            const auto exponent = kind == 1 ? 100 + random.between(0, 7) : random.between(0, 255);
            const auto word = static_cast<std::uint32_t>(exponent << 23 | random.between(0, 0x7fffff));
            std::memcpy(block.data() + 4 * i, &word, 4);
        }
    }
    return blocks;
}

struct Outcome {
    std::vector<PackedBlock> blocks;
    std::vector<std::byte> bytes;
};

std::vector<RawBlock> as_raw(const std::vector<std::vector<std::byte>> &blocks, std::size_t itemsize) {
    std::vector<RawBlock> raw;
    for (const auto &block : blocks) {
        raw.push_back({block, itemsize});
    }
    return raw;
}

std::size_t most_bytes(const std::vector<RawBlock> &blocks) {
    std::size_t most = 0;
    for (const RawBlock &block : blocks) {
        most += most_packed_bytes(block);
    }
    return most;
}

Outcome packed_by(std::size_t threads, const std::vector<std::vector<std::byte>> &blocks, std::size_t itemsize = 4) {
    const auto given = as_raw(blocks, itemsize);
    Outcome found;
    found.bytes.resize(most_bytes(given));
    found.blocks = ParallelPacker(threads).pack(given, found.bytes);
    std::size_t end = 0;
    for (const PackedBlock &block : found.blocks) {
        end += block.nbytes;
    }
    found.bytes.resize(end);
    return found;
}

} // namespace

TEST(threads_make_what_one_makes) {
    Random random(31);
    const auto blocks = some_blocks(60, random);
    const Outcome one = packed_by(1, blocks);
    for (const std::size_t threads : {2, 3, 8}) {
        const Outcome many = packed_by(threads, blocks);
        CHECK(many.bytes == one.bytes);
        std::size_t at = 0;
        for (std::size_t i = 0; i < blocks.size(); ++i) {
            CHECK(many.blocks[i].nbytes == one.blocks[i].nbytes);
            CHECK(many.blocks[i].checksum == checksum(many.bytes.data() + at, many.blocks[i].nbytes));
            at += many.blocks[i].nbytes;
        }
    }
}

TEST(no_blocks_are_packed_into_nothing) { CHECK(packed_by(2, {}).bytes.empty()); }

TEST(what_fails_in_a_thread_is_thrown_and_the_packer_goes_on) {
    Random random(32);
    const auto blocks = some_blocks(20, random);
    bool was_thrown = false;
    try {
        packed_by(4, blocks, 3);
    } catch (const std::invalid_argument &) {
        was_thrown = true;
    }
    CHECK(was_thrown);
    ParallelPacker packer(2);
    std::vector<std::byte> room(1 << 20);
    const std::vector<RawBlock> wrong(5, RawBlock{blocks[0], 5});
    try {
        packer.pack(wrong, room);
        CHECK(false);
    } catch (const std::invalid_argument &) {
    }
    const std::vector<std::byte> zeros(1000);
    const std::vector<RawBlock> right(5, RawBlock{zeros, 4});
    CHECK(packer.pack(right, room).size() == 5);
}

TEST(one_block_that_fails_among_many_ends_all_threads) {
    Random random(33);
    const auto blocks = some_blocks(12, random);
    auto given = as_raw(blocks, 4);
    ParallelPacker packer(4);
    std::vector<std::byte> room(most_bytes(given) + 64);
    for (std::size_t wrong = 0; wrong < given.size(); ++wrong) {
        given[wrong].itemsize = 5;
        bool was_thrown = false;
        try {
            packer.pack(given, room);
        } catch (const std::invalid_argument &) {
            was_thrown = true;
        }
        CHECK(was_thrown);
        given[wrong].itemsize = 4;
    }
    CHECK(packer.pack(given, room).size() == given.size());
}

TEST(calls_of_several_threads_wait_for_each_other) {
    Random random(34);
    const auto blocks = some_blocks(12, random);
    const Outcome expected = packed_by(1, blocks);
    const auto given = as_raw(blocks, 4);
    ParallelPacker packer(2);
    std::vector<std::vector<std::byte>> rooms(4, std::vector<std::byte>(most_bytes(given)));
    {
        std::vector<std::jthread> callers;
        for (auto &room : rooms) {
            callers.emplace_back([&] {
                for (unsigned turn = 0; turn < 5; ++turn) {
                    packer.pack(given, room);
                }
            });
        }
    }
    for (const auto &room : rooms) {
        CHECK(std::equal(expected.bytes.begin(), expected.bytes.end(), room.begin()));
    }
}

TEST(too_little_room_is_refused) {
    const std::vector<std::byte> zeros(1000);
    const std::vector<RawBlock> block{{zeros, 4}};
    std::vector<std::byte> room(most_packed_bytes(block[0]) - 1);
    bool was_thrown = false;
    try {
        ParallelPacker(1).pack(block, room);
    } catch (const std::invalid_argument &) {
        was_thrown = true;
    }
    CHECK(was_thrown);
}

} // namespace dsh::test
