// State that all parts of the runtime share: one lock, the options, and whether this process may use its devices.
#pragma once

#include <atomic>
#include <mutex>

#include "runtime.hpp"

namespace sim {

// Proof that the runtime's lock is held. All bookkeeping happens under this one lock: never a kernel, never a wait, and
// never a call to torch or Python, which could want the GIL while its owner wants this lock.
class Locked {
 public:
  Locked() : guard_(mutex()) {}
  static std::mutex& mutex();

 private:
  std::lock_guard<std::mutex> guard_;
};

struct Machine {  // the process's initial configuration; `devices` and `memory` never change
  int devices = 2;
  size_t memory = size_t(8) << 30;  // bytes a device
  Options options = {};
};
const Machine& machine();
void begin_with(const Machine&);  // before anything else is called

Options& options_under(const Locked&);
bool detecting();  // races are looked for; asked without the lock
void set_detecting(const Locked&, bool);
Site site_of_launch();  // never under the lock; also where nobody looks for races, for the error of a kernel
Site site_here();       // the same, and 0 where nobody looks for races

// A device that has been used does not survive a fork, and nothing new begins while the process ends.
void mark_used();
bool forked();
bool ending();
void tell_ending();
void refuse_if_forked();  // throws DeviceError
// Sleeps in a stream's thread, and returns at once when the process ends.
void pause_until(std::chrono::steady_clock::time_point);

}  // namespace sim
