// Wakes threads: an eventfd with an owner, for I/O threads, and a mailbox with an eventfd, for event loops. Neither is
// for signals.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

namespace zero_nvme {

// The calling thread takes no signals that are meant for the process: their handlers run on the program's own threads.
void leave_signals_to_others() noexcept;

class Event {
 public:
  explicit Event(bool nonblocking);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  int fd() const noexcept { return fd_; }
  void signal() const noexcept;
  void clear() const noexcept;  // blocks until signalled, unless nonblocking
  bool wait_for(int milliseconds) const noexcept;
  void close() noexcept;

 private:
  int fd_;
};

// Collects the tokens of completed requests. Lets one thread wait for many requests, each registered with a token.
class Mailbox {
 public:
  Mailbox() : event_(true) {}
  int fd() const noexcept { return event_.fd(); }  // readable while there is something to take
  void post(std::uint64_t token);
  std::vector<std::uint64_t> take();
  bool wait_for(int milliseconds) const noexcept { return event_.wait_for(milliseconds); }

 private:
  Event event_;
  std::mutex mutex_;
  std::vector<std::uint64_t> tokens_;
};

}  // namespace zero_nvme
