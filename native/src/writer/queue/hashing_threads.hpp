// The threads that hash what the device reads from a training's memory, and fed blocks, so that neither a feeder nor
// the thread that writes has to.
//
// They begin with the first file and end with the queue. None takes the GIL.
#pragma once

#include <thread>
#include <vector>

#include "writer/queue/queue.hpp"

namespace dsh {

class HashingThreads {
  public:
    // Throws std::system_error when the host gives not one thread.
    explicit HashingThreads(WriteQueue &queue);

  private:
    std::vector<std::jthread> threads_; // joined at the end: they end only when the queue has been stopped
};

} // namespace dsh
