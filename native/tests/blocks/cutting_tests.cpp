// Every file is cut into blocks that keep their promises, over random files.

#include <algorithm>
#include <limits>
#include <set>

#include "base/memory/aligned_memory.hpp"
#include "blocks/cutting.hpp"
#include "harness.hpp"

namespace dsh::test {
namespace {

constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

struct Sample {
    std::vector<Extent> extents;
    std::uint64_t begin;
    std::uint64_t end;
    Cutting how;
};

Sample sample(Random &random) {
    Sample result{};
    const std::uint64_t align = std::uint64_t{1} << random.between(0, 6);
    result.begin = align * random.between(0, 3);
    std::uint64_t offset = result.begin;
    std::uint64_t address = 1 << 20;
    for (std::uint64_t i = random.between(0, 12); i > 0; --i) {
        const std::uint64_t gap = random.coin() ? 0 : random.between(0, 5 * align);
        offset += gap;
        address += gap;
        if (random.between(0, 3) == 0) {
            address += random.between(0, 2 * align);
        } else if (random.coin()) {
            address += (align - (address - offset) % align) % align;
        }
        const std::uint64_t nbytes = random.coin() ? random.between(0, 3) : random.between(0, 40 * align);
        result.extents.push_back({offset, nbytes == 0 ? 0 : address, nbytes});
        offset += nbytes;
        address += nbytes;
    }
    result.end = round_up(offset, align) + align * random.between(0, 2);
    result.how = {.align = align,
                  .block_bytes = align * random.between(1, 16),
                  .min_direct_bytes = random.between(1, 20 * align),
                  .max_gap_bytes = random.coin() ? unlimited : align * random.between(0, 3),
                  .gathered_extents = random.between(0, result.extents.size())};
    return result;
}

void check_blocks(const Sample &file, const std::vector<Block> &blocks) {
    std::uint64_t at = file.begin;
    for (const Block &block : blocks) {
        CHECK(block.offset >= at && block.nbytes > 0 && block.nbytes <= file.how.block_bytes);
        CHECK(block.offset % file.how.align == 0 && block.nbytes % file.how.align == 0);
        CHECK(file.how.max_gap_bytes != unlimited || block.offset == at);
        at = block.end();
    }
    CHECK(at <= file.end);
    CHECK(file.how.max_gap_bytes != unlimited || at == file.end);
}

// Every byte of every extent is visited once, in order, and direct blocks lie in memory as they do in the file.
void check_pieces(const Sample &file, const std::vector<Block> &blocks) {
    std::vector<std::uint64_t> fed(file.extents.size(), 0);
    for (const Block &block : blocks) {
        std::uint64_t covered = 0;
        each_piece(file.extents, block,
                   [&](std::size_t i, std::uint64_t position, std::uint64_t inside, std::uint64_t nbytes) {
                       const Extent &extent = file.extents[i];
                       CHECK(position == fed[i]);
                       CHECK(extent.offset + position == block.offset + inside);
                       CHECK(inside + nbytes <= block.nbytes);
                       if (block.direct()) {
                           CHECK(extent.address + position == block.source + inside);
                           CHECK(i >= file.how.gathered_extents);
                       }
                       fed[i] += nbytes;
                       covered += nbytes;
                   });
        if (block.direct()) {
            CHECK(covered == block.nbytes);
            CHECK(block.source % file.how.align == block.offset % file.how.align);
        }
    }
    for (std::size_t i = 0; i < fed.size(); ++i) {
        CHECK(fed[i] == file.extents[i].nbytes);
    }
}

} // namespace

TEST(every_byte_belongs_to_one_block) {
    Random random(1);
    std::size_t direct = 0;
    for (int turn = 0; turn < 20000; ++turn) {
        const Sample file = sample(random);
        const std::vector<Block> blocks = cut(file.extents, file.begin, file.end, file.how);
        check_blocks(file, blocks);
        check_pieces(file, blocks);
        direct += static_cast<std::size_t>(std::ranges::count_if(blocks, &Block::direct));
    }
    CHECK(direct > 10000);
}

TEST(gaps_longer_than_allowed_are_skipped) {
    const std::vector<Extent> extents = {{10, 1000, 10}, {100, 5000, 10}, {1000, 9000, 10}};
    const Cutting how{
        .align = 10, .block_bytes = 1000, .min_direct_bytes = 100, .max_gap_bytes = 80, .gathered_extents = 0};
    const std::vector<Block> blocks = cut(extents, 0, 2000, how);
    CHECK(blocks.size() == 2);
    CHECK(blocks[0].offset == 10 && blocks[0].end() == 110);
    CHECK(blocks[1].offset == 1000 && blocks[1].end() == 1010);
}

} // namespace dsh::test
