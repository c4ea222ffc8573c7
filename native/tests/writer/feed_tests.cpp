// Fed blocks under threads: feeders that hold several slots, trainings that start and release, one small budget.

#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/memory/aligned_memory.hpp"
#include "harness.hpp"
#include "writer/memory_device.hpp"
#include "writer/queue/queue.hpp"
#include "writer/several_trainings.hpp"

namespace dsh::test {
namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t block = 128 << 10;

// An eager, a lazy and a fed part, each with a start and an end off the page; the image is what the file must have.
struct Mixed {
    std::vector<std::byte> live;
    std::vector<std::byte> image;
    std::vector<Digest> digests;
    std::shared_ptr<const WritePlan> plan;
};

Mixed mixed(Random &random) {
    Mixed result;
    const std::uint64_t eager = random.between(0, 2 * block);
    const std::uint64_t lazy = random.between(1, 3 * block);
    const std::uint64_t first_fed = round_up(page + eager + lazy, page) + random.between(0, page - 1);
    const std::uint64_t fed = random.between(1, 9 * block);
    const std::uint64_t second_fed = first_fed + fed + random.between(0, page);
    const std::uint64_t end = round_up(second_fed + fed, page);
    result.image.resize(end);
    for (std::byte &byte : result.image) {
        byte = static_cast<std::byte>(random.between(1, 255));
    }
    const auto zero = [&](std::uint64_t from, std::uint64_t to) { std::memset(&result.image[from], 0, to - from); };
    zero(0, page);
    zero(page + eager + lazy, first_fed);
    zero(first_fed + fed, second_fed);
    result.live.assign(result.image.begin() + page,
                       result.image.begin() + static_cast<std::ptrdiff_t>(page + eager + lazy));
    const auto address = reinterpret_cast<std::uint64_t>(result.live.data());
    const std::vector<Extent> extents{
        {page, address, eager}, {page + eager, address + eager, lazy}, {first_fed, 0, fed}, {second_fed, 0, fed}};
    for (const Extent &extent : extents) {
        result.digests.push_back(checksum(&result.image[extent.offset], extent.nbytes));
    }
    std::fill(result.image.begin() + static_cast<std::ptrdiff_t>(second_fed + fed), result.image.end(), std::byte{});
    result.plan = std::make_shared<WritePlan>(extents, 1, 2, page, end, page);
    return result;
}

// Fill slots from the image, several at once; when the job fails they all go back.
void feed_all(WriteQueue &queue, const std::shared_ptr<WriteJob> &job, const std::vector<std::byte> &image,
              std::size_t most) {
    std::deque<Feed> out;
    bool failed = false;
    for (;;) {
        std::optional<Feed> feed;
        try {
            feed = out.size() < most && !failed ? FeedLender(queue).next(job) : std::nullopt;
        } catch (const IoError &) {
            failed = true; // wait says why
        }
        if (feed) {
            const Block &where = job->block(feed->index);
            std::memcpy(feed->slot.data, &image[where.offset], where.nbytes);
            out.push_back(*feed);
        } else if (!out.empty()) {
            FeedLender(queue).fed(job, out.front());
            out.pop_front();
        } else {
            return;
        }
    }
}

// A training that overwrites its live state at once after the barrier, while its feeder goes on.
void train(WriteQueue &queue, MemoryDevice &device, std::uint64_t seed, bool fails) {
    Random random(seed);
    for (int turn = 0; turn < 10; ++turn) {
        Mixed state = mixed(random);
        const auto job =
            queue.start(state.plan, scratch() / ("feed" + std::to_string(seed) + "-" + std::to_string(turn)), nullptr);
        std::jthread feeder([&, most = random.between(1, 4)] { feed_all(queue, job, state.image, most); });
        queue.release(job);
        std::memset(state.live.data(), 0xee, state.live.size());
        bool failed = false;
        try {
            CHECK(queue.wait(*job, -1));
        } catch (const IoError &) {
            failed = true;
        }
        feeder.join();
        const auto got = device.take_image(job.get());
        CHECK(failed ? fails : got == state.image && job->digests() == state.digests);
        queue.fail(job, IoError("abort", job->path(), 0, ECANCELED));
        job->discard();
    }
}

} // namespace

TEST(fed_blocks_are_written_beside_live_ones) { several_trainings({1, 2, 3}, block, false, train); }

TEST(fed_blocks_of_failed_jobs_come_back) { several_trainings({1, 2, 3}, block, true, train); }

TEST(a_lent_slot_is_lent_to_nobody_else) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    const std::uint64_t all = queue.free_bytes();
    const std::vector<Extent> fed{{page, 0, 8 * block}};
    const auto plan = std::make_shared<WritePlan>(fed, 0, 1, page, page + 8 * block, page);
    const auto job = queue.start(plan, scratch() / "out", nullptr);
    const auto held = FeedLender(queue).next(job);
    CHECK(held);
    queue.fail(job, IoError("abort", job->path(), 0, ECANCELED));
    CHECK(queue.free_bytes() == all - block);
    const auto other = queue.start(plan, scratch() / "other", nullptr);
    while (const auto feed = FeedLender(queue).next(other)) {
        CHECK(feed->slot.data != held->slot.data);
    }
    const std::uint64_t left = queue.free_bytes();
    FeedLender(queue).fed(job, *held);
    CHECK(queue.free_bytes() == left + block);
}

