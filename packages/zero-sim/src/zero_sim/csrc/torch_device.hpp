// What torch's side of the accelerator shares: the device's name, current streams, memory, tensors as kernels see them.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "runtime.hpp"
#include "sites.hpp"

namespace sim {
constexpr auto kSim = c10::DeviceType::PrivateUse1;

// -- torch_device.cpp: devices and streams --
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex);
StreamIndex current_stream(c10::DeviceIndex device = -1);
StreamIndex index_of(const c10::Stream&);
c10::Stream stream_at(StreamIndex);

// -- torch_memory.cpp --
at::Tensor empty(at::IntArrayRef size, at::ScalarType, std::optional<at::MemoryFormat>, c10::DeviceIndex);
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType, c10::DeviceIndex);
void resize_storage(const c10::Storage&, size_t nbytes);  // keeps what fits, as torch's resize_ does
void register_host_allocator();

// -- torch_generator.cpp --
at::Generator& default_generator(c10::DeviceIndex);
at::Generator make_generator(c10::DeviceIndex);
at::Generator seeded_for_launch(const at::Generator&);  // a CPU generator for one kernel; advances the device's

// -- torch_tensors.cpp: tensors as kernels see them --
inline bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == kSim; }
// The bytes that a tensor's elements are in, as runs: exact up to some thousand runs, then closed over inner gaps.
void add_extents(const at::Tensor&, bool write, std::vector<Extent>& into);
// Views of the same shapes on another backend, which alias each other as the originals do. They own nothing.
class Mirror {
 public:
  explicit Mirror(c10::DeviceType type) : type_(type) {}  // CPU: over the memory that streams see; Meta: over none
  at::Tensor of(const at::Tensor&);

 private:
  c10::DeviceType type_;
  std::unordered_map<const void*, c10::Storage> storages_;
  std::unordered_map<const void*, at::Tensor> tensors_;
};
// A view of `base`'s storage with the geometry and type of `like`, whose offset counts from base's first element.
at::Tensor view_like(const at::Tensor& base, const at::Tensor& like);

// -- torch_dispatch.cpp: work of its own for the stream, and waiting for it --
// Queues `run` on the stream, below autograd. Nothing that it captures may own device memory.
void queue(StreamIndex, const std::string& what, const std::vector<Extent>&, std::function<void()> run);
// The host waits where CUDA's would: counted, and refused under set_sync_debug_mode("error").
void wait_as_cuda(StreamIndex, const char* what);
void about_to_wait(const char* what);
void count_wait(const char* what);  // one that CUDA's set_sync_debug_mode does not see, or that was asked for
void count_copy(const char* what, bool pageable, size_t bytes);
enum class Waiting { kIgnore, kWarn, kError };
extern std::atomic<Waiting> waiting;
struct Counts {  // since the process began
  uint64_t queued = 0, unlike_cuda = 0;  // the last: the host waited although CUDA's would not
  std::map<std::pair<std::string, bool>, std::pair<uint64_t, uint64_t>> copies;  // kind, pageable: how many, bytes
  std::map<std::tuple<std::string, Site, int>, uint64_t> waits;  // what, where, in which thread of the system
};
Counts counts();

}  // namespace sim
