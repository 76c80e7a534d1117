// io_uring: one ring to a path, driven by its I/O thread alone. wake() arrives as the completion of a read of an
// eventfd that is always in flight.
#include <cerrno>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

#include "zero_nvme/backend.hpp"
#include "zero_nvme/event.hpp"
#include "zero_nvme/ring.hpp"

namespace zero_nvme {
namespace {

class UringBackend final : public Backend {
 public:
  UringBackend(int fd, unsigned depth) : ring_(depth + 1), wake_event_(false) {
    if (ring_.entries() < depth + 1) throw std::system_error(EINVAL, std::generic_category(), "io_uring_setup: depth");
    registered_file_ = ring_.call_register(uring::kRegisterFiles, &fd, 1) >= 0;
  }

  void begin() override {
    begin_error_ = ring_.enable();
    arm_wake();
  }

  // The kernel tears a closed ring down in the background, and until then a filesystem could not be unmounted.
  void end() override {
    if (registered_file_) ring_.call_register(uring::kUnregisterFiles, nullptr, 0);
  }

  void start(Transfer* transfer) override {
    uring::Sqe* sqe = ring_.next();
    if (sqe == nullptr || begin_error_ < 0) {  // more than `depth` at a time, or a ring that never started
      refused_.push_back({transfer, begin_error_ < 0 ? begin_error_ : -EBUSY});
      return;
    }
    const bool write = transfer->op == Op::write;
    sqe->opcode = write ? uring::kWrite : uring::kRead;
    sqe->flags = registered_file_ ? uring::kFixedFile : 0;
    sqe->fd = registered_file_ ? 0 : transfer->fd;
    sqe->address = reinterpret_cast<std::uint64_t>(transfer->address);
    sqe->length = static_cast<std::uint32_t>(transfer->nbytes);
    sqe->offset = transfer->offset;
    sqe->user_data = reinterpret_cast<std::uint64_t>(transfer);
  }

  void wait(std::vector<Completion>& completed) override {
    if (!refused_.empty()) {
      completed.insert(completed.end(), refused_.begin(), refused_.end());
      refused_.clear();
      return;
    }
    const int error = ring_.enter(1);
    uring::Cqe cqe;
    bool woken = false;
    while (ring_.reap(cqe)) {
      if (cqe.user_data == 0) {
        woken = true;
      } else {
        completed.push_back({reinterpret_cast<Transfer*>(cqe.user_data), cqe.result});
      }
    }
    if (error < 0 && error != -EINTR) woken = survive(error, completed) || woken;
    if (woken) arm_wake();
  }

  void wake() override { wake_event_.signal(); }

  bool registered_file() const override { return registered_file_; }

  void close_in_child() noexcept override {
    ring_.close();
    wake_event_.close();
  }

 private:
  void arm_wake() {
    uring::Sqe* sqe = ring_.next();
    if (sqe == nullptr) return;  // cannot happen: the ring has one entry more than `depth`
    sqe->opcode = uring::kRead;
    sqe->fd = wake_event_.fd();
    sqe->address = reinterpret_cast<std::uint64_t>(&wake_count_);
    sqe->length = sizeof wake_count_;
    sqe->user_data = 0;
  }

  // The kernel was short of memory (for a moment), or refuses for good. Then only the entries that it did not take
  // fail: those that it took are still being moved. True: the read of the eventfd was one of those that failed.
  bool survive(int error, std::vector<Completion>& completed) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (error == -EAGAIN || error == -EBUSY || error == -ENOMEM) return false;
    bool wake_lost = false;
    std::uint64_t dropped;
    while (ring_.drop_queued(dropped)) {
      if (dropped == 0) {
        wake_lost = true;
      } else {
        completed.push_back({reinterpret_cast<Transfer*>(dropped), error});
      }
    }
    return wake_lost;
  }

  Ring ring_;
  Event wake_event_;
  std::uint64_t wake_count_ = 0;
  bool registered_file_ = false;
  int begin_error_ = 0;
  std::vector<Completion> refused_;
};

const RegisteredBackend registered("io_uring", 10, [](const BackendArguments& arguments) -> std::unique_ptr<Backend> {
  return std::make_unique<UringBackend>(arguments.fd, arguments.depth);
});

}  // namespace

}  // namespace zero_nvme
