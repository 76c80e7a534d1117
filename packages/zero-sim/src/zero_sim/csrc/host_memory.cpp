// Host memory that copies may use asynchronously: a caching allocator of pinned blocks, and registered ranges.
#include <cstdlib>
#include <cstring>
#include <map>

#include "memory.hpp"
#include "streams.hpp"

namespace sim {
namespace {

constexpr size_t PAGE = 4096;
enum : int { INVALID_VALUE = 1, NOT_INITIALIZED = 3, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713 };  // as CUDA's

struct Block {
  size_t size;
  bool live = true;
  Site allocated = 0;
  Site allocated_before = 0, freed_before = 0;
  std::vector<StreamIndex> recorded = {};
  std::vector<Event> last_uses = {};
};
struct Registered {
  size_t size;
  Site site;
};

struct HostMemory {
  std::map<uintptr_t, Block> blocks;                 // never given back to the system
  std::map<size_t, std::vector<uintptr_t>> free;     // by size, oldest first
  std::map<uintptr_t, Registered> registered;
};
HostMemory& memory(const Locked&) {
  static HostMemory* one = new HostMemory;
  return *one;
}

std::atomic<uintptr_t> g_lowest{~uintptr_t(0)}, g_highest{0};  // outside of these, nothing is pinned

void widen(uintptr_t begin, uintptr_t end) {
  if (begin < g_lowest) g_lowest = begin;
  if (end > g_highest) g_highest = end;
}

template <class Map>
auto around(Map& map, uintptr_t address) {
  auto it = map.upper_bound(address);
  if (it == map.begin()) return map.end();
  --it;
  return address < it->first + it->second.size ? it : map.end();
}

template <class Map, class Visit>
void overlaps(const Map& map, uintptr_t begin, uintptr_t end, Visit&& visit) {
  auto it = map.upper_bound(begin);
  if (it != map.begin()) --it;
  for (; it != map.end() && it->first < end; ++it) {
    const uintptr_t from = std::max(begin, it->first), to = std::min(end, it->first + it->second.size);
    if (from < to) visit(from, to);
  }
}

bool ready(const Block& block) {
  for (auto& event : block.last_uses)
    if (!happened(event)) return false;
  return true;
}

void host_writes(const Locked& locked, const char* what, Site site, uintptr_t begin, uintptr_t end) {
  if (!detecting() || in_stream_thread()) return;
  const Actor me = host_actor(locked);
  touch(locked, me, me, label_of(locked, what), site, {{begin, end, true}});
}

// A block of this size whose last uses are over; 0 where there is none.
uintptr_t from_cache(const Locked& locked, HostMemory& m, size_t size, Site site) {
  auto& free = m.free[size];
  for (auto it = free.begin(); it != free.end(); ++it) {
    const uintptr_t begin = *it;
    Block& block = m.blocks.at(begin);
    if (!ready(block)) continue;
    free.erase(it);
    block.live = true;
    block.allocated = site;
    block.last_uses.clear();
    host_writes(locked, "pinned memory given out again", site, begin, begin + size);
    forget(locked, begin, begin + size);  // whichever thread it is handed to, nobody else can know the address yet
    return begin;
  }
  return 0;
}

}  // namespace

void* pinned_malloc(size_t bytes) {
  if (!bytes) return nullptr;
  refuse_if_forked();
  const Site site = site_here();
  size_t size = PAGE;
  while (size < bytes) size *= 2;
  uintptr_t again;
  {
    Locked locked;
    again = from_cache(locked, memory(locked), size, site);
  }
  if (again) return std::memset(reinterpret_cast<void*>(again), 0xFF, size);
  void* fresh = std::aligned_alloc(PAGE, size);
  if (!fresh) throw OutOfMemory("sim: the host has no " + size_text(size) + " of memory left to pin.");
  mark_used();
  const auto begin = uintptr_t(fresh);
  Locked locked;
  Block block{size};
  block.allocated = site;
  memory(locked).blocks.emplace(begin, std::move(block));
  widen(begin, begin + size);
  return fresh;
}

// Whatever is in flight and was not recorded may meet the next owner: it is reported here, not only if it does.
void pinned_free(void* pointer) {
  if (!pointer || forked() || ending()) return;
  const Site site = site_here();
  const auto begin = uintptr_t(pointer);
  bool poisons;
  size_t size;
  {
    Locked locked;
    auto& m = memory(locked);
    auto it = m.blocks.find(begin);
    if (it == m.blocks.end() || !it->second.live)
      throw std::logic_error("sim: pinned memory is freed that was not allocated");
    Block& block = it->second;
    size = block.size;
    settle(locked, begin, begin + size, known_to_any_host(locked));
    for (StreamIndex stream : block.recorded) {
      block.last_uses.push_back(quiet_event(locked, stream));
      settle(locked, begin, begin + size, block.last_uses.back().clock);
    }
    block.recorded.clear();
    host_writes(locked, "pinned memory freed", site, begin, begin + size);
    forget(locked, begin, begin + size);
    block.allocated_before = block.allocated;
    block.freed_before = site;
    block.live = false;
    poisons = options_under(locked).strict && block.last_uses.empty();
    if (!poisons) m.free[size].push_back(begin);
  }
  if (!poisons) return;
  std::memset(pointer, 0xFF, size);
  Locked locked;
  memory(locked).free[size].push_back(begin);
}

bool pinned_record(void* pointer, StreamIndex stream) {
  if (forked() || ending()) return false;
  Locked locked;
  auto& m = memory(locked);
  auto it = m.blocks.find(uintptr_t(pointer));
  if (it == m.blocks.end() || !it->second.live) return false;
  auto& recorded = it->second.recorded;
  if (std::find(recorded.begin(), recorded.end(), stream) == recorded.end()) recorded.push_back(stream);
  return true;
}

int host_register(void* pointer, size_t bytes) {
  if (forked()) return NOT_INITIALIZED;
  if (!pointer || !bytes || is_device(pointer)) return INVALID_VALUE;
  const Site site = site_here();
  const auto begin = uintptr_t(pointer), end = begin + bytes;
  Locked locked;
  auto& m = memory(locked);
  bool taken = false;
  overlaps(m.registered, begin, end, [&](uintptr_t, uintptr_t) { taken = true; });
  overlaps(m.blocks, begin, end, [&](uintptr_t, uintptr_t) { taken = true; });
  if (taken) return ALREADY_REGISTERED;
  m.registered.emplace(begin, Registered{bytes, site});
  widen(begin, end);
  return 0;
}

// From here on the host may use the memory in any way, so this counts as a write to all of it.
int host_unregister(void* pointer) {
  if (forked() || ending()) return 0;
  const Site site = site_here();
  Locked locked;
  auto& m = memory(locked);
  auto it = m.registered.find(uintptr_t(pointer));
  if (it == m.registered.end()) return NOT_REGISTERED;
  const uintptr_t begin = it->first, end = begin + it->second.size;
  host_writes(locked, "memory unregistered", site, begin, end);
  forget(locked, begin, end);
  m.registered.erase(it);
  return 0;
}

bool is_pinned(const void* pointer) {
  const auto address = uintptr_t(pointer);
  if (forked() || address < g_lowest || address >= g_highest) return false;
  Locked locked;
  auto& m = memory(locked);
  if (around(m.registered, address) != m.registered.end()) return true;
  auto it = around(m.blocks, address);
  return it != m.blocks.end() && it->second.live;
}

bool pinned_in_one_piece(const void* pointer, size_t bytes) {
  const auto begin = uintptr_t(pointer), end = begin + bytes;
  Locked locked;
  auto& m = memory(locked);
  if (auto it = around(m.registered, begin); it != m.registered.end()) return end <= it->first + it->second.size;
  auto it = around(m.blocks, begin);
  return it != m.blocks.end() && end <= it->first + it->second.size;
}

bool touches_pinned(uintptr_t begin, uintptr_t end) {
  if (forked() || begin >= end || end <= g_lowest || begin >= g_highest) return false;
  std::vector<std::pair<uintptr_t, uintptr_t>> parts;
  Locked locked;
  followed_host_memory(locked, begin, end, parts);
  return !parts.empty();
}

void followed_host_memory(const Locked& locked, uintptr_t begin, uintptr_t end,
                          std::vector<std::pair<uintptr_t, uintptr_t>>& parts) {
  if (end <= g_lowest || begin >= g_highest) return;
  auto add = [&](uintptr_t from, uintptr_t to) { parts.emplace_back(from, to); };
  overlaps(memory(locked).blocks, begin, end, add);
  overlaps(memory(locked).registered, begin, end, add);
}

MemoryNote note_of_host_memory(const Locked& locked, uintptr_t address) {
  auto& m = memory(locked);
  if (auto it = around(m.registered, address); it != m.registered.end())
    return {"registered host memory (" + size_text(it->second.size) + ")", it->second.site, 0, 0, it->first,
            it->first + it->second.size};
  auto it = around(m.blocks, address);
  if (it == m.blocks.end()) return {"host memory"};
  auto& block = it->second;
  return {"pinned host memory (" + size_text(block.size) + ")", block.live ? block.allocated : 0,
          block.allocated_before, block.freed_before, it->first, it->first + block.size};
}

}  // namespace sim
