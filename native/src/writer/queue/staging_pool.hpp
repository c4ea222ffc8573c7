// The staging budget: one aligned mapping, touched once, cut into slots that are lent and given back whole. A forked
// child does not have it.
//
// Guarantee: a slot is lent to one holder at a time, or to several that only read it, and its memory stays mapped until
// the last one has given it back, so memory that a request in flight still reads is never handed out again. An empty
// pool is no error but back-pressure: `take` returns nothing, and whoever needs a slot waits until a write completes
// and gives one back, so a job larger than the budget runs at the speed of the device. There are two sizes, so that the
// unaligned edges of many runs do not each take the memory of a whole block. Not thread-safe: the write queue calls it
// with its own mutex held.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/memory/huge_pages.hpp"

namespace dsh {

struct Slot {
    std::byte *data;
    bool small;
};

class StagingPool {
  public:
    static constexpr std::uint64_t small_bytes = 64 << 10;
    static constexpr std::uint64_t least_small = 4;

    // The smallest budget: two blocks, so that one is composed while the other is written, and the least small slots.
    static constexpr std::uint64_t least_bytes(std::uint64_t block_bytes) {
        return 2 * block_bytes + least_small * small_bytes;
    }

    // Throws std::invalid_argument when the budget is smaller than the least.
    StagingPool(std::uint64_t budget_bytes, std::uint64_t block_bytes);
    StagingPool(const StagingPool &) = delete;
    StagingPool &operator=(const StagingPool &) = delete;

    // Lend a slot of at least `nbytes`, which is at most a block; nothing when none is free. A request that fits a
    // small slot takes a large one only when no small one is free.
    std::optional<Slot> take(std::uint64_t nbytes);
    // Let a slot that is lent have one holder more. Each gives it back, and the last one really does.
    void share(Slot slot);
    void give(Slot slot);
    // Lend nothing more, and unmap the budget as soon as every slot is back.
    void drop();

    // Null once it is unmapped.
    std::byte *data() const { return data_.get(); }
    std::uint64_t budget_bytes() const { return budget_bytes_; }
    std::uint64_t free_bytes() const { return large_.size() * block_bytes_ + small_.size() * small_bytes; }

  private:
    std::uint64_t budget_bytes_;
    std::uint64_t block_bytes_;
    HugePages data_;
    std::vector<std::byte *> large_;
    std::vector<std::byte *> small_;
    std::size_t lent_ = 0;
    std::unordered_map<const std::byte *, std::size_t> further_holders_;
    bool dropped_ = false;
};

} // namespace dsh
