#include "engine.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <unistd.h>

#include "blocks.hpp"

namespace dsh {
namespace {

constexpr std::uint64_t bounce_bytes = 1 << 20;

struct FreeBounce {
    void operator()(std::byte *data) const { std::free(data); }
};

// Write `bytes` at `offset` through an aligned buffer; throws IoError.
void write_through_bounce(File &file, std::string_view bytes, std::uint64_t offset) {
    std::unique_ptr<std::byte, FreeBounce> bounce(
        static_cast<std::byte *>(std::aligned_alloc(file.align(), round_up(bounce_bytes, file.align()))));
    if (!bounce) {
        throw std::bad_alloc();
    }
    for (std::uint64_t at = 0; at < bytes.size();) {
        const std::uint64_t nbytes = std::min<std::uint64_t>(bounce_bytes, bytes.size() - at);
        std::memcpy(bounce.get(), bytes.data() + at, nbytes);
        const int code = file.write(bounce.get(), offset + at, nbytes);
        if (code != 0) {
            throw IoError("write of " + std::to_string(nbytes) + " bytes", file.path(), offset + at, code);
        }
        at += nbytes;
    }
}

} // namespace

Engine::Engine(std::string backend, std::uint64_t budget_bytes, std::uint64_t block_bytes, std::size_t depth,
               std::shared_ptr<Faults> faults)
    : backend_name_(std::move(backend)), budget_bytes_(budget_bytes), faults_(std::move(faults)), owner_(getpid()) {
    if (backend_name_ != "io_uring" && backend_name_ != "posix") {
        throw std::invalid_argument("backend must be \"io_uring\" or \"posix\", not \"" + backend_name_ + "\"");
    }
    if (block_bytes == 0 || block_bytes % 4096 != 0 || depth == 0) {
        throw std::invalid_argument("block_bytes must be a positive multiple of 4096 and depth positive, not " +
                                    std::to_string(block_bytes) + " and " + std::to_string(depth));
    }
    queue_ = std::make_unique<WriteQueue>(budget_bytes, block_bytes);
    backend_ = backend_name_ == "io_uring" ? make_uring_backend(*queue_, depth) : make_posix_backend(*queue_, depth);
    registered_ = backend_->registered();
}

Engine::~Engine() {
    if (owner_ != getpid()) {
        // The threads exist in the parent only: joining them here would wait for ever.
        static_cast<void>(backend_.release());
        static_cast<void>(queue_.release());
        return;
    }
    close();
}

void Engine::close() {
    if (closed_) {
        return;
    }
    require_here();
    closed_ = true;
    queue_->stop();
    backend_.reset();
}

void Engine::require_here() const {
    if (owner_ != getpid()) {
        throw std::runtime_error("this engine belongs to process " + std::to_string(owner_) +
                                 " and can't be used after fork in process " + std::to_string(getpid()) +
                                 ": make a new one here");
    }
}

std::shared_ptr<WriteJob> Engine::start(std::shared_ptr<const WritePlan> plan, std::string path) {
    require_here();
    if (closed_) {
        throw std::runtime_error("the engine is closed: nothing was written to " + path);
    }
    return queue_->start(std::move(plan), std::move(path), faults_);
}

double Engine::release(const std::shared_ptr<WriteJob> &job) {
    require_here();
    return queue_->release(job);
}

bool Engine::released(const WriteJob &job) { return queue_->released(job); }

bool Engine::wait(const WriteJob &job, double timeout_s) {
    require_here();
    return queue_->wait(job, timeout_s);
}

const std::vector<Digest> &Engine::digests(const WriteJob &job) {
    queue_->require_written(job);
    return job.digests();
}

std::uint64_t Engine::finish(WriteJob &job, std::string_view header, std::string_view tail) {
    queue_->require_written(job);
    const WritePlan &plan = job.plan();
    if (header.size() != plan.data_start() || tail.size() % plan.align() != 0) {
        throw std::invalid_argument("the header must have " + std::to_string(plan.data_start()) + " bytes, not " +
                                    std::to_string(header.size()) + ", and the tail a multiple of " +
                                    std::to_string(plan.align()) + ", not " + std::to_string(tail.size()));
    }
    write_through_bounce(job.file(), tail, plan.data_end());
    write_through_bounce(job.file(), header, 0);
    const std::uint64_t nbytes = plan.data_end() + tail.size();
    job.file().seal(nbytes);
    return nbytes;
}

void Engine::abort(const std::shared_ptr<WriteJob> &job) {
    if (owner_ != getpid()) {
        return;
    }
    queue_->fail(job, IoError("abort", job->file().path(), 0, ECANCELED));
    job->file().discard();
}

WriteStats Engine::stats(WriteJob &job) { return queue_->stats(job); }

std::uint64_t Engine::free_bytes() { return queue_->free_bytes(); }

} // namespace dsh
