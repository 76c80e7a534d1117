// A backend for the change test (toy_backend.py): pread and pwrite in the I/O thread itself, one transfer at a time.
#include <unistd.h>

#include <cerrno>

#include "zero_nvme/backend.hpp"
#include "zero_nvme/event.hpp"

namespace zero_nvme {
namespace {

class SyncBackend final : public Backend {
 public:
  void start(Transfer* transfer) override {
    const auto offset = static_cast<off_t>(transfer->offset);
    const ssize_t moved = transfer->op == Op::write
                              ? ::pwrite(transfer->fd, transfer->address, transfer->nbytes, offset)
                              : ::pread(transfer->fd, transfer->address, transfer->nbytes, offset);
    done_.push_back({transfer, moved < 0 ? -errno : moved});
  }

  void wait(std::vector<Completion>& completed) override {
    if (done_.empty()) woken_.clear();
    completed.swap(done_);
  }

  void wake() override { woken_.signal(); }
  void close_in_child() noexcept override { woken_.close(); }

 private:
  Event woken_{false};
  std::vector<Completion> done_;
};

const RegisteredBackend registered("sync", 40, [](const BackendArguments&) -> std::unique_ptr<Backend> {
  return std::make_unique<SyncBackend>();
});

}  // namespace
}  // namespace zero_nvme
