// torch's device "sim": the device guard with streams and events, and the hooks of PrivateUse1.
#include "torch_device.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

namespace {
thread_local DeviceIndex t_device = 0;
thread_local std::vector<StreamIndex> t_streams;  // the current one of each device

StreamIndex& current(DeviceIndex device) {
  if (t_streams.empty())
    for (int d = 0; d < devices(); d++) t_streams.push_back(default_stream(d));
  return t_streams.at(device < 0 ? t_device : device);
}
}  // namespace

DeviceIndex current_device() { return t_device; }
void set_current_device(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < devices(), "there is no device sim:", int(device), ": ZERO_SIM_DEVICES is ",
              devices());
  t_device = device;
}
StreamIndex current_stream(DeviceIndex device) { return current(device); }

// torch's number of a stream is the one on its device.
StreamIndex index_of(const Stream& s) { return numbered_stream(s.device_index(), int(s.id())); }
Stream stream_at(StreamIndex index) {
  return Stream(Stream::UNSAFE, Device(kSim, DeviceIndex(device_of(index))), number_on_device(index));
}

namespace {
// Methods that some versions of torch lack are not marked `override`.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kSim; }

  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return Device(kSim, t_device); }
  void setDevice(Device d) const override {
    if (d.index() >= 0) set_current_device(d.index());
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(devices()); }
  void synchronizeDevice(const DeviceIndex d) const override {
    count_wait("device synchronize");
    WithoutGil release;
    wait_for_device(d < 0 ? t_device : d);
  }

  Stream getStream(Device d) const override { return stream_at(current(d.index())); }
  Stream getDefaultStream(Device d) const override { return stream_at(default_stream(number(d))); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return stream_at(pool_stream(number(d))); }
  Stream getNewStream(Device d, int) const override { return stream_at(pool_stream(number(d))); }
  Stream exchangeStream(Stream s) const override {
    StreamIndex& slot = current(s.device_index());
    Stream before = stream_at(slot);
    slot = index_of(s);
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const { return reinterpret_cast<void*>(intptr_t(index_of(s))); }
  bool queryStream(const Stream& s) const override { return query_stream(index_of(s)); }
  void synchronizeStream(const Stream& s) const override {
    about_to_wait("stream synchronize");
    WithoutGil release;
    wait_for_stream(index_of(s));
  }
  bool isStreamCapturing(const Stream&) const { return false; }

  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    sim::record(*static_cast<Event*>(*event), index_of(s));
  }
  void block(void* event, const Stream& s) const override {
    if (event) stream_waits(index_of(s), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return !event || query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_wait("event synchronize");
    WithoutGil release;
    wait_for_event(*static_cast<Event*>(event));
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded before their elapsed time is asked for");
    return milliseconds_between(*static_cast<Event*>(first), *static_cast<Event*>(second));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    record_stream(p.get(), index_of(s));
  }

 private:
  static int number(Device d) { return d.index() < 0 ? t_device : d.index(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return DeviceIndex(devices()); }
  void setCurrentDevice(DeviceIndex d) const override { set_current_device(d); }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(t_device, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? t_device : exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return make_generator(d); }
  Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(is_device(p), "the address is not in a simulated device's memory");
    return Device(kSim, DeviceIndex(device_of_pointer(p)));
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return at::getHostAllocator(kSim); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override { resize_storage(storage, n); }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  register_host_allocator();
  return true;
}();
}  // namespace
}  // namespace sim
