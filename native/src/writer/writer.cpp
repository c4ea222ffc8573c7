#include "writer/writer.hpp"

#include <cerrno>
#include <stdexcept>
#include <unistd.h>

#include "base/files/limits.hpp"

namespace dsh {

Writer::Writer(std::string backend, std::uint64_t budget_bytes, std::uint64_t block_bytes, std::size_t depth,
               std::shared_ptr<Faults> faults)
    : backend_name_(std::move(backend)), budget_bytes_(budget_bytes), block_bytes_(block_bytes), depth_(depth),
      faults_(std::move(faults)), owner_(getpid()) {
    if (backend_name_ != "io_uring" && backend_name_ != "posix") {
        throw std::invalid_argument("backend must be \"io_uring\" or \"posix\", not \"" + backend_name_ + "\"");
    }
    require_limits(block_bytes, depth);
    queue_ = std::make_unique<WriteQueue>(budget_bytes, block_bytes);
    backend_ = backend_name_ == "io_uring" ? make_io_uring_backend(*queue_, depth) : make_posix_backend(*queue_, depth);
    registered_ = backend_->registered();
}

Writer::~Writer() {
    if (owner_ != getpid()) {
        // The threads exist only in the parent: joining them here would wait for ever.
        static_cast<void>(hashing_.release());
        static_cast<void>(backend_.release());
        static_cast<void>(queue_.release());
        return;
    }
    close();
}

void Writer::close() {
    require_here();
    queue_->stop();
    std::lock_guard lock(closing_);
    backend_.reset();
    hashing_.reset();
    // A session that is closed but still held, by a variable or a traceback, must not hold the budget too.
    queue_->drop_staging();
}

void Writer::require_here() const {
    if (owner_ != getpid()) {
        throw std::runtime_error("this writer belongs to process " + std::to_string(owner_) +
                                 " and can't be used after fork in process " + std::to_string(getpid()) +
                                 ": make a new one here");
    }
}

std::shared_ptr<WriteJob> Writer::start(std::shared_ptr<const WritePlan> plan, std::string path,
                                        const CheckInterrupt &interrupt) {
    require_here();
    {
        std::lock_guard lock(closing_);
        if (backend_ && !hashing_) {
            hashing_ = std::make_unique<HashingThreads>(*queue_);
        }
    }
    return queue_->start(std::move(plan), std::move(path), faults_, interrupt);
}

double Writer::release(const std::shared_ptr<WriteJob> &job, const CheckInterrupt &interrupt) {
    require_here();
    return queue_->release(job, interrupt);
}

bool Writer::released(const WriteJob &job) {
    require_here();
    return queue_->released(job);
}

bool Writer::wait(const WriteJob &job, double timeout_s) {
    require_here();
    return queue_->wait(job, timeout_s);
}

std::vector<Digest> Writer::digests(const WriteJob &job) {
    require_here();
    queue_->require_written(job);
    return job.digests();
}

std::unique_ptr<Appendix> Writer::append(std::shared_ptr<WriteJob> job, std::vector<std::uint64_t> sizes) {
    require_here();
    return std::make_unique<Appendix>(std::move(job), std::move(sizes));
}

void Writer::add(Appendix &appendix, std::uint64_t address, std::uint64_t nbytes) {
    require_here();
    appendix.add(address, nbytes);
}

std::vector<Digest> Writer::end(Appendix &appendix) {
    require_here();
    return appendix.end();
}

std::uint64_t Writer::finish(WriteJob &job, std::string_view header, std::string_view trailer) {
    require_here();
    queue_->require_written(job);
    return job.finish(header, trailer);
}

void Writer::abort(const std::shared_ptr<WriteJob> &job) {
    require_here();
    if (job->finished()) {
        return;
    }
    queue_->fail(job, IoError("abort", job->path(), 0, ECANCELED));
    job->discard();
}

void Writer::abandon(const std::shared_ptr<WriteJob> &job) noexcept {
    if (owner_ == getpid()) {
        abort(job);
    }
}

std::optional<Feed> Writer::feed_next(const std::shared_ptr<WriteJob> &job) {
    require_here();
    return FeedLender(*queue_).next(job);
}

void Writer::fed(const std::shared_ptr<WriteJob> &job, const Feed &feed) {
    require_here();
    FeedLender(*queue_).fed(job, feed);
}

void Writer::drop(const std::shared_ptr<WriteJob> &job, const Feed &feed) noexcept {
    if (owner_ == getpid()) {
        FeedLender(*queue_).drop(job, feed);
    }
}

WriteStats Writer::stats(WriteJob &job) {
    require_here();
    return queue_->stats(job);
}

std::uint64_t Writer::free_bytes() {
    require_here();
    return queue_->free_bytes();
}

} // namespace dsh
