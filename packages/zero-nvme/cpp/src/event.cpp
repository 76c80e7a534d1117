#include "zero_nvme/event.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace zero_nvme {

void leave_signals_to_others() noexcept {
  sigset_t blocked;
  ::sigfillset(&blocked);
  for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) ::sigdelset(&blocked, own);
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
}

Event::Event(bool nonblocking) : fd_(::eventfd(0, EFD_CLOEXEC | (nonblocking ? EFD_NONBLOCK : 0))) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Event::~Event() { close(); }

void Event::signal() const noexcept {
  const std::uint64_t one = 1;
  while (::write(fd_, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

void Event::clear() const noexcept {
  std::uint64_t count;
  while (::read(fd_, &count, sizeof count) < 0 && errno == EINTR) {
  }
}

bool Event::wait_for(int milliseconds) const noexcept {
  pollfd entry{fd_, POLLIN, 0};
  return ::poll(&entry, 1, milliseconds) > 0;
}

void Event::close() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void Mailbox::post(std::uint64_t token) {
  {
    std::lock_guard lock(mutex_);
    tokens_.push_back(token);
  }
  event_.signal();
}

std::vector<std::uint64_t> Mailbox::take() {
  event_.clear();
  std::vector<std::uint64_t> tokens;
  std::lock_guard lock(mutex_);
  tokens.swap(tokens_);
  return tokens;
}

}  // namespace zero_nvme
