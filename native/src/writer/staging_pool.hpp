// The staging budget: one aligned mapping, touched once, cut into slots that are lent and given back whole.
//
// Guarantee: a slot is lent to one holder at a time and its memory stays mapped until it is given back, so a region
// still in flight can never be handed out again. Two sizes, so that the edge pages of many runs do not each take a
// block's worth of memory. Not thread-safe: the write queue calls it under its own mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace dsh {

struct Slot {
    std::byte *data;
    bool small;
};

class StagingPool {
  public:
    static constexpr std::uint64_t small_bytes = 64 << 10;
    static constexpr std::uint64_t least_small = 4;

    // The smallest budget: two blocks beside the least small slots.
    static constexpr std::uint64_t least_bytes(std::uint64_t block_bytes) {
        return 2 * block_bytes + least_small * small_bytes;
    }

    // Throws std::invalid_argument when the budget is smaller than the least.
    StagingPool(std::uint64_t budget_bytes, std::uint64_t block_bytes);
    ~StagingPool();
    StagingPool(const StagingPool &) = delete;
    StagingPool &operator=(const StagingPool &) = delete;

    // A slot of at least `nbytes`, which is at most a block. What fits a small slot takes a large one only when no
    // small one is free.
    std::optional<Slot> take(std::uint64_t nbytes);
    void give(Slot slot);
    // Lend nothing more, and unmap the budget when no slot is out any more.
    void drop();

    // Null when it is unmapped.
    std::byte *data() const { return data_; }
    std::uint64_t budget_bytes() const { return budget_bytes_; }
    std::uint64_t free_bytes() const { return large_.size() * block_bytes_ + small_.size() * small_bytes; }

  private:
    std::uint64_t budget_bytes_;
    std::uint64_t block_bytes_;
    std::byte *data_;
    std::vector<std::byte *> large_;
    std::vector<std::byte *> small_;
    std::size_t lent_ = 0;
    bool dropped_ = false;
};

} // namespace dsh
