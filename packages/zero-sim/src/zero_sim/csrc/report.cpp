// Keeps the reports of races until they are taken, one for each pair of places.
#include "report.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "memory.hpp"

namespace sim {
namespace {

constexpr size_t KEPT = 1000;  // different ones, between two takings

struct Found {
  Race race;  // without sites
  Site now, before;
  MemoryNote memory;
};
using Key = std::tuple<Label, Site, Label, Site, bool, bool>;

struct Reports {
  std::vector<Found> found;
  std::map<Key, size_t> places;  // where in `found`
};
Reports& reports(const Locked&) {
  static Reports* one = new Reports;
  return *one;
}

std::string quoted(const Locked& locked, Label label) { return "'" + text_of(locked, label) + "'"; }

std::string since(const Locked& locked, Actor who, const Access& before, const std::string& of) {
  const uint64_t seen = at(clock_of(locked, who), before.actor);
  if (!seen) return "has never waited for " + of;
  const auto last = last_seen(locked, before.actor, seen);
  return last.empty() ? "has waited for " + of + " too early" : "has waited for " + of + " up to " + last + " only";
}

// Its stream is one that the user's program can name; a collective's is not.
bool has_a_name(const std::string& what) { return what.find("::") != what.npos || what.rfind("copy ", 0) == 0; }

std::string missing_edge(const Locked& locked, const Access& now, const Access& before, Actor by) {
  const auto then = name_of(locked, before.actor, before.tick), done = quoted(locked, before.label);
  const auto me = name_of(locked, now.actor, now.tick), does = quoted(locked, now.label);
  const auto host = name_of(locked, by, clock_of(locked, by)[by]);
  const bool device = kind_of(locked, now.actor) == Kind::stream;
  const bool before_named = has_a_name(text_of(locked, before.label)), named = has_a_name(text_of(locked, now.label));
  auto code = [](bool exact, const char* text) { return exact ? std::string(" (") + text + ")" : ""; };
  switch (kind_of(locked, before.actor)) {
    case Kind::stream:
      if (device) {
        const auto lacks = me + " " + since(locked, now.actor, before, then) + "; ";
        const auto event = "record an event on " + then + " after " + done + " and let " + me + " wait for it";
        if (text_of(locked, now.label).rfind("memory ", 0) != 0)
          return lacks + event + " before " + does +
                 code(before_named && named, "now.wait_event(before.record_event())") + ".";
        return lacks + "call record_stream with " + then + " on the tensor before it is freed" +
               code(before_named, "tensor.record_stream(before)") + ", or " + event + ".";
      }
      return host + " " + since(locked, by, before, then) + "; record an event on " + then + " after " + done +
             " and let " + host + " synchronize with it before " + does +
             code(before_named, "before.record_event().synchronize()") + ".";
    case Kind::host:
      return host + (device ? ", which queued " + does + " on " + me + "," : "") + " has not heard from " + then +
             " since " + done + "; let " + then + " hand over to " + host +
             " after it, through a lock, a queue or a join.";
    case Kind::task:
      return host + " has not waited for the end of " + then + "; wait for it before " + does +
             (device ? " is queued on " + me : "") + ".";
  }
  return "";
}

std::string described(Site site) {
  auto text = site && describe_site ? describe_site(site) : "";
  return text.empty() ? "(no Python frame)" : text;
}

std::string described(const MemoryNote& note) {
  auto text = note.what;
  if (note.allocated) text += ", allocated at " + described(note.allocated);
  if (note.freed_before)
    text += "; before that allocated at " + described(note.allocated_before) + " and freed at " +
            described(note.freed_before);
  return text;
}

}  // namespace

void report(const Locked& locked, const Access& now, bool now_writes, const Access& before, bool before_writes,
            Actor by, uintptr_t begin, uintptr_t end) {
  auto& all = reports(locked);
  const Key key{now.label, now.site, before.label, before.site, now_writes, before_writes};
  if (auto it = all.places.find(key); it != all.places.end()) {
    auto& known = all.found[it->second];  // the next piece of the same conflict, if it is of the same block
    if (known.race.end == begin && end <= known.memory.end) known.race.end = end;
    return;
  }
  if (all.found.size() >= KEPT) return;
  Found found;
  found.race.kind = now_writes ? (before_writes ? "write after write" : "write after read") : "read after write";
  found.race.begin = begin;
  found.race.end = end;
  found.race.now = {name_of(locked, now.actor, now.tick), text_of(locked, now.label), ""};
  found.race.before = {name_of(locked, before.actor, before.tick), text_of(locked, before.label), ""};
  found.race.missing = missing_edge(locked, now, before, by);
  found.now = now.site;
  found.before = before.site;
  const bool device = is_device(reinterpret_cast<void*>(begin));
  found.memory = device ? note_of_device_memory(locked, begin) : note_of_host_memory(locked, begin);
  all.places.emplace(key, all.found.size());
  all.found.push_back(std::move(found));
}

size_t race_count() {
  Locked locked;
  return reports(locked).found.size();
}

std::vector<Race> take_races() {
  std::vector<Found> found;
  {
    Locked locked;
    found.swap(reports(locked).found);
    reports(locked).places.clear();
  }
  std::vector<Race> races;
  std::set<std::tuple<std::string, std::string, std::string, std::string, std::string>> told;
  std::map<std::vector<std::string>, size_t> alike;  // where in `races`: as `print` gives five of one line
  for (auto& one : found) {
    auto& race = one.race;
    race.now.site = described(one.now);
    race.before.site = described(one.before);
    race.memory = described(one.memory);
    if (!told.emplace(race.kind, race.now.what, race.now.site, race.before.what, race.before.site).second) continue;
    const std::vector<std::string> edge{race.kind, race.now.actor, race.now.site, race.before.actor, race.before.what,
                                        race.before.site, std::to_string(one.memory.begin)};
    const auto [known, first] = alike.try_emplace(edge, races.size());
    if (first || !one.now || !one.memory.begin) races.push_back(std::move(race));
    else races[known->second].others++;
  }
  return races;
}

}  // namespace sim
