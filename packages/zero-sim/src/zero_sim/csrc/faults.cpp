// Tells what went wrong when the host touches device memory, before the process dies of it.
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "runtime.hpp"

namespace sim {
namespace {

struct sigaction g_former;

// Safe in a signal handler: no allocation, no formatting library.
char* put(char* at, const char* text) {
  const size_t length = std::strlen(text);
  std::memcpy(at, text, length);
  return at + length;
}
char* put_number(char* at, uintptr_t number, unsigned base) {
  char digits[32];
  int count = 0;
  do digits[count++] = "0123456789abcdef"[number % base];
  while (number /= base);
  while (count) *at++ = digits[--count];
  return at;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  if (info->si_code > 0 && is_device(info->si_addr)) {
    char line[200];
    char* at = put(line, in_stream_thread() ? "sim: a kernel used the host's address of device memory of sim:"
                                            : "sim: the host touched device memory of sim:");
    at = put_number(at, uintptr_t(device_of_pointer(info->si_addr)), 10);
    at = put(at, " at address 0x");
    at = put_number(at, uintptr_t(info->si_addr), 16);
    at = put(at, ". Copy it to the host first.\n");
    if (write(2, line, size_t(at - line)) < 0) return;
  }
  if (g_former.sa_flags & SA_SIGINFO && g_former.sa_sigaction) {
    g_former.sa_sigaction(signal, info, context);
  } else if (g_former.sa_handler != SIG_DFL && g_former.sa_handler != SIG_IGN) {
    g_former.sa_handler(signal);
  } else {  // back to the instruction, which faults again and ends the process
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    sigaction(signal, &standard, nullptr);
    if (info->si_code <= 0) raise(signal);
  }
}

}  // namespace

void install_fault_handler() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault) return;
  g_former = now;
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace sim
