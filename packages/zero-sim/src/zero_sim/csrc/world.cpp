// Owns the runtime's one lock, the options and their environment variables, and the state of the process.
#include "world.hpp"

#include <pthread.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>

#include "detector.hpp"

namespace sim {

Site (*capture_site)() = nullptr;
std::string (*describe_site)(Site) = nullptr;

namespace {

std::atomic<bool> g_detecting{true}, g_used{false}, g_forked{false}, g_ending{false};
std::mutex g_ending_mutex;
std::condition_variable g_ending_told;

int64_t number(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}

Options& stored() {
  static Options one = [] {
    auto options = options_of_environment();
    g_detecting = options.races;
    return options;
  }();
  return one;
}

// A fork copies one thread: the lock must be free in the child, and streams have no thread there.
void before_fork() { Locked::mutex().lock(); }
void after_fork_in_parent() { Locked::mutex().unlock(); }
void after_fork_in_child() {
  if (g_used) g_forked = true;
  Locked::mutex().unlock();
}

}  // namespace

Options options_of_environment() {
  Options options;
  options.races = number("ZERO_SIM_RACES", 1);
  options.strict = number("ZERO_SIM_STRICT", 0);
  options.seed = uint64_t(number("ZERO_SIM_SEED", 0));
  if (const char* text = std::getenv("ZERO_SIM_LATENCY")) {
    long fixed = 0, jitter = 0;
    std::sscanf(text, "%ld:%ld", &fixed, &jitter);
    options.latency_us = fixed;
    options.jitter_us = jitter;
  }
  return options;
}

std::mutex& Locked::mutex() {
  static std::mutex* one = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new std::mutex;
  }();
  return *one;
}

const Machine& machine() {
  static const Machine one{int(number("ZERO_SIM_DEVICES", 2)), size_t(number("ZERO_SIM_MEMORY_GIB", 8)) << 30};
  return one;
}

Options& options_under(const Locked&) { return stored(); }

Options options() {
  Locked locked;
  return options_under(locked);
}

bool detecting() {
  static const bool read = (stored(), true);
  return read && g_detecting && !g_forked && !g_ending;
}

// Accesses made while nobody looked are unknown, so that what is known of earlier ones is worth nothing.
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
