// Keeps, for every byte, the last write and the reads since, and finds accesses that nothing orders.
#include "detector.hpp"

#include <algorithm>

#include "intervals.hpp"
#include "memory.hpp"

namespace sim {
namespace {

struct Last {
  Access write;                // tick 0: none
  std::vector<Access> reads;   // since then, none of them ordered before another
  friend bool operator==(const Last& a, const Last& b) { return a.write == b.write && a.reads == b.reads; }
};

void mark(const Locked&, std::vector<bool>&);

IntervalMap<Last>& memory(const Locked&) {
  static auto* one = (mark_actors_in_use = &mark, new IntervalMap<Last>);
  return *one;
}

void mark(const Locked& locked, std::vector<bool>& named) {
  memory(locked).each([&](const Last& last) {
    if (last.write.tick) named[last.write.actor] = true;
    for (auto& read : last.reads) named[read.actor] = true;
  });
}

bool covers(const Clock& clock, const Access& access) { return access.tick <= at(clock, access.actor); }

void touch_range(const Locked& locked, const Access& now, Actor by, uintptr_t begin, uintptr_t end, bool writes) {
  const Clock& clock = clock_of(locked, now.actor);
  auto ordered = [&](const Access& before) { return before.actor == now.actor || covers(clock, before); };
  memory(locked).update(begin, end, [&](Last& last, uintptr_t from, uintptr_t to) {
    if (last.write.tick && !ordered(last.write)) report(locked, now, writes, last.write, true, by, from, to);
    if (writes) {
      for (auto& read : last.reads)
        if (!ordered(read)) report(locked, now, true, read, false, by, from, to);
      last.write = now;
      last.reads.clear();
    } else {
      // Whoever comes after this read comes after those that are ordered before it.
      last.reads.erase(std::remove_if(last.reads.begin(), last.reads.end(), ordered), last.reads.end());
      last.reads.push_back(now);
    }
  });
}

}  // namespace

void touch(const Locked& locked, Actor who, Actor by, Label label, Site site, const std::vector<Extent>& extents) {
  const Access now{who, label, site, tick_of_access(locked, who, label)};
  std::vector<std::pair<uintptr_t, uintptr_t>> followed;
  for (auto& extent : extents) {
    if (extent.begin >= extent.end) continue;
    if (is_device(reinterpret_cast<void*>(extent.begin))) {
      touch_range(locked, now, by, extent.begin, extent.end, extent.write);
      continue;
    }
    followed.clear();
    followed_host_memory(locked, extent.begin, extent.end, followed);
    for (auto& [begin, end] : followed) touch_range(locked, now, by, begin, end, extent.write);
  }
}

void settle(const Locked& locked, uintptr_t begin, uintptr_t end, const Clock& known) {
  memory(locked).filter(begin, end, [&](Last& last) {
    auto done = [&](const Access& access) { return covers(known, access); };
    if (done(last.write)) last.write = Access{};
    last.reads.erase(std::remove_if(last.reads.begin(), last.reads.end(), done), last.reads.end());
    return last.write.tick || !last.reads.empty();
  });
}

void forget(const Locked& locked, uintptr_t begin, uintptr_t end) { memory(locked).erase(begin, end); }
void forget_everything(const Locked& locked) { memory(locked).clear(); }

// -- accesses by the host -----------------------------------------------------------------------------------------
void host_access(const char* what, const std::vector<Extent>& extents) {
  if (!detecting() || in_stream_thread()) return;
  const Site site = site_here();
  Locked locked;
  const Actor me = host_actor(locked);
  touch(locked, me, me, label_of(locked, what), site, extents);
}

struct Task {
  bool followed = false;  // and its end is not known yet
  Actor actor = 0;
  Clock clock;

  void end(const Locked& locked) {
    if (std::exchange(followed, false)) retire(locked, actor);
  }
  ~Task() {  // nobody learnt its end, which is a race for whoever touches the memory
    if (!followed || forked() || ending()) return;
    Locked locked;
    end(locked);
  }
};

std::shared_ptr<Task> begin_task(const std::string& what, const std::vector<Extent>& extents) {
  auto task = std::make_shared<Task>();
  if (!detecting() || in_stream_thread()) return task;
  const Site site = site_here();
  Locked locked;
  const Actor me = host_actor(locked);
  task->followed = true;
  task->actor = task_actor(locked, what, release(locked, me));
  touch(locked, task->actor, me, label_of(locked, what), site, extents);
  task->clock = clock_of(locked, task->actor);
  return task;
}

void finish_task(const std::shared_ptr<Task>& task) {
  if (!detecting() || in_stream_thread()) return;
  Locked locked;
  acquire(locked, host_actor(locked), task->clock);
  task->end(locked);
}

}  // namespace sim
