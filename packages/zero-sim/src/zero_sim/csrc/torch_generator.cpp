// Random numbers: a generator is a seed and an offset, like CUDA's; each kernel gets a CPU generator of its own.
#include "torch_device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include <cstring>

namespace sim {
namespace {
uint64_t mixed(uint64_t x) {  // splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex d)
      : GeneratorImpl(c10::Device(kSim, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kSim; }

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  uint64_t draw() {
    offset_ += 4;  // as CUDA's kernels do at least
    return mixed(seed_ + mixed(offset_));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {  // 16 bytes, as CUDA's
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    auto* p = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(p, &seed_, 8);
    std::memcpy(p + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device_type() == at::kCPU && state.dtype() == at::kByte && state.is_contiguous() &&
                    (state.numel() == 16 || state.numel() == 8),
                "the state of a generator of sim is 16 (or, without the offset, 8) contiguous bytes on the CPU, not ",
                state.numel(), " of ", state.dtype(), " on ", state.device());
    const auto* p = static_cast<const char*>(state.data());
    std::memcpy(&seed_, p, 8);
    offset_ = 0;
    if (state.numel() == 16) std::memcpy(&offset_, p + 8, 8);
  }

 private:
  SimGenerator* clone_impl() const override {
    auto* made = new SimGenerator(device_.index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};
}  // namespace

at::Generator make_generator(c10::DeviceIndex d) {
  return at::make_generator<SimGenerator>(d < 0 ? current_device() : d);
}
at::Generator& default_generator(c10::DeviceIndex d) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < devices(); i++) made->push_back(make_generator(c10::DeviceIndex(i)));
    return made;
  }();
  return all->at(d < 0 ? current_device() : d);
}

at::Generator seeded_for_launch(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kSim, "Expected a '", c10::Device(kSim).str(),
              "' device type for generator but found '", generator.device().str(), "'");
  auto* impl = static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(impl->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(impl->draw());
}
}  // namespace sim
