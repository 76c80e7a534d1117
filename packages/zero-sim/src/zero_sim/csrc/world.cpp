// Owns the runtime's one lock, the options, and the state of the process.
#include "world.hpp"

#include <pthread.h>

#include <condition_variable>

#include "detector.hpp"

namespace sim {

Site (*capture_site)() = nullptr;
std::string (*describe_site)(Site) = nullptr;

namespace {

std::atomic<bool> g_detecting{true}, g_used{false}, g_forked{false}, g_ending{false};
std::mutex g_ending_mutex;
std::condition_variable g_ending_told;

Machine g_machine;
Options g_options;

// A fork copies one thread: the lock must be free in the child, and streams have no thread there.
void before_fork() { Locked::mutex().lock(); }
void after_fork_in_parent() { Locked::mutex().unlock(); }
void after_fork_in_child() {
  if (g_used) g_forked = true;
  Locked::mutex().unlock();
}

}  // namespace

std::mutex& Locked::mutex() {
  static std::mutex* one = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new std::mutex;
  }();
  return *one;
}

const Machine& machine() { return g_machine; }
void begin_with(const Machine& machine) {
  g_machine = machine;
  g_options = machine.options;
  g_detecting = g_options.races;
}

Options& options_under(const Locked&) { return g_options; }

Options options() {
  Locked locked;
  return options_under(locked);
}

bool detecting() { return g_detecting && !g_forked && !g_ending; }

// Accesses while detection was off are unknown, so records of earlier ones are useless and are dropped.
void set_detecting(const Locked& locked, bool on) {
  if (g_detecting.exchange(on) != on) forget_everything(locked);
}

Site site_of_launch() { return capture_site && !in_stream_thread() && !g_ending ? capture_site() : 0; }
Site site_here() { return detecting() ? site_of_launch() : 0; }

void mark_used() { g_used = true; }
bool forked() { return g_forked; }
bool ending() { return g_ending; }

void refuse_if_forked() {
  if (g_forked)
    throw DeviceError(
        "sim: this process was forked from one that had used a simulated device, whose streams do not survive a fork. "
        "Start it with the 'spawn' or 'forkserver' method.");
}

void pause_until(std::chrono::steady_clock::time_point moment) {
  std::unique_lock<std::mutex> lock(g_ending_mutex);
  g_ending_told.wait_until(lock, moment, [] { return g_ending.load(); });
}

void tell_ending() {
  std::lock_guard<std::mutex> lock(g_ending_mutex);
  g_ending = true;
  g_ending_told.notify_all();
}

}  // namespace sim
