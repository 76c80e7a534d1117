// Looks for races: remembers the last accesses to every byte, and compares each new access with them.
#pragma once

#include "actors.hpp"

namespace sim {

struct Access {
  Actor actor = 0;
  Label label = 0;
  Site site = 0;
  uint64_t tick = 0;  // 0: no access
  friend bool operator==(const Access& a, const Access& b) {
    return a.actor == b.actor && a.tick == b.tick && a.label == b.label && a.site == b.site;
  }
};

// `who` makes these accesses now, on behalf of the host thread `by`.
void touch(const Locked&, Actor who, Actor by, Label, Site, const std::vector<Extent>&);
// Accesses to these bytes that `known` covers are in order with whatever comes next: the memory's owner guarantees it.
void settle(const Locked&, uintptr_t begin, uintptr_t end, const Clock& known);
void forget(const Locked&, uintptr_t begin, uintptr_t end);
void forget_everything(const Locked&);

}  // namespace sim
