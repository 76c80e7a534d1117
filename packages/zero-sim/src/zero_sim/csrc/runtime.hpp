// The parts of a simulated accelerator: streams, events, memory and the race detector. Owns the interface between the
// runtime (this folder's files without torch headers) and torch's side of it (torch_*.cpp, bindings.cpp).
//
// Every function may be called from any host thread, without the GIL being needed. Functions that block the caller
// (those named `wait_for_...`) must be called with the GIL released.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace sim {

// -- the detector -------------------------------------------------------------------------------------------------
// An actor is whatever has an order of its own: a stream, a host thread, or a piece of native work in flight (a task).
// A clock holds, for each actor, how much of that actor's past is known to have happened.
using Actor = uint32_t;
using Clock = std::vector<uint64_t>;  // indexed by actor; entries past the end are 0

struct Extent {  // bytes [begin, end), of device memory or of host memory that copies may use (pinned, registered)
  uintptr_t begin, end;
  bool write;
};

// A place in the host program: captured when work is queued, turned into text only for a report. 0: unknown.
// Equal places should have equal numbers, which stay valid for ever. Neither function is called under a lock; the first
// is called by whichever thread queues work, the second by `take_races` and for the error of a failed kernel.
using Site = uint32_t;
extern Site (*capture_site)();
extern std::string (*describe_site)(Site);

struct Party {          // one side of a race
  std::string actor;    // "stream 3 of sim:0", "default stream of sim:0", "host thread MainThread", "task"
  std::string what;     // "aten::add", "copy to host", "free", "zero_nvme read" ...
  std::string site;     // "train.py:12 in step < train.py:40 in main", innermost frame first
};
struct Race {
  std::string kind;     // "read after write", "write after read", "write after write"
  uintptr_t begin, end; // the bytes of the conflict
  std::string memory;   // "device memory of sim:0, allocated at <site>", "pinned host memory, ..." 
  Party now, before;
  std::string missing;  // the edge that would order them, as a sentence
  int others = 0;       // more operations at `now.site` that lack the same edge on the same memory
};
std::vector<Race> take_races();  // those found since the last call; empties the list
size_t race_count();             // without taking them

// A synchronisation object of the host: a lock, a queue, a thread that was joined, autograd's queue.
struct Meeting {
  Clock clock;
};
void leave_word(Meeting&);   // release: what this host thread has seen so far is known to whoever hears it
void hear_word(Meeting&);    // acquire
void name_host_thread(const std::string& name);

// A call of backward, whose nodes autograd runs in threads of its own. Whatever one of these threads does for the call
// comes after its beginning and before its end. `backward_of_this_thread` finds the call that the thread works for now
// (null: none), so that hooks which run before the first node's kernel are covered too. It is called under the lock.
struct Backward;
std::shared_ptr<Backward> begin_backward();
void hear_backward();  // at the start of a node, in its thread: orders it after the call's other threads so far
void end_backward(const std::shared_ptr<Backward>&);
extern Backward* (*backward_of_this_thread)();

// The host (native code or a CPU kernel) touches memory now, in the calling thread. Only device memory and pinned or
// registered memory is followed. Does nothing in a stream's thread: a kernel's extents are given at its launch.
void host_access(const char* what, const std::vector<Extent>& extents);
// Native work that runs beside its caller, until `finish`: an asynchronous read into pinned memory, say.
struct Task;
std::shared_ptr<Task> begin_task(const std::string& what, const std::vector<Extent>& extents);
void finish_task(const std::shared_ptr<Task>&);  // by each thread that learnt that it has ended; may be called twice

// -- streams and events ---------------------------------------------------------------------------------------------
using StreamIndex = int;  // dense over all devices; 0 .. devices()-1 are the default streams
int devices();
StreamIndex default_stream(int device);
StreamIndex pool_stream(int device);  // one of 32 a device, in turn
int device_of(StreamIndex);
int number_on_device(StreamIndex);  // 0: the default stream; those of the pool from 1
StreamIndex numbered_stream(int device, int number);

// Queue `run` on a stream. Its extents are checked against everything not ordered before it. Returns at once.
// Throws DeviceError first if an earlier kernel has failed (as CUDA reports sticky errors: later, elsewhere).
void launch(StreamIndex, const std::string& what, const std::vector<Extent>&, std::function<void()> run);

struct EventState;
struct Event {
  std::shared_ptr<EventState> state;  // null: never recorded
  Clock clock;
};
void record(Event&, StreamIndex);
void stream_waits(StreamIndex, const Event&);  // device side; the host goes on
bool query(const Event&);                      // true also orders the caller after it
void wait_for_event(const Event&);
bool query_stream(StreamIndex);
void wait_for_stream(StreamIndex);
void wait_for_device(int device);
double milliseconds_between(const Event&, const Event&);
bool in_stream_thread();

extern void (*stream_thread_begins)();  // called first by every stream's thread: the number of OpenMP threads, say

struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void raise_pending();  // throws DeviceError for a kernel that failed, once

// -- device memory: addresses that fault on the host -------------------------------------------------------------
struct OutOfMemory : std::bad_alloc {
  explicit OutOfMemory(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};
// nullptr for 0; throws OutOfMemory. Blocks until the devices are idle where only the cached blocks would make room.
void* device_malloc(size_t bytes, int device, StreamIndex);
void device_free(void*);
void record_stream(void*, StreamIndex);  // any address inside the block
void* seen_by_streams(const void*);      // where stream threads see the same bytes; host addresses unchanged
bool is_device(const void*);
int device_of_pointer(const void*);
void empty_cache();  // blocks like a wait_for_... function, if there is anything to give back
void install_fault_handler();  // names the mistake when the host touches device memory; again after faulthandler's
struct MemoryStats {
  int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0, active = 0, active_peak = 0;
  int64_t allocations = 0, frees = 0, segments = 0, retries = 0, ooms = 0;
};
MemoryStats memory_stats(int device);
void reset_peak_stats(int device);
size_t total_memory(int device);
void set_memory_limit(int device, size_t bytes);

// -- host memory that copies may use asynchronously ---------------------------------------------------------------
void* pinned_malloc(size_t bytes);
void pinned_free(void*);
// The block is reused only after the work that the stream has been given before the block is freed. Does nothing and
// returns false if the address is not a block's first byte, as CUDA's allocator does.
bool pinned_record(void*, StreamIndex);
int host_register(void*, size_t bytes);  // 0, or the number cudaHostRegister would return
int host_unregister(void*);
bool is_pinned(const void*);
bool pinned_in_one_piece(const void*, size_t bytes);  // all of it in one registered range, or in one pinned block
bool touches_pinned(uintptr_t begin, uintptr_t end);

// -- options ------------------------------------------------------------------------------------------------------
struct Options {
  bool races = true;           // detect races
  bool strict = false;         // also poison memory when it is freed, which is a write that the detector sees
  uint64_t seed = 0;           // of the jitter
  int64_t latency_us = 0;      // of every queued piece of work, from its launch
  int64_t jitter_us = 0;       // at most this much more, drawn from `seed` per stream
};
Options options();
void set_options(const Options&);
void set_stream_latency(StreamIndex, int64_t latency_us, int64_t jitter_us);
void spin(StreamIndex, int64_t us);  // a kernel that takes this long
uint64_t kernels_run();

// The end of the process: streams stop after their current kernel, queued work is dropped, and later calls do nothing.
// Called from Python's atexit (GIL released), before the libraries whose kernels run are unloaded.
void stop();
}  // namespace sim
