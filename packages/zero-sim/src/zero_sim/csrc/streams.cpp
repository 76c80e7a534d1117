// Streams and events: a thread for each stream, which runs its queue in order, some time after the work was queued.
#include "streams.hpp"

#include <condition_variable>
#include <deque>
#include <random>
#include <thread>

#include "detector.hpp"

namespace sim {

void (*stream_thread_begins)() = nullptr;

struct EventState {
  std::mutex mutex;
  std::condition_variable told;
  std::atomic<bool> done{false};
  std::chrono::steady_clock::time_point at;
};

namespace {

using Time = std::chrono::steady_clock;
constexpr int POOL = 32;

struct Work {
  std::string what;
  Site site;
  std::function<void()> run;
  Time::time_point not_before;
};

struct Stream {
  std::mutex mutex;
  std::condition_variable given, progress;
  std::deque<Work> queue;
  uint64_t queued = 0, finished = 0;
  bool started = false, left = false;
  int64_t latency_us = 0, jitter_us = 0;
  std::mt19937_64 random;
};

struct Streams {
  std::vector<std::unique_ptr<Stream>> all;
  std::vector<int> next_of_pool;
};

thread_local bool t_stream_thread = false;
std::atomic<uint64_t> g_run{0};
std::atomic<bool> g_failed{false};
std::mutex g_failure_mutex;
std::string g_failure, g_reason;
Site g_failure_site;

void apply(const Options& options, Stream& stream, size_t index) {
  std::lock_guard<std::mutex> lock(stream.mutex);
  stream.latency_us = options.latency_us;
  stream.jitter_us = options.jitter_us;
  stream.random.seed(options.seed * 1000003 + index);
}

Streams& streams() {
  static Streams* one = [] {
    auto* made = new Streams;  // outlives every thread
    const auto& options = machine().options;  // set_options comes here first
    made->next_of_pool.resize(machine().devices, 0);
    for (int i = 0; i < machine().devices * (1 + POOL); i++) {
      made->all.push_back(std::make_unique<Stream>());
      apply(options, *made->all.back(), i);
    }
    std::atexit(stop);
    return made;
  }();
  return *one;
}

Stream& stream_at(StreamIndex index) { return *streams().all.at(index); }

void fail(const Work& work, const char* why) {  // only the first failure is reported
  std::lock_guard<std::mutex> lock(g_failure_mutex);
  if (g_failed.exchange(true)) return;
  g_failure = work.what;
  g_failure_site = work.site;
  g_reason = why;
}

void serve(Stream* stream) {
  t_stream_thread = true;
  pthread_setname_np(pthread_self(), "sim stream");
  if (stream_thread_begins) stream_thread_begins();
  for (;;) {
    Work work;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->given.wait(lock, [&] { return !stream->queue.empty() || ending(); });
      if (ending()) break;
      work = std::move(stream->queue.front());
      stream->queue.pop_front();
    }
    if (work.not_before > Time::now()) pause_until(work.not_before);
    if (ending()) {  // leaked, not destroyed: its captures may belong to libraries that are being unloaded
      new Work(std::move(work));
      break;
    }
    try {
      work.run();
    } catch (const std::exception& e) {
      fail(work, e.what());
    } catch (...) {
      fail(work, "unknown exception");
    }
    work.run = nullptr;
    g_run++;
    std::lock_guard<std::mutex> lock(stream->mutex);
    stream->finished++;
    stream->progress.notify_all();
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->left = true;
  stream->progress.notify_all();
}

// Under the runtime's lock, so that the order of the queue is the order of the clocks.
void give(const Locked&, StreamIndex index, std::string what, Site site, std::function<void()> run) {
  if (ending()) {  // leaked, not destroyed: its captures may want locks in their destructors
    new std::function<void()>(std::move(run));
    return;
  }
  mark_used();
  Stream& stream = stream_at(index);
  std::lock_guard<std::mutex> lock(stream.mutex);
  if (!stream.started) {
    stream.started = true;
    std::thread(serve, &stream).detach();
  }
  const int64_t jitter = stream.jitter_us > 0 ? int64_t(stream.random() % uint64_t(stream.jitter_us + 1)) : 0;
  stream.queue.push_back(
      {std::move(what), site, std::move(run), Time::now() + std::chrono::microseconds(stream.latency_us + jitter)});
  stream.queued++;
  stream.given.notify_one();
}

// Orders work on a stream after everything that the queueing thread has done so far.
Actor follow_host(const Locked& locked, StreamIndex index) {
  const Actor actor = stream_actor(locked, index);
  acquire(locked, actor, release(locked, host_actor(locked)));
  return actor;
}

std::shared_ptr<EventState> give_mark(const Locked& locked, StreamIndex index) {
  auto state = std::make_shared<EventState>();
  give(locked, index, "event", 0, [state] {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->at = Time::now();
    state->done = true;
    state->told.notify_all();
  });
  return state;
}

void wait_for(EventState& state) {
  std::unique_lock<std::mutex> lock(state.mutex);
  while (!state.done && !ending()) state.told.wait_for(lock, std::chrono::milliseconds(100));
}

void host_learns(const Clock& clock) {
  if (!detecting() || in_stream_thread()) return;
  Locked locked;
  acquire(locked, host_actor(locked), clock);
}

Event as_last_recorded(const Event& event) {  // another thread may be recording it again
  Locked locked;
  return event;
}

// The work that a stream has been given until now: the stream's clock, and the number of pieces queued.
struct Given {
  Stream* stream;
  Clock clock;
  uint64_t queued;
};
Given given_until_now(StreamIndex index) {
  Locked locked;
  Stream& stream = stream_at(index);
  std::lock_guard<std::mutex> lock(stream.mutex);
  const bool ordered = detecting() && stream.queued;
  return {&stream, ordered ? release(locked, stream_actor(locked, index)) : Clock{}, stream.queued};
}
void wait_for(const Given& given) {
  std::unique_lock<std::mutex> lock(given.stream->mutex);
  while (given.stream->finished < given.queued && !ending())
    given.stream->progress.wait_for(lock, std::chrono::milliseconds(100));
}
void wait_for_all(const std::vector<Given>& all) {
  for (auto& given : all) wait_for(given);
}

std::vector<Given> given_to_device(int device) {  // -1: to all
  std::vector<Given> all;
  for (StreamIndex i = 0; i < StreamIndex(streams().all.size()); i++)
    if (device < 0 || device_of(i) == device) all.push_back(given_until_now(i));
  return all;
}

}  // namespace

// -- streams ------------------------------------------------------------------------------------------------------
int devices() { return machine().devices; }
StreamIndex default_stream(int device) { return device; }
int device_of(StreamIndex index) {
  const int count = machine().devices;
  return index < count ? index : (index - count) / POOL;
}
int number_on_device(StreamIndex index) {
  const int count = machine().devices;
  return index < count ? 0 : (index - count) % POOL + 1;
}
StreamIndex numbered_stream(int device, int number) {
  return number ? machine().devices + device * POOL + number - 1 : default_stream(device);
}
StreamIndex pool_stream(int device) {
  auto& all = streams();
  Locked locked;
  return numbered_stream(device, all.next_of_pool.at(device)++ % POOL + 1);
}
bool in_stream_thread() { return t_stream_thread; }
uint64_t kernels_run() { return g_run; }

void raise_pending() {
  if (!g_failed) return;
  std::string failure, reason;
  Site site;
  {
    std::lock_guard<std::mutex> lock(g_failure_mutex);
    if (!g_failed.exchange(false)) return;  // another thread tells it
    failure.swap(g_failure);
    reason.swap(g_reason);
    site = g_failure_site;
  }
  const auto place = site && describe_site ? describe_site(site) : "";
  if (!place.empty()) failure += ", queued at " + place;
  throw DeviceError("sim: a kernel that was queued earlier has failed. " + failure + ": " + reason);
}

void queue(const Locked& locked, StreamIndex index, const std::string& what, Site site,
           const std::vector<Extent>& extents, std::function<void()> run) {
  if (detecting()) {
    const Actor actor = follow_host(locked, index);
    touch(locked, actor, host_actor(locked), label_of(locked, what), site, extents);
  }
  give(locked, index, what, site, std::move(run));
}

void launch(StreamIndex index, const std::string& what, const std::vector<Extent>& extents, std::function<void()> run) {
  refuse_if_forked();
  raise_pending();
  const Site site = site_of_launch();
  streams();
  Locked locked;
  queue(locked, index, what, site, extents, std::move(run));
}

bool query_stream(StreamIndex index) {
  refuse_if_forked();
  const auto given = given_until_now(index);
  {
    std::lock_guard<std::mutex> lock(given.stream->mutex);
    if (given.stream->finished < given.queued && !ending()) return false;
  }
  host_learns(given.clock);
  raise_pending();
  return true;
}

void wait_for_stream(StreamIndex index) {
  refuse_if_forked();
  const auto given = given_until_now(index);
  wait_for(given);
  host_learns(given.clock);
  raise_pending();
}

void wait_for_device(int device) {
  refuse_if_forked();
  const auto all = given_to_device(device);
  wait_for_all(all);
  for (auto& given : all)
    if (!given.clock.empty()) host_learns(given.clock);
  raise_pending();
}

void wait_until_idle() { wait_for_all(given_to_device(-1)); }

void set_stream_latency(StreamIndex index, int64_t latency_us, int64_t jitter_us) {
  Stream& stream = stream_at(index);
  std::lock_guard<std::mutex> lock(stream.mutex);
  stream.latency_us = latency_us;
  stream.jitter_us = jitter_us;
}

void set_options(const Options& options) {
  streams();
  {
    Locked locked;
    options_under(locked) = options;
    set_detecting(locked, options.races);
  }
  for (size_t i = 0; i < streams().all.size(); i++) apply(options, *streams().all[i], i);
}

void spin(StreamIndex index, int64_t us) {
  launch(index, "spin", {}, [us] { pause_until(Time::now() + std::chrono::microseconds(us)); });
}

// -- events -------------------------------------------------------------------------------------------------------
void record(Event& event, StreamIndex index) {
  refuse_if_forked();
  streams();
  Locked locked;
  if (detecting()) event.clock = release(locked, follow_host(locked, index));
  event.state = give_mark(locked, index);
}

Event quiet_event(const Locked& locked, StreamIndex index) {
  Event event;
  if (detecting()) event.clock = release(locked, stream_actor(locked, index));
  event.state = give_mark(locked, index);
  return event;
}

bool happened(const Event& event) { return !event.state || event.state->done || ending(); }

void stream_waits(StreamIndex index, const Event& event) {
  refuse_if_forked();
  streams();
  Locked locked;
  if (!event.state) return;
  if (detecting()) acquire(locked, follow_host(locked, index), event.clock);
  give(locked, index, "wait for an event", 0, [state = event.state] { wait_for(*state); });
}

bool query(const Event& event) {
  const Event last = as_last_recorded(event);
  if (!last.state) return true;
  refuse_if_forked();
  if (!happened(last)) return false;
  host_learns(last.clock);
  raise_pending();
  return true;
}

void wait_for_event(const Event& event) {
  const Event last = as_last_recorded(event);
  if (!last.state) return;
  refuse_if_forked();
  wait_for(*last.state);
  host_learns(last.clock);
  raise_pending();
}

double milliseconds_between(const Event& first, const Event& second) {
  for (auto* event : {&first, &second}) {
    if (!event->state) throw DeviceError("sim: an event whose time is asked for was never recorded.");
    if (!event->state->done)
      throw DeviceError("sim: an event whose time is asked for has not happened yet. Call its synchronize() first.");
  }
  return std::chrono::duration<double, std::milli>(second.state->at - first.state->at).count();
}

// -- the end ------------------------------------------------------------------------------------------------------
// A stream that is inside a kernel gets two seconds: a collective may never return.
void stop() {
  if (forked() || ending()) return;
  streams();
  tell_ending();
  const auto deadline = Time::now() + std::chrono::seconds(2);
  for (auto& stream : streams().all) {
    std::unique_lock<std::mutex> lock(stream->mutex);
    stream->given.notify_all();
    stream->progress.wait_until(lock, deadline, [&] { return !stream->started || stream->left; });
  }
}

}  // namespace sim
