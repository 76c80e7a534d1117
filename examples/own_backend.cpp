// A backend of your own for zero-nvme: pread and pwrite in the I/O thread itself, one transfer at a time.
//
// Put this file into packages/zero-nvme/cpp/src and install the package again; nothing else changes. Every file of that
// folder is compiled, and RegisteredBackend enters its name into the table that Python reads. `nox -s change` does so
// with a copy of the package, and runs the conformance suites on the new backend.
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
