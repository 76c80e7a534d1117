#include "zero_nvme/ring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

namespace zero_nvme {
namespace {

constexpr unsigned kExclusive = uring::kSetupDisabled | uring::kSetupSingleIssuer | uring::kSetupDeferTaskrun;

}  // namespace

Mapping::Mapping(int fd, std::size_t nbytes, std::uint64_t offset) : nbytes_(nbytes) {
  address_ = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (address_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of an io_uring");
  ::madvise(address_, nbytes, MADV_DONTFORK);
}

Mapping::~Mapping() {
  if (address_ != nullptr) ::munmap(address_, nbytes_);
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(address_, other.address_);
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

int Ring::setup(unsigned entries, unsigned flags) noexcept {
  parameters_ = {};
  parameters_.flags = flags | uring::kSetupClamp | uring::kSetupCqSize;
  parameters_.cq_entries = 2 * entries;
  const long fd = ::syscall(uring::kSetup, entries, &parameters_);
  return fd < 0 ? -errno : static_cast<int>(fd);
}

Ring::Ring(unsigned entries) {
  // Completions without interrupting the thread (6.1), or plain (5.6).
  int fd = setup(entries, kExclusive);
  disabled_ = fd != -EINVAL;
  if (!disabled_) fd = setup(entries, 0);
  // A ring just closed gives its locked memory back a little later.
  for (int tries = 0; fd == -ENOMEM && tries < 20; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    fd = setup(entries, disabled_ ? kExclusive : 0);
  }
  if (fd < 0) throw std::system_error(-fd, std::generic_category(), "io_uring_setup");
  fd_ = fd;
  try {
    const auto& p = parameters_;
    const std::size_t sq_bytes = p.sq.array + p.sq_entries * sizeof(unsigned);
    const std::size_t cq_bytes = p.cq.cqes + p.cq_entries * sizeof(uring::Cqe);
    const bool single = p.features & uring::kFeatureSingleMmap;
    sq_map_ = Mapping(fd_, single ? std::max(sq_bytes, cq_bytes) : sq_bytes, uring::kOffsetSqRing);
    if (!single) cq_map_ = Mapping(fd_, cq_bytes, uring::kOffsetCqRing);
    sqe_map_ = Mapping(fd_, p.sq_entries * sizeof(uring::Sqe), uring::kOffsetSqes);
    const Mapping& cq = single ? sq_map_ : cq_map_;
    sq_head_ = sq_map_.at<unsigned>(p.sq.head);
    sq_tail_ = sq_map_.at<unsigned>(p.sq.tail);
    sq_array_ = sq_map_.at<unsigned>(p.sq.array);
    sq_mask_ = *sq_map_.at<unsigned>(p.sq.ring_mask);
    cq_head_ = cq.at<unsigned>(p.cq.head);
    cq_tail_ = cq.at<unsigned>(p.cq.tail);
    cq_mask_ = *cq.at<unsigned>(p.cq.ring_mask);
    cqes_ = cq.at<uring::Cqe>(p.cq.cqes);
    sqes_ = sqe_map_.at<uring::Sqe>(0);
    tail_ = *sq_tail_;
  } catch (...) {
    close();
    throw;
  }
}

Ring::~Ring() { close(); }

void Ring::close() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

int Ring::enable() noexcept {
  return disabled_ ? call_register(uring::kRegisterEnableRings, nullptr, 0) : 0;
}

uring::Sqe* Ring::next() noexcept {
  if (tail_ - sq_head() >= parameters_.sq_entries) return nullptr;
  const unsigned index = tail_ & sq_mask_;
  sq_array_[index] = index;
  ++tail_;
  std::memset(&sqes_[index], 0, sizeof(uring::Sqe));
  return &sqes_[index];
}

int Ring::enter(unsigned wanted) noexcept {
  __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  const long taken = ::syscall(uring::kEnter, fd_, queued(), wanted, uring::kEnterGetEvents, nullptr, 0);
  return taken < 0 ? -errno : 0;
}

// The kernel moves the head, only within enter(); so entries go from the tail.
bool Ring::drop_queued(std::uint64_t& user_data) noexcept {
  if (queued() == 0) return false;
  --tail_;
  user_data = sqes_[tail_ & sq_mask_].user_data;
  __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  return true;
}

bool Ring::reap(uring::Cqe& out) noexcept {
  const unsigned head = *cq_head_;
  if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
  out = cqes_[head & cq_mask_];
  __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

int Ring::call_register(unsigned opcode, const void* argument, unsigned count) noexcept {
  const long result = ::syscall(uring::kRegister, fd_, opcode, argument, count);
  return result < 0 ? -errno : static_cast<int>(result);
}

}  // namespace zero_nvme
