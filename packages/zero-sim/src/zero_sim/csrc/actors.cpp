// Keeps the clocks of streams, host threads and tasks, and gives the components of ended ones to new ones.
#include "actors.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <unordered_map>
#include <utility>

namespace sim {

void (*mark_actors_in_use)(const Locked&, std::vector<bool>&) = nullptr;
Backward* (*backward_of_this_thread)() = nullptr;

struct Backward {
  const uint64_t number;
  std::vector<Actor> threads;  // those that have worked for the call, the caller first
};

namespace {

constexpr size_t REMEMBERED = 128;  // ticks of an actor whose last label is known

struct State {
  Kind kind;
  Clock clock;           // its own component is its tick
  bool released = true;  // somebody may know of the current tick: the next access starts another
  bool ended = false;
  std::deque<std::pair<uint64_t, std::string>> names;  // (first tick, name): one component may have had several owners
  std::vector<Label> last;                             // by tick % REMEMBERED
};

struct Actors {
  std::deque<State> all;
  std::vector<Actor> of_streams;  // index + 1: 0 where the stream has not been used
  std::vector<Actor> ended;       // which records may still name
  std::vector<Actor> unnamed;     // ended, and no record names them
  size_t sweep_at = 64;
  Clock known_to_hosts;
  std::deque<std::string> labels{""};
  std::unordered_map<std::string, Label> label_numbers{{"", 0}};
};

Actors& actors(const Locked&) {
  static Actors* one = new Actors;  // outlives every thread
  return *one;
}

Actor reuse(const Locked& locked, Actor actor, Kind kind, std::string name, const Clock& starts_after) {
  auto& state = actors(locked).all[actor];
  const uint64_t tick = at(state.clock, actor);
  state.clock = starts_after;
  if (state.clock.size() <= actor) state.clock.resize(actor + 1, 0);
  state.clock[actor] = tick;
  state.kind = kind;
  state.released = true;
  state.ended = false;
  state.names.emplace_back(tick + 1, std::move(name));
  if (state.names.size() > 32) state.names.pop_front();
  return actor;
}

// A component is used again where its former owner is in the new one's past. From time to time, so are those that no
// record names any more: there is nothing left that they could be confused with.
Actor make_actor(const Locked& locked, Kind kind, std::string name, const Clock& starts_after) {
  auto& a = actors(locked);
  if (kind != Kind::stream) {
    for (auto it = a.ended.begin(); it != a.ended.end(); ++it) {
      const Actor old = *it;
      if (at(starts_after, old) < at(a.all[old].clock, old)) continue;
      a.ended.erase(it);
      return reuse(locked, old, kind, std::move(name), starts_after);
    }
    if (a.unnamed.empty() && a.all.size() >= a.sweep_at && mark_actors_in_use) {
      std::vector<bool> named(a.all.size(), false);
      mark_actors_in_use(locked, named);
      for (Actor old : a.ended)
        if (!named[old]) a.unnamed.push_back(old);
      auto unnamed = std::remove_if(a.ended.begin(), a.ended.end(), [&](Actor old) { return !named[old]; });
      a.ended.erase(unnamed, a.ended.end());
      a.sweep_at = a.all.size() + 64 - std::min<size_t>(a.unnamed.size(), 64);
    }
    if (!a.unnamed.empty()) {
      const Actor old = a.unnamed.back();
      a.unnamed.pop_back();
      return reuse(locked, old, kind, std::move(name), starts_after);
    }
  }
  const auto actor = Actor(a.all.size());
  a.all.push_back({kind, starts_after, true, false, {}, std::vector<Label>(REMEMBERED, 0)});
  a.all.back().names.emplace_back(0, std::move(name));
  if (a.all.back().clock.size() <= actor) a.all.back().clock.resize(actor + 1, 0);
  return actor;
}

std::string name_of_stream(StreamIndex index) {
  const int number = number_on_device(index);
  return (number ? "stream " + std::to_string(number) : "default stream") + " of sim:" + std::to_string(device_of(index));
}

std::string name_of_thread() {
  if (getpid() == gettid()) return "MainThread";
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::string(name) + " (" + std::to_string(gettid()) + ")";
}

struct ThisThread {
  bool known = false;
  Actor actor = 0;
  std::string name;
  uint64_t backward = 0;  // the number of the call that it works for
  ~ThisThread() {
    if (!known || ending()) return;
    Locked locked;
    retire(locked, actor);
  }
};
thread_local ThisThread t_this;

void enter(const Locked& locked, const Clock& starts_after) {
  t_this.known = true;
  t_this.actor = make_actor(
      locked, Kind::host, "host thread " + (t_this.name.empty() ? name_of_thread() : t_this.name), starts_after);
  join(actors(locked).known_to_hosts, starts_after);
}

// After whatever the call's other threads have done until now. Some of it may be work that has nothing to do with what
// this thread was given: autograd's queues between its own threads are not seen one by one.
void gather(const Locked& locked, Backward& call, Actor me) {
  bool present = false;
  for (Actor other : call.threads) {
    if (other == me)
      present = true;
    else
      acquire(locked, me, release(locked, other));
  }
  if (!present) call.threads.push_back(me);
}

}  // namespace

// -- labels -------------------------------------------------------------------------------------------------------
Label label_of(const Locked& locked, const std::string& text) {
  auto& a = actors(locked);
  auto [it, fresh] = a.label_numbers.try_emplace(text, Label(a.labels.size()));
  if (fresh) a.labels.push_back(text);
  return it->second;
}
const std::string& text_of(const Locked& locked, Label label) { return actors(locked).labels[label]; }

// -- clocks -------------------------------------------------------------------------------------------------------
void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

const Clock& clock_of(const Locked& locked, Actor actor) { return actors(locked).all[actor].clock; }
Kind kind_of(const Locked& locked, Actor actor) { return actors(locked).all[actor].kind; }
const Clock& known_to_any_host(const Locked& locked) { return actors(locked).known_to_hosts; }

void acquire(const Locked& locked, Actor actor, const Clock& clock) {
  auto& a = actors(locked);
  join(a.all[actor].clock, clock);
  if (a.all[actor].kind == Kind::host) join(a.known_to_hosts, clock);
}

const Clock& release(const Locked& locked, Actor actor) {
  auto& state = actors(locked).all[actor];
  state.released = true;
  return state.clock;
}

uint64_t tick_of_access(const Locked& locked, Actor actor, Label label) {
  auto& a = actors(locked);
  auto& state = a.all[actor];
  uint64_t& tick = state.clock[actor];
  const bool fresh = std::exchange(state.released, false);
  if (fresh) {
    tick++;
    if (state.kind == Kind::host) {
      if (a.known_to_hosts.size() <= actor) a.known_to_hosts.resize(actor + 1, 0);
      a.known_to_hosts[actor] = std::max(a.known_to_hosts[actor], tick);
    }
  }
  // Users do not know an allocator's own writes, so the last operation before them is remembered instead.
  Label& last = state.last[tick % REMEMBERED];
  if (text_of(locked, label).rfind("memory ", 0) != 0) last = label;
  else if (fresh) last = state.last[(tick - 1) % REMEMBERED];
  return tick;
}

// -- who is who ---------------------------------------------------------------------------------------------------
Actor stream_actor(const Locked& locked, StreamIndex index) {
  auto& streams = actors(locked).of_streams;
  if (streams.size() <= size_t(index)) streams.resize(index + 1, 0);
  if (!streams[index]) {
    const Actor made = make_actor(locked, Kind::stream, name_of_stream(index), {});
    actors(locked).of_streams[index] = made + 1;
  }
  return actors(locked).of_streams[index] - 1;
}

Actor host_actor(const Locked& locked) {
  if (!t_this.known) enter(locked, {});
  Backward* call = backward_of_this_thread ? backward_of_this_thread() : nullptr;
  const uint64_t number = call ? call->number : 0;
  if (number != t_this.backward) {
    t_this.backward = number;
    if (call) gather(locked, *call, t_this.actor);
  }
  return t_this.actor;
}

Actor task_actor(const Locked& locked, const std::string& what, const Clock& starts_after) {
  return make_actor(locked, Kind::task, "task '" + what + "'", starts_after);
}

void retire(const Locked& locked, Actor actor) {
  auto& a = actors(locked);
  a.all[actor].ended = true;
  a.ended.push_back(actor);
}

size_t components(const Locked& locked) { return actors(locked).all.size(); }

std::string name_of(const Locked& locked, Actor actor, uint64_t tick) {
  auto& names = actors(locked).all[actor].names;
  for (auto it = names.rbegin(); it != names.rend(); ++it)
    if (it->first <= tick) return it->second;
  return names.front().second;
}

std::string last_seen(const Locked& locked, Actor of, uint64_t tick) {
  auto& state = actors(locked).all[of];
  const uint64_t now = at(state.clock, of);
  if (tick == 0 || tick > now || now - tick >= REMEMBERED) return "";
  const Label label = state.last[tick % REMEMBERED];
  return label ? "'" + text_of(locked, label) + "'" : "";
}

// -- edges between host threads -----------------------------------------------------------------------------------
void leave_word(Meeting& meeting) {
  if (!detecting() || in_stream_thread()) return;
  Locked locked;
  join(meeting.clock, release(locked, host_actor(locked)));
}

void hear_word(Meeting& meeting) {
  if (!detecting() || in_stream_thread()) return;
  Locked locked;
  if (!t_this.known)
    enter(locked, meeting.clock);
  else
    acquire(locked, host_actor(locked), meeting.clock);
}

void name_host_thread(const std::string& name) {
  if (in_stream_thread()) return;
  t_this.name = name;
  if (!t_this.known || ending()) return;
  Locked locked;
  actors(locked).all[t_this.actor].names.back().second = "host thread " + name;
}

std::shared_ptr<Backward> begin_backward() {
  static std::atomic<uint64_t> calls{0};
  auto call = std::make_shared<Backward>(Backward{++calls, {}});
  if (!detecting() || in_stream_thread()) return call;
  Locked locked;
  call->threads.push_back(host_actor(locked));
  return call;
}

void hear_backward() {
  if (!detecting() || in_stream_thread()) return;
  Locked locked;
  const Actor me = host_actor(locked);
  if (t_this.backward) gather(locked, *backward_of_this_thread(), me);
}

void end_backward(const std::shared_ptr<Backward>& call) {
  if (!detecting() || in_stream_thread()) return;
  Locked locked;
  gather(locked, *call, host_actor(locked));
}

}  // namespace sim
