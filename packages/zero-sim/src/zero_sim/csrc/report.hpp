// Turns two conflicting accesses into a report: who, what, where, and the edge that is missing.
#pragma once

#include "detector.hpp"

namespace sim {

// What memory is, as its allocator knows it. Sites become text only when the report is taken.
struct MemoryNote {
  std::string what;  // "device memory of sim:0"
  Site allocated = 0;
  Site allocated_before = 0, freed_before = 0;  // its former life, if it has had one
  uintptr_t begin = 0, end = 0;                 // 0: it belongs to nobody now
};

// Keeps a report, unless one about the same two places is kept already.
void report(const Locked&, const Access& now, bool now_writes, const Access& before, bool before_writes, Actor by,
            uintptr_t begin, uintptr_t end);

}  // namespace sim
