// Device memory: mapped twice, so that the host faults on it and streams do not, and a caching allocator as CUDA's.
//
// A block freed on its own stream is given out to that stream again at once; one that other streams were recorded for
// leaves only after their events. Large segments are split and free neighbours merged. Addresses never move.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "intervals.hpp"
#include "memory.hpp"
#include "streams.hpp"

namespace sim {
namespace {

constexpr size_t KIB = 1024, MIB = KIB * KIB;
constexpr size_t GRAIN = 512;                 // blocks are multiples of this
constexpr size_t SMALL = MIB;                 // up to here, blocks come from small segments
constexpr size_t SMALL_SEGMENT = 2 * MIB;
constexpr size_t LARGE_SEGMENT = 20 * MIB;    // for blocks below 10 MiB; larger ones get their own, in steps of 2 MiB
constexpr size_t SPREAD = 2;                  // address space for this many times the memory: holes cost no memory

struct Mapping {
  uintptr_t host = 0, streams = 0;  // the same bytes, as each may see them
  size_t per_device = 0, size = 0;
};
std::atomic<const Mapping*> g_mapping{nullptr};

const Mapping& mapping() {
  static const Mapping* one = [] {
    auto* made = new Mapping;
    made->per_device = machine().memory * SPREAD;
    made->size = made->per_device * machine().devices;
    const int file = memfd_create("sim", MFD_CLOEXEC);
    const int flags = MAP_SHARED | MAP_NORESERVE;
    void *host = MAP_FAILED, *streams = MAP_FAILED;
    if (file >= 0 && ftruncate(file, off_t(made->size)) == 0) {
      host = mmap(nullptr, made->size, PROT_NONE, flags, file, 0);
      streams = mmap(nullptr, made->size, PROT_READ | PROT_WRITE, flags, file, 0);
    }
    if (file >= 0) close(file);
    if (host == MAP_FAILED || streams == MAP_FAILED)
      throw DeviceError("sim: no address space for " + size_text(made->size) + " of device memory: " +
                        std::strerror(errno) + ". Set ZERO_SIM_MEMORY_GIB or ZERO_SIM_DEVICES lower.");
    made->host = uintptr_t(host);
    made->streams = uintptr_t(streams);
    mark_used();
    g_mapping = made;
    install_fault_handler();
    return made;
  }();
  return *one;
}

enum class Use { free, live, leaving };  // leaving: freed, but other streams may still be at it

struct Block {
  size_t size;
  int device;
  StreamIndex stream;
  bool small;
  uintptr_t segment;  // where its segment begins: neighbours with the same are merged
  Use use = Use::free;
  Site allocated = 0;
  std::vector<StreamIndex> recorded = {};
  std::vector<Event> last_uses = {};
};
using Blocks = std::map<uintptr_t, Block>;
using Pool = std::set<std::pair<size_t, uintptr_t>>;  // best fit, then lowest address
using PoolOf = std::tuple<int, StreamIndex, bool>;

struct Life {
  Site allocated = 0, freed = 0;
  friend bool operator==(const Life& a, const Life& b) { return a.allocated == b.allocated && a.freed == b.freed; }
};

struct Device {
  size_t limit = ~size_t(0);
  MemoryStats stats;
  std::map<uintptr_t, size_t> unused;     // address space
  std::map<uintptr_t, size_t> segments;
};

struct Memory {
  std::vector<Device> devices;
  Blocks blocks;
  std::map<PoolOf, Pool> pools;
  std::set<uintptr_t> leaving;
  IntervalMap<Life> former;  // who had these bytes last
};
Memory& memory(const Locked&) {
  static Memory* one = [] {
    auto* made = new Memory;
    made->devices.resize(machine().devices);
    for (int i = 0; i < machine().devices; i++)
      made->devices[i].unused[mapping().host + i * mapping().per_device] = mapping().per_device;
    return made;
  }();
  return *one;
}

void raise_to(int64_t& peak, int64_t now) {
  if (peak < now) peak = now;
}
size_t rounded(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }
size_t segment_for(size_t size) {
  if (size <= SMALL) return SMALL_SEGMENT;
  return size < LARGE_SEGMENT / 2 ? LARGE_SEGMENT : rounded(size, 2 * MIB);
}
size_t capacity(const Device& device) { return std::min(machine().memory, device.limit); }

void poison(const Locked& locked, uintptr_t begin, const Block& block, Site site, const char* what) {
  const size_t size = block.size;
  queue(locked, block.stream, what, site, {{begin, begin + size, true}},
        [begin, size] { std::memset(seen_by_streams(reinterpret_cast<void*>(begin)), 0xFF, size); });
}

// -- blocks -------------------------------------------------------------------------------------------------------
Blocks::iterator block_around(Memory& m, uintptr_t address) {
  auto it = m.blocks.upper_bound(address);
  if (it == m.blocks.begin()) return m.blocks.end();
  --it;
  return address < it->first + it->second.size ? it : m.blocks.end();
}

Pool& pool_of(Memory& m, const Block& block) { return m.pools[{block.device, block.stream, block.small}]; }

// Puts a block into its pool, as one with its free neighbours.
void give_back(Memory& m, Blocks::iterator it) {
  auto free_neighbour = [&](Blocks::iterator other) {
    return other->second.segment == it->second.segment && other->second.use == Use::free;
  };
  it->second.use = Use::free;
  it->second.recorded.clear();
  it->second.last_uses.clear();
  if (auto next = std::next(it); next != m.blocks.end() && free_neighbour(next)) {
    pool_of(m, next->second).erase({next->second.size, next->first});
    it->second.size += next->second.size;
    m.blocks.erase(next);
  }
  if (it != m.blocks.begin() && free_neighbour(std::prev(it))) {
    auto before = std::prev(it);
    pool_of(m, before->second).erase({before->second.size, before->first});
    before->second.size += it->second.size;
    m.blocks.erase(it);
    it = before;
  }
  pool_of(m, it->second).emplace(it->second.size, it->first);
}

void take_back_what_has_left(const Locked& locked, Memory& m) {
  for (auto at = m.leaving.begin(); at != m.leaving.end();) {
    auto it = m.blocks.find(*at);
    bool done = true;
    for (auto& event : it->second.last_uses) done = done && happened(event);
    if (!done) {
      ++at;
      continue;
    }
    m.devices[it->second.device].stats.active -= int64_t(it->second.size);
    if (options_under(locked).strict) poison(locked, it->first, it->second, it->second.allocated, "memory freed");
    give_back(m, it);
    at = m.leaving.erase(at);
  }
}

Blocks::iterator from_cache(Memory& m, size_t size, int device, StreamIndex stream) {
  auto pool = m.pools.find({device, stream, size <= SMALL});
  if (pool == m.pools.end()) return m.blocks.end();
  auto best = pool->second.lower_bound({size, 0});
  if (best == pool->second.end()) return m.blocks.end();
  auto it = m.blocks.find(best->second);
  pool->second.erase(best);
  return it;
}

Blocks::iterator from_new_segment(Memory& m, size_t size, int device, StreamIndex stream) {
  auto& on = m.devices[device];
  const size_t segment = segment_for(size);
  if (size_t(on.stats.reserved) + segment > capacity(on)) return m.blocks.end();
  for (auto it = on.unused.begin(); it != on.unused.end(); ++it) {
    auto [begin, room] = *it;
    if (room < segment) continue;
    on.unused.erase(it);
    if (room > segment) on.unused[begin + segment] = room - segment;
    on.segments[begin] = segment;
    on.stats.reserved += int64_t(segment);
    on.stats.segments++;
    raise_to(on.stats.reserved_peak, on.stats.reserved);
    return m.blocks.emplace(begin, Block{segment, device, stream, size <= SMALL, begin}).first;
  }
  return m.blocks.end();
}

void split(Memory& m, Blocks::iterator it, size_t size) {
  Block& block = it->second;
  const size_t rest = block.size - size;
  if (block.small ? rest < GRAIN : rest <= SMALL) return;
  block.size = size;
  const Block right_part{rest, block.device, block.stream, block.small, block.segment};
  auto right = m.blocks.emplace(it->first + size, right_part).first;
  pool_of(m, right->second).emplace(rest, right->first);
}

// Segments that are free as a whole go back. The caller has waited until the devices were idle, as cudaFree does.
bool give_segments_back(const Locked& locked, Memory& m, int device) {
  auto& on = m.devices[device];
  bool any = false;
  for (auto it = on.segments.begin(); it != on.segments.end();) {
    auto [begin, size] = *it;
    auto block = m.blocks.find(begin);
    if (block->second.use != Use::free || block->second.size != size) {
      ++it;
      continue;
    }
    pool_of(m, block->second).erase({size, begin});
    m.blocks.erase(block);
    forget(locked, begin, begin + size);
    m.former.erase(begin, begin + size);
    madvise(seen_by_streams(reinterpret_cast<void*>(begin)), size, MADV_REMOVE);
    on.stats.reserved -= int64_t(size);
    on.stats.segments--;
    it = on.segments.erase(it);
    auto hole = on.unused.emplace(begin, size).first;
    if (auto next = std::next(hole); next != on.unused.end() && hole->first + hole->second == next->first) {
      hole->second += next->second;
      on.unused.erase(next);
    }
    if (hole != on.unused.begin() && std::prev(hole)->first + std::prev(hole)->second == hole->first) {
      std::prev(hole)->second += hole->second;
      on.unused.erase(hole);
    }
    any = true;
  }
  return any;
}

bool something_to_give_back(const Memory& m) {
  if (!m.leaving.empty()) return true;
  for (auto& device : m.devices)
    for (auto [begin, size] : device.segments) {
      auto block = m.blocks.find(begin);
      if (block->second.use == Use::free && block->second.size == size) return true;
    }
  return false;
}

std::string out_of_memory(const Memory& m, size_t bytes, int device) {
  const auto& on = m.devices[device];
  const size_t reserved = size_t(on.stats.reserved), allocated = size_t(on.stats.allocated);
  auto text = "sim out of memory. Tried to allocate " + size_text(bytes) + ". Device sim:" + std::to_string(device) +
              " has a total capacity of " + size_text(machine().memory) + " of which " +
              size_text(machine().memory - reserved) + " is free. ";
  if (on.limit < machine().memory) text += "This process may use " + size_text(on.limit) + " of it. ";
  return text + "Of the memory in use, " + size_text(allocated) + " is allocated by PyTorch, and " +
         size_text(reserved - allocated) + " is reserved by PyTorch but unallocated.";
}

Blocks::iterator give_out(const Locked& locked, Memory& m, Blocks::iterator it, size_t size, Site site) {
  const bool again = m.former.find(it->first) != nullptr;
  split(m, it, size);
  Block& block = it->second;
  block.use = Use::live;
  block.allocated = site;
  auto& stats = m.devices[block.device].stats;
  stats.allocations++;
  stats.allocated += int64_t(block.size);
  stats.active += int64_t(block.size);
  raise_to(stats.allocated_peak, stats.allocated);
  raise_to(stats.active_peak, stats.active);
  poison(locked, it->first, block, site, again ? "memory given out again" : "memory given out");
  return it;
}

}  // namespace

std::string size_text(size_t bytes) {
  char text[32];
  if (bytes >= 1024 * MIB)
    std::snprintf(text, sizeof text, "%.2f GiB", double(bytes) / double(1024 * MIB));
  else if (bytes >= MIB)
    std::snprintf(text, sizeof text, "%.2f MiB", double(bytes) / double(MIB));
  else if (bytes >= KIB)
    std::snprintf(text, sizeof text, "%.2f KiB", double(bytes) / double(KIB));
  else
    std::snprintf(text, sizeof text, "%zu bytes", bytes);
  return text;
}

void* device_malloc(size_t bytes, int device, StreamIndex stream) {
  if (!bytes) return nullptr;
  refuse_if_forked();
  mapping();
  const Site site = site_here();
  const size_t size = rounded(bytes, GRAIN);
  for (bool retried = false;; retried = true) {
    {
      Locked locked;
      auto& m = memory(locked);
      take_back_what_has_left(locked, m);
      auto it = from_cache(m, size, device, stream);
      if (it == m.blocks.end()) it = from_new_segment(m, size, device, stream);
      if (it == m.blocks.end() && retried && give_segments_back(locked, m, device))
        it = from_new_segment(m, size, device, stream);
      if (it != m.blocks.end())
        return reinterpret_cast<void*>(give_out(locked, m, it, size, site)->first);
      auto& stats = m.devices[device].stats;
      if (retried) {
        stats.ooms++;
        throw OutOfMemory(out_of_memory(m, bytes, device));
      }
      stats.retries++;
    }
    wait_until_idle();
  }
}

void device_free(void* pointer) {
  if (!pointer || forked() || ending()) return;
  const Site site = site_here();
  Locked locked;
  auto& m = memory(locked);
  auto it = m.blocks.find(uintptr_t(pointer));
  if (it == m.blocks.end() || it->second.use != Use::live)
    throw std::logic_error("sim: device memory is freed that was not allocated");
  Block& block = it->second;
  const uintptr_t begin = it->first, end = begin + block.size;
  auto& stats = m.devices[block.device].stats;
  stats.frees++;
  stats.allocated -= int64_t(block.size);
  settle(locked, begin, end, known_to_any_host(locked));
  for (StreamIndex other : block.recorded) {
    block.last_uses.push_back(quiet_event(locked, other));
    settle(locked, begin, end, block.last_uses.back().clock);
  }
  // A race here is reported with the present block: only from here on is it a former one.
  if (block.last_uses.empty() && options_under(locked).strict) poison(locked, begin, block, site, "memory freed");
  m.former.erase(begin, end);
  m.former.update(begin, end, [&](Life& life, uintptr_t, uintptr_t) { life = {block.allocated, site}; });
  if (!block.last_uses.empty()) {
    block.use = Use::leaving;
    block.allocated = site;  // from here on, where it was freed
    m.leaving.insert(begin);
    return;
  }
  stats.active -= int64_t(block.size);
  give_back(m, it);
}

void record_stream(void* pointer, StreamIndex stream) {
  if (forked() || ending() || !is_device(pointer)) return;
  Locked locked;
  auto& m = memory(locked);
  auto it = block_around(m, uintptr_t(pointer));
  if (it == m.blocks.end() || it->second.use != Use::live || it->second.stream == stream) return;
  auto& recorded = it->second.recorded;
  if (std::find(recorded.begin(), recorded.end(), stream) == recorded.end()) recorded.push_back(stream);
}

void empty_cache() {
  refuse_if_forked();
  if (!g_mapping.load()) return;
  {
    Locked locked;
    if (!something_to_give_back(memory(locked))) return;
  }
  wait_until_idle();
  Locked locked;
  auto& m = memory(locked);
  take_back_what_has_left(locked, m);
  for (int device = 0; device < machine().devices; device++) give_segments_back(locked, m, device);
}

bool is_device(const void* pointer) {
  const Mapping* mapped = g_mapping.load();
  return mapped && uintptr_t(pointer) - mapped->host < mapped->size;
}
int device_of_pointer(const void* pointer) {
  const Mapping& mapped = mapping();
  return int((uintptr_t(pointer) - mapped.host) / mapped.per_device);
}
void* seen_by_streams(const void* pointer) {
  if (!is_device(pointer)) return const_cast<void*>(pointer);
  const Mapping& mapped = *g_mapping.load();
  return reinterpret_cast<void*>(uintptr_t(pointer) - mapped.host + mapped.streams);
}

MemoryNote note_of_device_memory(const Locked& locked, uintptr_t address) {
  auto& m = memory(locked);
  MemoryNote note;
  note.what = "device memory of sim:" + std::to_string(device_of_pointer(reinterpret_cast<void*>(address)));
  auto it = block_around(m, address);
  if (it != m.blocks.end() && it->second.use == Use::live) {
    note.what += " (" + size_text(it->second.size) + ")";
    note.allocated = it->second.allocated;
    note.begin = it->first, note.end = it->first + it->second.size;
  }
  if (const Life* life = m.former.find(address)) {
    note.allocated_before = life->allocated;
    note.freed_before = life->freed;
  }
  return note;
}

MemoryStats memory_stats(int device) {
  if (!g_mapping.load()) return {};
  Locked locked;
  return memory(locked).devices.at(device).stats;
}
void reset_peak_stats(int device) {
  if (!g_mapping.load()) return;
  Locked locked;
  auto& stats = memory(locked).devices.at(device).stats;
  stats.allocated_peak = stats.allocated;
  stats.reserved_peak = stats.reserved;
  stats.active_peak = stats.active;
}
size_t total_memory(int) { return machine().memory; }
void set_memory_limit(int device, size_t bytes) {
  refuse_if_forked();
  mapping();
  Locked locked;
  memory(locked).devices.at(device).limit = bytes;
}

}  // namespace sim
