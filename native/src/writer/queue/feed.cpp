#include "writer/queue/feed.hpp"

#include <cerrno>
#include <mutex>
#include <stdexcept>
#include <string>

#include "writer/queue/queue.hpp"

namespace dsh {

std::optional<Feed> FeedLender::next(const std::shared_ptr<WriteJob> &job) {
    std::unique_lock lock(queue_.mutex_);
    for (;;) {
        if (job->error) {
            throw *job->error;
        }
        if (job->all_lent()) {
            return std::nullopt;
        }
        if (queue_.urgent_ == 0) {
            if (const auto slot = queue_.staging_.take(job->block(job->next_lent).nbytes)) {
                ++job->lent;
                return Feed{job->next_lent++, *slot};
            }
        }
        if (job->lent != 0) {
            return std::nullopt;
        }
        queue_.changed_.wait(lock);
    }
}

void FeedLender::fed(const std::shared_ptr<WriteJob> &job, const Feed &feed) {
    // The slot is still the feeder's own, so no mutex is needed for its bytes.
    job->zero_gaps(feed);
    std::unique_lock lock(queue_.mutex_);
    if (job->error) {
        give_back(*job, feed);
        return;
    }
    if (feed.index != job->next_fed) {
        throw std::logic_error("block " + std::to_string(feed.index) + " of " + job->path() + " is fed before block " +
                               std::to_string(job->next_fed) + ": feed them in the order handed out");
    }
    const Block &block = job->block(feed.index);
    --job->lent;
    ++job->next_fed;
    ++job->pending;
    queue_.staged_.push_back({job, feed.slot.data, block.offset, block.nbytes, feed.slot});
    for (const FedChecksums::Part &part : job->fed_checksums().parts(block, feed.slot.data)) {
        queue_.staging_.share(feed.slot);
        queue_.hashing_.add(job, part, feed.slot);
    }
    queue_.changed_.notify_all();
}

void FeedLender::drop(const std::shared_ptr<WriteJob> &job, const Feed &feed) {
    std::unique_lock lock(queue_.mutex_);
    queue_.fail_locked(
        *job, IoError("drop of a block that was to be fed", job->path(), job->block(feed.index).offset, ECANCELED));
    give_back(*job, feed);
}

void FeedLender::give_back(WriteJob &job, const Feed &feed) {
    --job.lent;
    queue_.staging_.give(feed.slot);
    queue_.changed_.notify_all();
}

} // namespace dsh
