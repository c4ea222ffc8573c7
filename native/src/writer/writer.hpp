// The writer as its users see it: a queue, a backend, and the end of both.
//
// After fork the threads exist only in the parent, while the child has a copy of the queue whose mutex may be locked
// for ever. Every call in the child therefore throws before it touches a lock, and the destructor there lets go of
// queue and backend without joining or unmapping anything; the files stay the parent's.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <sys/types.h>

#include "writer/appendix.hpp"
#include "writer/backends/backend.hpp"
#include "writer/file/faults.hpp"
#include "writer/queue/hashing_threads.hpp"
#include "writer/queue/queue.hpp"

namespace dsh {

class Writer : public std::enable_shared_from_this<Writer> {
  public:
    Writer(std::string backend, std::uint64_t budget_bytes, std::uint64_t block_bytes, std::size_t depth,
           std::shared_ptr<Faults> faults);
    // Closes; in a forked child it leaks what it can't end there.
    ~Writer();
    Writer(const Writer &) = delete;
    Writer &operator=(const Writer &) = delete;

    std::shared_ptr<WriteJob> start(std::shared_ptr<const WritePlan> plan, std::string path,
                                    const CheckInterrupt &interrupt = {});
    double release(const std::shared_ptr<WriteJob> &job, const CheckInterrupt &interrupt = {});
    bool released(const WriteJob &job);
    bool wait(const WriteJob &job, double timeout_s);
    std::vector<Digest> digests(const WriteJob &job);
    // Extents of these sizes behind all that the job's file has so far; one appendix at a time.
    std::unique_ptr<Appendix> append(std::shared_ptr<WriteJob> job, std::vector<std::uint64_t> sizes);
    void add(Appendix &appendix, std::uint64_t address, std::uint64_t nbytes);
    std::vector<Digest> end(Appendix &appendix);
    std::uint64_t finish(WriteJob &job, std::string_view header, std::string_view trailer);
    // Fail the job, wait for what is in flight, remove the file. Does nothing to a finished job.
    void abort(const std::shared_ptr<WriteJob> &job);
    // The same for destructors: in a forked child it leaves the parent's file alone.
    void abandon(const std::shared_ptr<WriteJob> &job) noexcept;
    std::optional<Feed> feed_next(const std::shared_ptr<WriteJob> &job);
    void fed(const std::shared_ptr<WriteJob> &job, const Feed &feed);
    // Give a fed block back unfilled, for destructors: in a forked child it does nothing.
    void drop(const std::shared_ptr<WriteJob> &job, const Feed &feed) noexcept;
    WriteStats stats(WriteJob &job);
    std::uint64_t free_bytes();
    // Fails what is not prepared yet, waits for what is queued and in flight. Idempotent, from any thread.
    void close();

    const std::string &backend_name() const { return backend_name_; }
    std::uint64_t budget_bytes() const { return budget_bytes_; }
    std::uint64_t block_bytes() const { return block_bytes_; }
    std::size_t depth() const { return depth_; }
    // The staging memory, budget_bytes long; null once the writer is closed and no slot is lent.
    const std::byte *staging() const { return queue_->staging().data(); }
    bool registered() const { return registered_; }

  private:
    void require_here() const;

    std::string backend_name_;
    std::uint64_t budget_bytes_;
    std::uint64_t block_bytes_;
    std::size_t depth_;
    std::shared_ptr<Faults> faults_;
    pid_t owner_;
    std::mutex closing_;
    bool registered_ = false;
    std::unique_ptr<WriteQueue> queue_;
    std::unique_ptr<Backend> backend_;
    std::unique_ptr<HashingThreads> hashing_; // none before the first file
};

} // namespace dsh
