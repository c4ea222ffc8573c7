// The write queue step by step and under threads. The sanitizers see every read of live bytes after the barrier.

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <thread>

#include "base/memory/aligned_memory.hpp"
#include "failing_calls.hpp"
#include "harness.hpp"
#include "writer/memory_device.hpp"
#include "writer/several_trainings.hpp"
#include "writer/writer.hpp"

namespace dsh::test {
namespace {

constexpr std::uint64_t page = 4096;
constexpr std::uint64_t block = 256 << 10;

struct Source {
    std::unique_ptr<std::byte, decltype(&std::free)> memory;
    std::uint64_t nbytes;
    std::shared_ptr<const WritePlan> plan;

    void fill(std::uint64_t seed) const {
        Random random(seed);
        for (std::uint64_t at = 0; at + 8 <= nbytes; at += 8) {
            const std::uint64_t word = random.between(0, ~std::uint64_t{0});
            std::memcpy(memory.get() + at, &word, 8);
        }
    }

    std::vector<std::byte> image() const {
        std::vector<std::byte> bytes(plan->data_end());
        for (const Extent &extent : plan->extents()) {
            std::memcpy(bytes.data() + extent.offset, reinterpret_cast<const void *>(extent.address), extent.nbytes);
        }
        return bytes;
    }

    std::vector<Digest> digests() const {
        std::vector<Digest> result;
        for (const Extent &extent : plan->extents()) {
            result.push_back(checksum(reinterpret_cast<const void *>(extent.address), extent.nbytes));
        }
        return result;
    }
};

// A long run that may go direct, after some pieces that may not; `eager` of the pieces are eager.
Source source(std::size_t count, std::size_t eager, std::uint64_t run_bytes, bool congruent) {
    const std::uint64_t nbytes = round_up(count * 5000 + run_bytes + 3 * page, page);
    Source result{{static_cast<std::byte *>(std::aligned_alloc(page, nbytes)), std::free}, nbytes, nullptr};
    const auto base = reinterpret_cast<std::uint64_t>(result.memory.get());
    std::vector<Extent> extents;
    std::uint64_t at = page;
    for (std::size_t i = 0; i < count; ++i, at += 5000) {
        extents.push_back({at, base + at + 1, 4000 + i});
    }
    extents.push_back({at, base + at + (congruent ? 0 : 7), run_bytes});
    const std::uint64_t end = round_up(at + run_bytes, page);
    result.plan = std::make_shared<WritePlan>(std::move(extents), eager, 0, page, end, page);
    return result;
}

std::string file_name(const std::string &name) { return scratch() / name; }

// Several trainings write through one queue, overwrite their state at once after the barrier, and look at what was
// written.
void train(WriteQueue &queue, MemoryDevice &device, std::uint64_t seed, bool fails) {
    Random random(seed);
    for (int turn = 0; turn < 8; ++turn) {
        const std::size_t count = random.between(0, 6);
        const Source state = source(count, random.between(0, count), random.between(1, 8 * block), random.coin());
        state.fill(seed + static_cast<std::uint64_t>(turn));
        const auto want = state.image();
        const auto digests = state.digests();
        const auto job = queue.start(state.plan, file_name(std::to_string(seed) + "-" + std::to_string(turn)), nullptr);
        if (random.coin()) {
            std::this_thread::yield();
        }
        queue.release(job);
        CHECK(queue.released(*job));
        std::memset(state.memory.get(), 0xee, state.nbytes);
        bool failed = false;
        try {
            CHECK(queue.wait(*job, -1));
        } catch (const IoError &) {
            failed = true;
        }
        const auto got = device.take_image(job.get());
        CHECK(failed ? fails : got == want && job->digests() == digests);
        queue.fail(job, IoError("abort", job->path(), 0, ECANCELED));
        job->discard();
    }
}

void write_with(const std::string &backend) {
    Writer writer(backend, StagingPool::least_bytes(block) + 4 * block, block, 4, nullptr);
    for (std::uint64_t turn = 0; turn < 6; ++turn) {
        const Source state = source(turn, turn / 2, 16 * block, turn % 2 == 0);
        state.fill(turn);
        auto want = state.image();
        const auto digests = state.digests();
        const std::string path = file_name(backend + std::to_string(turn));
        const auto job = writer.start(state.plan, path);
        writer.release(job);
        std::memset(state.memory.get(), 0xee, state.nbytes);
        CHECK(writer.wait(*job, -1));
        CHECK(writer.digests(*job) == digests);
        const std::string header(page, 'h');
        const std::string trailer(page, 't');
        CHECK(writer.finish(*job, header, trailer) == want.size() + page);
        std::memset(want.data(), 'h', page);
        want.insert(want.end(), page, std::byte{'t'});
        std::ifstream file(path, std::ios::binary);
        std::vector<std::byte> got(want.size());
        file.read(reinterpret_cast<char *>(got.data()), static_cast<std::streamsize>(got.size()));
        CHECK(got == want);
    }
}

} // namespace

TEST(the_barrier_waits_for_what_the_device_still_reads) {
    WriteQueue queue(StagingPool::least_bytes(block) + 8 * block, block);
    const Source state = source(0, 0, 6 * block, true);
    const auto job = queue.start(state.plan, file_name("barrier"), nullptr);
    std::vector<Write> live;
    live.push_back(*queue.next(false));
    CHECK(!live.front().slot);
    std::atomic<bool> answered = false;
    std::atomic<bool> returned_after_answer = false;
    std::atomic<bool> returned = false;
    std::jthread barrier([&] {
        queue.release(job);
        returned_after_answer = answered.load();
        returned = true;
    });
    for (int i = 1; i < 6; ++i) {
        Write write = *queue.next(true);
        if (write.slot) {
            queue.completed(std::move(write), 0);
        } else {
            live.push_back(std::move(write));
        }
    }
    for (int i = 0; i < 100 && !returned; ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    CHECK(!queue.released(*job));
    answered = true;
    for (Write &write : live) {
        queue.completed(std::move(write), 0);
    }
    barrier.join();
    CHECK(returned_after_answer);
    CHECK(queue.released(*job));
    CHECK(queue.wait(*job, -1));
}

TEST(the_barrier_hashes_what_no_thread_has_hashed) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    const Source state = source(3, 1, 40 << 20, true);
    state.fill(1);
    const auto digests = state.digests();
    const auto job = queue.start(state.plan, file_name("hashes"), nullptr);
    CHECK(queue.hash_next(false)); // a part of the run, whose one extent is longer than a turn
    while (auto write = queue.next(false)) {
        queue.completed(std::move(*write), 0);
    }
    CHECK(job->prepared());
    CHECK(!queue.released(*job));
    CHECK(!queue.wait(*job, 0));
    queue.release(job);
    CHECK(queue.released(*job));
    std::memset(state.memory.get(), 0xee, state.nbytes);
    CHECK(queue.wait(*job, -1));
    CHECK(job->digests() == digests);
    CHECK(!queue.hash_next(false));
}

TEST(a_failed_job_is_not_hashed_any_more) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    const Source state = source(0, 0, 40 << 20, true);
    const auto job = queue.start(state.plan, file_name("failed"), nullptr);
    queue.stop();
    CHECK(job->settled());
    CHECK(!queue.hash_next(false));
}

