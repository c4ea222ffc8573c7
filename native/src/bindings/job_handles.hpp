// A write job and a feed as Python holds them: each owns the objects that must outlive it, and its destructor aborts or
// gives back what is not finished. In a forked child the destructors leave the parent's files and slots alone.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "writer/writer.hpp"

namespace dsh::bindings {

// A file being written, and the writer that must outlive it.
struct JobHandle {
    std::shared_ptr<Writer> writer;
    std::shared_ptr<WriteJob> job;

    JobHandle(std::shared_ptr<Writer> writer, std::shared_ptr<WriteJob> job)
        : writer(std::move(writer)), job(std::move(job)) {}
    JobHandle(JobHandle &&) = default;
    ~JobHandle() {
        if (job) {
            writer->abandon(job);
        }
    }
};

// Bytes on their way behind the planned ones of a file.
struct AppendixHandle {
    std::shared_ptr<Writer> writer;
    std::unique_ptr<Appendix> appendix;
};

// A slot on loan to a feeder. It holds the writer, and with it the slot's memory.
struct FeedHandle {
    std::shared_ptr<Writer> writer;
    std::shared_ptr<WriteJob> job;
    std::optional<Feed> feed; // none once it is fed

    FeedHandle(const JobHandle &owner, Feed feed) : writer(owner.writer), job(owner.job), feed(feed) {}
    FeedHandle(FeedHandle &&other) noexcept
        : writer(std::move(other.writer)), job(std::move(other.job)), feed(std::exchange(other.feed, std::nullopt)) {}
    ~FeedHandle() {
        if (feed) {
            writer->drop(job, *feed);
        }
    }

    // Throws std::logic_error once it is fed.
    const Feed &held() const {
        if (!feed) {
            throw std::logic_error("this block of " + job->path() + " is fed already");
        }
        return *feed;
    }
};

} // namespace dsh::bindings
