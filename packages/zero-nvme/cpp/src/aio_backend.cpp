// Linux native AIO by raw system calls. Completions and wake() both count up one eventfd; wait() sleeps in its read.
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#include "zero_nvme/backend.hpp"
#include "zero_nvme/event.hpp"

namespace zero_nvme {
namespace {

class AioBackend final : public Backend {
 public:
  explicit AioBackend(unsigned depth) : event_(false), control_(depth), events_(depth) {
    if (::syscall(SYS_io_setup, depth, &context_) < 0) {
      throw std::system_error(errno, std::generic_category(), "io_setup");
    }
    timespec none{0, 0};
    // If io_getevents is denied, submitted transfers could never be reaped. EINTR means only that a signal waits.
    if (::syscall(SYS_io_getevents, context_, 0L, 0L, events_.data(), &none) < 0 && errno != EINTR) {
      const int code = errno;
      ::syscall(SYS_io_destroy, context_);
      throw std::system_error(code, std::generic_category(), "io_getevents");
    }
    for (auto& block : control_) free_.push_back(&block);
  }

  ~AioBackend() override {
    if (context_ != 0) ::syscall(SYS_io_destroy, context_);
  }

  void start(Transfer* transfer) override {
    iocb* block = free_.back();
    free_.pop_back();
    *block = {};
    block->aio_data = reinterpret_cast<std::uint64_t>(transfer);
    block->aio_lio_opcode = transfer->op == Op::write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block->aio_fildes = static_cast<std::uint32_t>(transfer->fd);
    block->aio_buf = reinterpret_cast<std::uint64_t>(transfer->address);
    block->aio_nbytes = transfer->nbytes;
    block->aio_offset = static_cast<std::int64_t>(transfer->offset);
    block->aio_flags = IOCB_FLAG_RESFD;
    block->aio_resfd = static_cast<std::uint32_t>(event_.fd());
    queued_.push_back(block);
  }

  void wait(std::vector<Completion>& completed) override {
    submit(completed);
    // Every completion counts the event up before it can be reaped, so sleeping first loses none and saves a call.
    if (completed.empty() && queued_.empty()) event_.clear();
    reap(completed);
  }

  void wake() override { event_.signal(); }
  void close_in_child() noexcept override { event_.close(); }  // the kernel does not give the child the context

 private:
  void submit(std::vector<Completion>& completed) {
    std::size_t first = 0;
    while (first < queued_.size()) {
      const long taken = ::syscall(SYS_io_submit, context_, queued_.size() - first, &queued_[first]);
      if (taken >= 0) {
        in_flight_ += static_cast<std::size_t>(taken);
        first += static_cast<std::size_t>(taken);
      } else if (errno == EAGAIN || errno == EINTR || errno == ENOMEM) {
        // The rest waits for a completion; without any in flight, for the kernel.
        if (in_flight_ == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        break;
      } else {  // it is the first one that is refused
        completed.push_back({transfer_of(queued_[first]->aio_data), -errno});
        free_.push_back(queued_[first]);
        ++first;
      }
    }
    queued_.erase(queued_.begin(), queued_.begin() + static_cast<std::ptrdiff_t>(first));
    if (!queued_.empty() && in_flight_ > 0) {
      event_.clear();
    }
  }

  void reap(std::vector<Completion>& completed) {
    timespec none{0, 0};
    const long count = ::syscall(SYS_io_getevents, context_, 0L, events_.size(), events_.data(), &none);
    for (long i = 0; i < count; ++i) {
      completed.push_back({transfer_of(events_[i].data), events_[i].res});
      free_.push_back(reinterpret_cast<iocb*>(events_[i].obj));
      --in_flight_;
    }
  }

  static Transfer* transfer_of(std::uint64_t data) { return reinterpret_cast<Transfer*>(data); }

  Event event_;
  aio_context_t context_ = 0;
  std::vector<iocb> control_;
  std::vector<io_event> events_;
  std::vector<iocb*> free_, queued_;
  std::size_t in_flight_ = 0;
};

const RegisteredBackend registered("libaio", 20, [](const BackendArguments& arguments) -> std::unique_ptr<Backend> {
  return std::make_unique<AioBackend>(arguments.depth);
});

}  // namespace

}  // namespace zero_nvme
