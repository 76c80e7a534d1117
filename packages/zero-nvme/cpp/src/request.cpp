#include "zero_nvme/request.hpp"

namespace zero_nvme {

bool Gate::try_enter() {
  std::lock_guard lock(mutex_);
  if (count_ >= limit_) return false;
  ++count_;
  return true;
}

void Gate::leave(std::atomic<bool>& done) noexcept {
  std::lock_guard lock(mutex_);
  done.store(true, std::memory_order_release);
  const bool was_full = count_-- == limit_;
  if (was_full || count_ == 0) changed_.notify_all();  // wakes wait_for_room and wait_for_empty
}

bool Gate::wait_for_room(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return count_ < limit_; });
}

bool Gate::wait_for_empty(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return count_ == 0; });
}

std::size_t Gate::inside() const {
  std::lock_guard lock(mutex_);
  return count_;
}

Request::Request(std::size_t nbytes, std::shared_ptr<Gate> gate)
    : nbytes_(nbytes), gate_(std::move(gate)), remaining_(nbytes) {
  if (nbytes == 0) complete();
}

void Request::finish(std::size_t nbytes) noexcept {
  if (remaining_.fetch_sub(nbytes, std::memory_order_acq_rel) == nbytes) complete();
}

void Request::skip(std::size_t nbytes) noexcept {
  skipped_.fetch_add(nbytes, std::memory_order_acq_rel);
  finish(nbytes);
}

void Request::fail(const Failure& failure) noexcept {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = failure;
  dropped_.store(true, std::memory_order_release);
}

// Sets `done_` and frees the room at once, under the gate's lock: a thread that sees done() finds the room free, and
// one that sees the gate empty finds every request done. Then wakes waiters, under the request's own lock.
void Request::complete() noexcept {
  gate_->leave(done_);
  decltype(notified_) notified;
  {
    std::lock_guard lock(mutex_);
    notified.swap(notified_);
    completed_.notify_all();
  }
  for (const auto& [mailbox, token] : notified) mailbox->post(token);
}

bool Request::wait_for(std::chrono::milliseconds timeout) {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return completed_.wait_for(lock, timeout, [this] { return done(); });
}

void Request::notify(std::shared_ptr<Mailbox> mailbox, std::uint64_t token) {
  {
    std::lock_guard lock(mutex_);
    if (!done()) {
      for (const auto& known : notified_) {
        if (known.first == mailbox && known.second == token) return;
      }
      notified_.emplace_back(std::move(mailbox), token);
      return;
    }
  }
  mailbox->post(token);
}

void Request::cancel() noexcept {
  cancelled_.store(true, std::memory_order_release);
  dropped_.store(true, std::memory_order_release);
}

std::optional<Failure> Request::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace zero_nvme