TEST(fed_parts_do_not_wait_until_all_live_memory_is_hashed) {
    constexpr std::uint64_t run_bytes = 60 << 20;
    WriteQueue queue(StagingPool::least_bytes(block) + 4 * block, block);
    const AlignedMemory memory = aligned_memory(page, run_bytes);
    std::memset(memory.get(), 5, run_bytes);
    const std::uint64_t fed_at = page + run_bytes;
    std::vector<Extent> extents = {{page, reinterpret_cast<std::uint64_t>(memory.get()), run_bytes}, {fed_at, 0, page}};
    const auto plan = std::make_shared<WritePlan>(std::move(extents), 0, 1, page, fed_at + page, page);
    const auto job = queue.start(plan, file_name("both"), nullptr);
    FeedLender feeder(queue);
    const auto feed = feeder.next(job);
    std::memset(feed->slot.data, 6, page);
    feeder.fed(job, *feed);
    job->releasing = true;
    CHECK(queue.hash_next(false));
    CHECK(job->unhashed == 1); // a barrier goes first
    job->releasing = false;
    CHECK(queue.hash_next(false) && queue.hash_next(false));
    CHECK(job->unhashed == 0);
    CHECK(job->live_unhashed == 1);
    while (auto write = queue.next(false)) {
        queue.completed(std::move(*write), 0);
    }
    while (queue.hash_next(false)) {
    }
    CHECK(queue.wait(*job, -1));
    CHECK(job->digests() == (std::vector<Digest>{checksum(memory.get(), run_bytes), checksum(feed->slot.data, page)}));
    queue.release(job);
}

TEST(memory_that_the_device_finds_gone_is_named) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    constexpr std::uint64_t mebi = 1 << 20;
    auto *memory =
        static_cast<std::byte *>(mmap(nullptr, 2 * mebi, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0));
    const auto base = reinterpret_cast<std::uint64_t>(memory);
    // Extents of half a block lie in memory as in the file, so that a block is read from two of them.
    std::vector<Extent> extents;
    for (std::uint64_t at = 0; at < 2 * mebi; at += block / 2) {
        extents.push_back({page + at, base + at, block / 2});
    }
    const auto plan = std::make_shared<WritePlan>(std::move(extents), 0, 0, page, page + 2 * mebi, page);
    const auto job = queue.start(plan, file_name("gone"), nullptr);
    munmap(memory + mebi + block / 2, block / 2); // extent 9, the second one of its block
    while (auto write = queue.next(false)) {
        const bool gone = write->offset == page + mebi;
        queue.completed(std::move(*write), gone ? EFAULT : 0);
    }
    try {
        queue.wait(*job, -1);
        CHECK(!"the job has not failed");
    } catch (const IoError &error) {
        CHECK(std::string(error.what()).find("extent 9,") != std::string::npos);
    }
    munmap(memory, mebi + block / 2);
    munmap(memory + mebi + block, mebi - block);
}

