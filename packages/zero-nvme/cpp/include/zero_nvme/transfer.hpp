// What a backend is given and what it gives back. No policy, no Python, no torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace zero_nvme {

enum class Op : std::uint8_t { read = 0, write = 1 };

// One read or write of one contiguous range, as the kernel sees it. The owner keeps it in place until it comes
// back in a Completion.
struct Transfer {
  Op op = Op::read;
  int fd = -1;
  char* address = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t offset = 0;
};

struct Completion {
  Transfer* transfer;
  std::int64_t result;  // bytes moved, or -errno
};

// A way to have transfers done. All but wake() is called from one thread, the path's I/O thread; the constructor
// may run elsewhere. Constructors throw std::system_error naming the call.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual void begin() {}
  // Nothing is in flight any more: gives back what the kernel holds of the file, now and not some time later.
  virtual void end() {}
  // Takes a transfer; it may be handed to the kernel as late as the next wait(). At most `depth` at a time.
  virtual void start(Transfer* transfer) = 0;
  // Hands over what was started, blocks until something completed or wake() was called, appends completions.
  virtual void wait(std::vector<Completion>& completed) = 0;
  // Makes the current or the next wait() return. From any thread.
  virtual void wake() = 0;
  virtual bool registered_file() const { return false; }
  // The process forked: close what is the child's copy, join nothing.
  virtual void close_in_child() noexcept {}
};

std::unique_ptr<Backend> make_uring_backend(int fd, unsigned depth);
std::unique_ptr<Backend> make_aio_backend(unsigned depth);
std::unique_ptr<Backend> make_threads_backend(unsigned threads);

}  // namespace zero_nvme
