// An eventfd with an owner: what wakes I/O threads and event loops.
#pragma once

#include <cstdint>

namespace zero_nvme {

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

}  // namespace zero_nvme