TEST(a_feeder_waits_behind_a_start_that_holds_up_a_training) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    const std::vector<Extent> fed{{page, 0, 8 * block}};
    const auto plan = std::make_shared<WritePlan>(fed, 0, 1, page, page + 8 * block, page);
    const auto job = queue.start(plan, scratch() / "behind", nullptr);
    const Feed first = *FeedLender(queue).next(job);
    const Feed second = *FeedLender(queue).next(job);
    CHECK(!FeedLender(queue).next(job));
    std::vector<std::byte> live(2 * block);
    const std::vector<Extent> eager{{page, reinterpret_cast<std::uint64_t>(live.data()), live.size()}};
    const auto urgent = std::make_shared<WritePlan>(eager, 1, 0, page, page + 2 * block, page);
    std::jthread training([&] { queue.start(urgent, scratch() / "urgent", nullptr); });
    while (queue.urgent() == 0) {
        std::this_thread::yield();
    }
    // Both blocks of the training are written before the feeder, which asks all the time, gets a slot.
    FeedLender(queue).fed(job, first);
    CHECK(queue.hash_next(false));
    std::size_t urgent_blocks = 0;
    bool ahead = false;
    while (urgent_blocks < 2) {
        Write write = *queue.next(true);
        urgent_blocks += write.job == job ? 0 : 1;
        queue.completed(std::move(write), 0);
        if (queue.urgent() != 0 && !ahead) {
            if (const auto feed = FeedLender(queue).next(job)) {
                ahead = true;
                FeedLender(queue).drop(job, *feed);
            }
        }
    }
    training.join();
    CHECK(!ahead);
    CHECK(FeedLender(queue).next(job));
    FeedLender(queue).fed(job, second);
}

TEST(a_slot_is_back_only_when_its_block_is_written_and_hashed) {
    for (const bool written_first : {true, false}) {
        WriteQueue queue(StagingPool::least_bytes(block), block);
        const std::uint64_t all = queue.free_bytes();
        const std::vector<Extent> fed{{page, 0, block}};
        const auto plan = std::make_shared<WritePlan>(fed, 0, 1, page, page + block, page);
        const auto job = queue.start(plan, scratch() / ("both" + std::to_string(written_first)), nullptr);
        const auto feed = FeedLender(queue).next(job);
        std::memset(feed->slot.data, 7, block);
        FeedLender(queue).fed(job, *feed);
        Write write = *queue.next(false);
        if (written_first) {
            queue.completed(std::move(write), 0);
        } else {
            CHECK(queue.hash_next(false));
        }
        CHECK(queue.free_bytes() == all - block);
        CHECK(!queue.wait(*job, 0));
        if (written_first) {
            CHECK(queue.hash_next(false));
        } else {
            queue.completed(std::move(write), 0);
        }
        CHECK(queue.free_bytes() == all);
        CHECK(queue.wait(*job, -1));
        const std::vector<std::byte> sevens(block, std::byte{7});
        CHECK(job->digests() == std::vector<Digest>{checksum(sevens.data(), block)});
    }
}

// Two blocks' own extents need no order; the extent that goes through both does.
TEST(an_extent_is_hashed_in_order_and_others_beside_it) {
    const std::vector<Extent> extents{{0, 0, block + 10}, {block + 10, 0, 20}};
    std::vector<std::byte> bytes(2 * block);
    Random random(4);
    for (std::byte &byte : bytes) {
        byte = static_cast<std::byte>(random.between(0, 255));
    }
    const Block first{0, block, 0, 0};
    const Block second{block, block, 0, 0};
    FedChecksums checksums(extents, 2);
    const auto of_first = checksums.parts(first, bytes.data());
    const auto of_second = checksums.parts(second, bytes.data() + block);
    CHECK(of_first.size() == 1 && !of_first[0].continued);
    CHECK(of_second.size() == 2 && of_second[0].continued && !of_second[1].continued);
    CHECK(!checksums.ready(of_second[0]));
    CHECK(checksums.ready(of_second[1]));
    checksums.end(checksums.hash(of_second[1], checksums.begin(of_second[1])));
    CHECK(!checksums.ready(of_second[0]));
    checksums.end(checksums.hash(of_first[0], checksums.begin(of_first[0])));
    CHECK(checksums.ready(of_second[0]));
    checksums.end(checksums.hash(of_second[0], checksums.begin(of_second[0])));
    const std::vector<Digest> whole{checksum(bytes.data(), block + 10), checksum(&bytes[block + 10], 20)};
    CHECK(checksums.values() == whole);
}

} // namespace dsh::test
