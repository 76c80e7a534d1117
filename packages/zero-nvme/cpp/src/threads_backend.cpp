// pread and pwrite on a few threads: works on any file, any kernel, in any container.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "zero_nvme/backend.hpp"
#include "zero_nvme/event.hpp"

namespace zero_nvme {
namespace {

class ThreadsBackend final : public Backend {
 public:
  explicit ThreadsBackend(unsigned threads) {
    try {
      for (unsigned i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }

  ~ThreadsBackend() override { stop(); }

  void start(Transfer* transfer) override {
    {
      std::lock_guard lock(mutex_);
      queued_.push_back(transfer);
    }
    available_.notify_one();
  }

  void wait(std::vector<Completion>& completed) override {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return woken_ || !done_.empty(); });
    woken_ = false;
    completed.insert(completed.end(), done_.begin(), done_.end());
    done_.clear();
  }

  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    finished_.notify_one();
  }

 private:
  void stop() noexcept {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    available_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  void work() {
    leave_signals_to_others();
    std::unique_lock lock(mutex_);
    for (;;) {
      available_.wait(lock, [this] { return stopping_ || !queued_.empty(); });
      if (queued_.empty()) return;
      Transfer* transfer = queued_.front();
      queued_.pop_front();
      lock.unlock();
      const std::int64_t result = move(*transfer);
      lock.lock();
      done_.push_back({transfer, result});
      finished_.notify_one();
    }
  }

  static std::int64_t move(const Transfer& t) noexcept {
    const auto offset = static_cast<off_t>(t.offset);
    const ssize_t moved = t.op == Op::write ? ::pwrite(t.fd, t.address, t.nbytes, offset)
                                            : ::pread(t.fd, t.address, t.nbytes, offset);
    return moved < 0 ? -errno : moved;
  }

  std::mutex mutex_;
  std::condition_variable available_, finished_;
  std::deque<Transfer*> queued_;
  std::vector<Completion> done_;
  bool woken_ = false, stopping_ = false;
  std::vector<std::thread> workers_;
};

const RegisteredBackend registered("threads", 30, [](const BackendArguments& arguments) -> std::unique_ptr<Backend> {
  return std::make_unique<ThreadsBackend>(arguments.threads);
});

}  // namespace

}  // namespace zero_nvme