TEST(a_thread_without_memory_for_hashing_fails_the_job) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    const Source state = source(0, 0, 40 << 20, true);
    const auto job = queue.start(state.plan, file_name("poor"), nullptr);
    bool hashed = false;
    std::jthread([&] { // a new thread, which has no buffer yet
        failing_mmap.fail(ENOMEM, 1);
        hashed = queue.hash_next(false);
    })
        .join();
    CHECK(hashed);
    CHECK(job->settled());
    try {
        queue.wait(*job, -1);
        CHECK(!"the job has not failed");
    } catch (const IoError &error) {
        CHECK(error.code == ENOMEM);
    }
}

TEST(neighbours_are_hashed_in_portions_of_some_size) {
    constexpr std::uint64_t mebi = 1 << 20;
    constexpr std::size_t count = 48;
    const AlignedMemory memory = aligned_memory(page, count * mebi);
    std::memset(memory.get(), 7, count * mebi);
    std::vector<Extent> extents;
    for (std::size_t i = 0; i < count; ++i) {
        extents.push_back({page + i * mebi, reinterpret_cast<std::uint64_t>(memory.get()) + i * mebi, mebi});
    }
    const std::uint64_t end = page + count * mebi;
    const Cutting how{.align = page, .block_bytes = block, .max_gap_bytes = page, .gathered_extents = 1};
    const std::vector<Block> blocks = cut(extents, page, end, how);
    LiveChecksums checksums(extents, blocks);
    // The first extent is copied, as an eager one.
    checksums.copied(0, 0, memory.get(), mebi);
    auto portions = checksums.portions();
    CHECK(portions.size() == 3);
    for (LiveChecksums::Portion &portion : portions) {
        CHECK(portion.first > 0);
        while (!portion.done()) {
            CHECK(checksums.hash(portion) == 0);
        }
    }
    for (const Digest &digest : checksums.values()) {
        CHECK(digest == checksum(memory.get(), mebi));
    }
}

TEST(a_slot_is_back_only_when_its_write_is_answered) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    const Source state = source(0, 0, 6 * block, false);
    const std::uint64_t all = queue.free_bytes();
    const auto job = queue.start(state.plan, file_name("slots"), nullptr);
    Write first = *queue.next(false);
    Write second = *queue.next(false);
    CHECK(first.data != second.data);
    CHECK(queue.free_bytes() == all - 2 * block);
    CHECK(!queue.next(false));
    queue.completed(std::move(second), 0);
    Write third = *queue.next(false);
    CHECK(third.data != first.data);
    queue.completed(std::move(first), 0);
    queue.completed(std::move(third), 0);
    CHECK(queue.free_bytes() == all);
    CHECK(!queue.wait(*job, 0));
}

TEST(trainings_side_by_side_get_their_own_bytes) { several_trainings({100, 200, 300}, block, false, train); }

TEST(failures_of_some_writes_reach_their_jobs_only) { several_trainings({100, 200, 300}, block, true, train); }

TEST(stop_ends_everything_that_waits) {
    for (std::uint64_t turn = 0; turn < 20; ++turn) {
        WriteQueue queue(StagingPool::least_bytes(block), block);
        const Source state = source(3, 3, 12 * block, turn % 2 == 0);
        std::vector<std::jthread> users;
        {
            MemoryDevice device(queue, 2, false);
            for (int user = 0; user < 3; ++user) {
                users.emplace_back([&, user] {
                    try {
                        const auto job = queue.start(
                            state.plan, file_name("stop" + std::to_string(turn) + "-" + std::to_string(user)), nullptr);
                        queue.release(job);
                        queue.wait(*job, -1);
                    } catch (const std::runtime_error &) {
                        // closed, before or after the start
                    }
                });
            }
            for (std::uint64_t i = 0; i < turn; ++i) {
                std::this_thread::yield();
            }
        }
    }
}

TEST(stop_ends_a_start_that_no_slot_will_come_to) {
    WriteQueue queue(StagingPool::least_bytes(block), block);
    const Source state = source(200, 200, block, false);
    std::shared_ptr<WriteJob> job;
    std::jthread starting([&] { job = queue.start(state.plan, file_name("starting"), nullptr); });
    while (queue.urgent() == 0) {
        std::this_thread::yield();
    }
    queue.stop();
    starting.join();
    CHECK(!queue.next(false));
    try {
        queue.wait(*job, -1);
        CHECK(!"the job has not failed");
    } catch (const IoError &error) {
        CHECK(error.code == ECANCELED);
    }
}

TEST(posix_writes_the_bytes_of_the_barrier) { write_with("posix"); }

TEST(io_uring_writes_the_bytes_of_the_barrier) {
    if (probe_io_uring().empty()) {
        write_with("io_uring");
    }
}

} // namespace dsh::test
