// Wraps one io_uring: its mappings and its three system calls. Not thread-safe. Does not know Transfer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "zero_nvme/uring_abi.hpp"

namespace zero_nvme {

class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t nbytes, std::uint64_t offset);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping& operator=(Mapping&& other) noexcept;

  template <typename T>
  T* at(std::size_t offset) const noexcept {
    return reinterpret_cast<T*>(static_cast<char*>(address_) + offset);
  }

 private:
  void* address_ = nullptr;
  std::size_t nbytes_ = 0;
};

class Ring {
 public:
  // The ring starts disabled, so that the thread that calls enable() becomes its only user (where the kernel has
  // that). Throws std::system_error naming the call.
  explicit Ring(unsigned entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int enable() noexcept;
  unsigned entries() const noexcept { return parameters_.sq_entries; }
  uring::Sqe* next() noexcept;  // cleared; nullptr when the queue is full
  // Submits all that next() gave, waits for `wanted` completions. 0, or -errno with the rest still queued.
  int enter(unsigned wanted) noexcept;
  unsigned queued() const noexcept { return tail_ - sq_head(); }
  // The newest entry that the kernel has not taken is dropped and its user_data given; false: there is none.
  bool drop_queued(std::uint64_t& user_data) noexcept;
  bool reap(uring::Cqe& out) noexcept;
  int call_register(unsigned opcode, const void* argument, unsigned count) noexcept;
  void close() noexcept;

 private:
  unsigned sq_head() const noexcept { return __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); }
  int setup(unsigned entries, unsigned flags) noexcept;

  int fd_ = -1;
  bool disabled_ = false;
  uring::Parameters parameters_{};
  Mapping sq_map_, cq_map_, sqe_map_;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, tail_ = 0;
  uring::Sqe* sqes_ = nullptr;
  uring::Cqe* cqes_ = nullptr;
};

}  // namespace zero_nvme
