// Slots of the staging pool never overlap, all come back, and small requests leave the large ones alone.

#include <utility>
#include <vector>

#include "harness.hpp"
#include "writer/queue/staging_pool.hpp"

namespace dsh::test {

TEST(slots_never_overlap_and_all_come_back) {
    constexpr std::uint64_t block = 256 << 10;
    StagingPool staging(StagingPool::least_bytes(block) + 5 * block + 4096, block);
    const std::uint64_t all = staging.free_bytes();
    CHECK(all <= staging.budget_bytes());
    Random random(2);
    std::vector<std::pair<Slot, std::uint64_t>> held;
    for (int turn = 0; turn < 20000; ++turn) {
        if (random.coin()) {
            const std::uint64_t nbytes = random.coin() ? block : random.between(1, StagingPool::small_bytes);
            if (const auto slot = staging.take(nbytes)) {
                CHECK(slot->data >= staging.data() && slot->data + nbytes <= staging.data() + staging.budget_bytes());
                for (const auto &[other, other_bytes] : held) {
                    CHECK(slot->data + nbytes <= other.data || other.data + other_bytes <= slot->data);
                }
                held.emplace_back(*slot, nbytes);
            } else {
                CHECK(!held.empty());
            }
        } else if (!held.empty()) {
            std::swap(held[random.between(0, held.size() - 1)], held.back());
            staging.give(held.back().first);
            held.pop_back();
        }
    }
    for (const auto &[slot, nbytes] : held) {
        staging.give(slot);
    }
    CHECK(staging.free_bytes() == all);
}

TEST(a_small_request_takes_a_large_slot_only_when_it_must) {
    constexpr std::uint64_t block = 256 << 10;
    StagingPool staging(StagingPool::least_bytes(block), block);
    for (std::uint64_t i = 0; i < StagingPool::least_small; ++i) {
        CHECK(staging.take(1)->small);
    }
    CHECK(!staging.take(1)->small);
    CHECK(staging.take(block));
    CHECK(!staging.take(1) && !staging.take(block));
}

} // namespace dsh::test
