#include "writer/queue/hashing_work.hpp"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <string>
#include <utility>

#include "writer/queue/job.hpp"

namespace dsh {
namespace {

// Run `body` without the mutex, which is held again afterwards; return what went wrong.
template <class Body> std::optional<IoError> without(HashingWork::Lock &lock, const WriteJob &job, Body body) {
    std::optional<IoError> error;
    lock.unlock();
    try {
        body();
    } catch (const IoError &caught) {
        error = caught;
    } catch (const std::exception &caught) {
        // Such as want of memory for the copy that is hashed.
        error = IoError(std::string("hashing: ") + caught.what(), job.path(), 0, ENOMEM);
    }
    lock.lock();
    return error;
}

} // namespace

void HashingWork::add(const std::shared_ptr<WriteJob> &job, std::vector<LiveChecksums::Portion> portions) {
    job->live_unhashed += portions.size();
    for (LiveChecksums::Portion &portion : portions) {
        portions_.push_back({job, std::move(portion)});
    }
    changed_.notify_all();
}

void HashingWork::add(const std::shared_ptr<WriteJob> &job, const FedChecksums::Part &part, const Slot &slot) {
    ++job->unhashed;
    parts_.push_back({job, part, slot});
    changed_.notify_one();
}

void HashingWork::forget(WriteJob &job) {
    job.live_unhashed -= std::erase_if(portions_, [&](const Portion &one) { return one.job.get() == &job; });
    // Its parts can be taken now, also those whose turn had not come.
    changed_.notify_all();
}

void HashingWork::end() {
    ending_ = true;
    changed_.notify_all();
}

void HashingWork::tell_end() {
    if (ending_ && empty()) {
        changed_.notify_all();
    }
}

std::optional<HashingWork::Item> HashingWork::take() {
    if (auto item = take_portion_if([](const WriteJob &job) { return job.releasing; })) {
        return item;
    }
    const auto any = [](const WriteJob &) { return true; };
    part_is_next_ = !part_is_next_;
    auto item = part_is_next_ ? take_part() : take_portion_if(any);
    if (item) {
        return item;
    }
    return part_is_next_ ? take_portion_if(any) : take_part();
}

std::optional<HashingWork::Item> HashingWork::take_portion(const WriteJob &job) {
    return take_portion_if([&](const WriteJob &other) { return &other == &job; });
}

template <class Wanted> std::optional<HashingWork::Item> HashingWork::take_portion_if(Wanted wanted) {
    const auto found = std::ranges::find_if(portions_, [&](const Portion &one) { return wanted(*one.job); });
    if (found == portions_.end()) {
        return std::nullopt;
    }
    Item item = std::move(*found);
    portions_.erase(found);
    ++held_;
    return item;
}

// The first part whose turn has come; one of a failed job only gives its slot back.
std::optional<HashingWork::Item> HashingWork::take_part() {
    const auto found = std::ranges::find_if(
        parts_, [](const Part &one) { return one.job->error || one.job->fed_checksums().ready(one.part); });
    if (found == parts_.end()) {
        return std::nullopt;
    }
    Item item = std::move(*found);
    parts_.erase(found);
    return item;
}

HashingWork::Turn HashingWork::hash(Item &item, Lock &lock) {
    return std::visit([&](auto &taken) { return hash(taken, lock); }, item);
}

HashingWork::Turn HashingWork::hash(Portion &taken, Lock &lock) {
    WriteJob &job = *taken.job;
    Turn turn;
    if (!job.error) {
        turn.error = without(lock, job, [&] { job.hash(taken.portion); });
    }
    --held_;
    if (!turn.error && !job.error && !taken.portion.done()) {
        portions_.push_front({taken.job, std::move(taken.portion)});
        turn.ended = false;
    } else {
        --job.live_unhashed;
    }
    tell_end();
    return turn;
}

HashingWork::Turn HashingWork::hash(Part &taken, Lock &lock) {
    WriteJob &job = *taken.job;
    FedChecksums &checksums = job.fed_checksums();
    Turn turn{.error = {}, .slot = taken.slot};
    if (!job.error) {
        auto before = checksums.begin(taken.part);
        std::optional<FedChecksums::Unfinished> unfinished;
        turn.error = without(lock, job, [&] { unfinished = checksums.hash(taken.part, std::move(before)); });
        checksums.end(std::move(unfinished));
        // The turn of the part that continues an extent may have come.
        changed_.notify_one();
    }
    --job.unhashed;
    tell_end();
    return turn;
}

} // namespace dsh
