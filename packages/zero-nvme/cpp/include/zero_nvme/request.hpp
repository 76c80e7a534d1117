// One request of the caller: counts its bytes down, keeps its first error, wakes its waiters. The bindings keep the
// caller's memory alive, not the request.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "zero_nvme/event.hpp"

namespace zero_nvme {

// The first thing that went wrong with a request.
struct Failure {
  int code;              // errno; ENODATA: the file ends before the range does
  std::uint32_t path;    // index of the path
  std::uint64_t offset;  // in that path's file
  std::size_t wanted;    // bytes of the block that failed
  std::size_t got;       // of these, before it failed
};

// Counts requests that are not complete: back-pressure and drain. Outlives its store through shared_ptr.
class Gate {
 public:
  explicit Gate(std::size_t limit) : limit_(limit) {}
  bool try_enter();
  void leave(std::atomic<bool>& done) noexcept;  // sets `done` in the same moment: see Request::complete
  bool wait_for_room(std::chrono::milliseconds timeout);
  bool wait_for_empty(std::chrono::milliseconds timeout);
  std::size_t inside() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t count_ = 0;
  const std::size_t limit_;
};

class Request {
 public:
  // The caller has entered the gate; the request leaves it when it completes.
  Request(std::size_t nbytes, std::shared_ptr<Gate> gate);

  // -- the I/O threads' side
  void finish(std::size_t nbytes) noexcept;  // counts `nbytes` of it as settled, moved or failed
  void skip(std::size_t nbytes) noexcept;    // the same, for bytes that were never started
  void fail(const Failure& failure) noexcept;
  bool dropped() const noexcept { return dropped_.load(std::memory_order_acquire); }  // start no more of it

  // -- the caller's side
  std::size_t nbytes() const noexcept { return nbytes_; }
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  bool wait_for(std::chrono::milliseconds timeout);
  void notify(std::shared_ptr<Mailbox> mailbox, std::uint64_t token);  // post it on completion; at once if complete
  void cancel() noexcept;                     // drops its unstarted bytes; completes once the others have
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_acquire); }
  std::size_t skipped() const noexcept { return skipped_.load(std::memory_order_acquire); }
  std::optional<Failure> failure() const;

 private:
  void complete() noexcept;

  const std::size_t nbytes_;
  const std::shared_ptr<Gate> gate_;
  std::atomic<std::size_t> remaining_;
  std::atomic<std::size_t> skipped_{0};
  std::atomic<bool> dropped_{false}, cancelled_{false}, done_{false};
  mutable std::mutex mutex_;
  std::condition_variable completed_;
  std::optional<Failure> failure_;
  std::vector<std::pair<std::shared_ptr<Mailbox>, std::uint64_t>> notified_;
};

}  // namespace zero_nvme
