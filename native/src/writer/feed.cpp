// The write queue's side for feeders: fed blocks are lent with a slot, and come back filled.

#include <cerrno>
#include <stdexcept>
#include <string>

#include "writer/queue.hpp"

namespace dsh {

std::optional<Feed> WriteQueue::feed_next(const std::shared_ptr<WriteJob> &job) {
    Lock lock(mutex_);
    for (;;) {
        if (job->error) {
            throw *job->error;
        }
        if (job->all_handed_out()) {
            return std::nullopt;
        }
        if (urgent_ == 0) {
            if (const auto slot = staging_.take(job->block(job->next_out).nbytes)) {
                ++job->out;
                return Feed{job->next_out++, *slot};
            }
        }
        if (job->out != 0) {
            return std::nullopt;
        }
        changed_.wait(lock);
    }
}

void WriteQueue::fed(const std::shared_ptr<WriteJob> &job, const Feed &feed) {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return job->error || !job->hashing; });
    if (!job->error && feed.index != job->next_fed) {
        throw std::logic_error("block " + std::to_string(feed.index) + " of " + job->path() + " is fed before block " +
                               std::to_string(job->next_fed) + ": feed them in the order handed out");
    }
    if (!job->error) {
        job->hashing = true;
        lock.unlock();
        job->hash_fed(feed);
        lock.lock();
        job->hashing = false;
    }
    if (job->error) {
        give_back(*job, feed);
        return;
    }
    const Block &block = job->block(feed.index);
    --job->out;
    ++job->next_fed;
    ++job->pending;
    staged_.push_back({job, feed.slot.data, block.offset, block.nbytes, feed.slot});
    changed_.notify_all();
}

void WriteQueue::drop(const std::shared_ptr<WriteJob> &job, const Feed &feed) {
    Lock lock(mutex_);
    fail_locked(*job,
                IoError("drop of a block that was to be fed", job->path(), job->block(feed.index).offset, ECANCELED));
    give_back(*job, feed);
}

void WriteQueue::give_back(WriteJob &job, const Feed &feed) {
    --job.out;
    staging_.give(feed.slot);
    changed_.notify_all();
}

} // namespace dsh
