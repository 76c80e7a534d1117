// torch's allocators over the runtime's memory: the device's caching allocator, pinned memory, storages that grow.
#include "torch_device.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/version.h>

#include <cstring>

namespace sim {
using c10::Device;
using c10::DeviceIndex;

namespace {
void* allocate_for(DeviceIndex device, size_t nbytes) {
  if (!nbytes) return nullptr;
  WithoutGil release;  // it may wait until memory in use by streams is free
  try {
    return device_malloc(nbytes, device, current_stream(device));
  } catch (const OutOfMemory& e) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, e.what());
  }
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
using Base = c10::DeviceAllocator;
#else
using Base = c10::Allocator;
#endif

// Methods that some versions of torch lack are not marked `override`.
struct DeviceMemory final : Base {
  c10::DataPtr allocate(size_t n) override {
    void* p = allocate_for(current_device(), n);
    return {p, p, &device_free, Device(kSim, current_device())};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &device_free; }
  void copy_data(void* into, const void* from, std::size_t n) const override {
    const auto a = uintptr_t(into), b = uintptr_t(from);
    queue(current_stream(), "copy of a storage", {{b, b + n, false}, {a, a + n, true}},
          [into = seen_by_streams(into), from = seen_by_streams(from), n] { std::memcpy(into, from, n); });
  }
  bool initialized() { return true; }
  void emptyCache(std::pair<unsigned long long, unsigned long long>) { emptyCache(); }  // of a pool; there are none
  void emptyCache() {
    WithoutGil release;
    empty_cache();
  }
  void recordStream(const c10::DataPtr& p, c10::Stream s) { record_stream(p.get(), index_of(s)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) {
    const MemoryStats s = memory_stats(d);
    c10::CachingDeviceAllocator::DeviceStats out;
    out.allocation[0].current = s.allocations - s.frees;
    out.allocation[0].allocated = s.allocations, out.allocation[0].freed = s.frees;
    out.segment[0].current = s.segments;
    out.allocated_bytes[0].current = s.allocated, out.allocated_bytes[0].peak = s.allocated_peak;
    out.reserved_bytes[0].current = s.reserved, out.reserved_bytes[0].peak = s.reserved_peak;
    out.active_bytes[0].current = s.active, out.active_bytes[0].peak = s.active_peak;
    out.num_alloc_retries = s.retries, out.num_ooms = s.ooms;
    return out;
  }
  void resetAccumulatedStats(DeviceIndex) {}
  void resetPeakStats(DeviceIndex d) { reset_peak_stats(d); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) {
    const size_t total = total_memory(d);
    return {total - memory_stats(d).reserved, total};
  }
};
DeviceMemory the_device_memory;
REGISTER_ALLOCATOR(kSim, &the_device_memory);

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? pinned_malloc(n) : nullptr;
    return {p, p, &pinned_free, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pinned_free; }
  void copy_data(void* into, const void* from, std::size_t n) const override { std::memcpy(into, from, n); }
  bool record_event(void* p, void*, c10::Stream s) override { return pinned_record(p, index_of(s)); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory the_pinned_memory;

// torch lets one tensor's data be replaced by another's where both have a dense backend from a list that PrivateUse1 is
// not in (TensorImpl::has_compatible_shallow_copy_type). With CPU's bit too, sim tensors are in it: module.to("sim")
// keeps Parameters, and ties. Nothing else asks for the bit: operators go to the highest backend, which is PrivateUse1.
const c10::DispatchKeySet kKeys =
    c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | c10::DispatchKeySet(c10::DispatchKey::CPU);
}  // namespace

void register_host_allocator() { at::setHostAllocator(kSim, &the_pinned_memory); }

at::Tensor empty(at::IntArrayRef size, at::ScalarType type, std::optional<at::MemoryFormat> format, DeviceIndex device) {
  c10::DeviceGuard guard(Device(kSim, device));
  return at::detail::empty_generic(size, &the_device_memory, kKeys, type, format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType type, DeviceIndex device) {
  c10::DeviceGuard guard(Device(kSim, device));
  return at::detail::empty_strided_generic(size, stride, &the_device_memory, kKeys, type);
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "this storage cannot be resized");
  c10::DeviceGuard guard(impl->device());
  c10::DataPtr data = nbytes ? the_device_memory.allocate(nbytes) : c10::DataPtr(nullptr, impl->device());
  if (const size_t kept = std::min(nbytes, impl->nbytes()); kept && impl->data())
    the_device_memory.copy_data(data.get(), impl->data(), kept);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(nbytes);
}
}  // namespace sim
