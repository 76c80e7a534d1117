// Every operator of torch as a kernel that runs later: shapes from Meta, memory now, the CPU's kernel on the stream.
#include "torch_operators.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <unistd.h>

#include <future>
#include <map>
#include <mutex>
#include <set>

#include "torch_values.hpp"

extern "C" void omp_set_num_threads(int) __attribute__((weak));

namespace sim {
using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

std::atomic<Waiting> waiting{Waiting::kIgnore};

// -- the queue, and waiting for it ----------------------------------------------------------------------------------
namespace {
std::atomic<uint64_t> queued{0}, unlike_cuda{0};
std::mutex counts_lock;
Counts counted;

// The same bits whatever torch.set_num_threads says, and no more threads than streams.
const bool one_thread_a_stream = [] {
  stream_thread_begins = [] {
    at::get_num_threads();  // sets OpenMP's number for this thread, once
    if (omp_set_num_threads) omp_set_num_threads(1);
  };
  return true;
}();
}  // namespace

Counts counts() {
  std::lock_guard<std::mutex> lock(counts_lock);
  counted.queued = queued;
  counted.unlike_cuda = unlike_cuda;
  return counted;
}
void count_wait(const char* what) {
  const Site site = capture_site ? capture_site() : 0;
  std::lock_guard<std::mutex> lock(counts_lock);
  counted.waits[{what, site, gettid()}]++;
}
void count_copy(const char* what, bool pageable, size_t bytes) {
  std::lock_guard<std::mutex> lock(counts_lock);
  auto& [times, total] = counted.copies[{what, pageable}];
  times++, total += bytes;
}

void queue(StreamIndex stream, const std::string& what, const std::vector<Extent>& extents, std::function<void()> run) {
  queued++;
  launch(stream, what, extents, [run = std::move(run)] {
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      run();
    } catch (const c10::Error& e) {
      throw std::runtime_error(e.what_without_backtrace());
    }
  });
}

void about_to_wait(const char* what) {
  count_wait(what);
  const Waiting mode = waiting;
  TORCH_CHECK(mode != Waiting::kError, "called a synchronizing operation of the device: ", what);
  if (mode == Waiting::kWarn) TORCH_WARN("called a synchronizing operation of the device: ", what);
}
void wait_as_cuda(StreamIndex stream, const char* what) {
  about_to_wait(what);
  WithoutGil release;
  wait_for_stream(stream);
}

namespace {
// -- one call -------------------------------------------------------------------------------------------------------
class Call {
 public:
  Call(const c10::OperatorHandle& op, const Facts& facts, std::vector<IValue> args)
      : op_(op), facts_(facts), args_(std::move(args)) {}

  // The device that everything is on. None: a foreach over several, which is a call for each of its tensors.
  std::optional<Device> device() const {
    std::optional<Device> found;
    bool several = false;
    for (size_t i = 0; i < args_.size(); i++)
      each_tensor(args_[i], [&](const Tensor& t) {
        if (on_device(t)) {
          if (found && *found != t.device()) {
            TORCH_CHECK(facts_.foreach, "Expected all tensors to be on the same device, but found at least two devices, ",
                        *found, " and ", t.device(), "! (when calling ", op_.schema().name(), ")");
            several = true;
          }
          found = t.device();
        } else if (!(t.device().is_cpu() && !facts_.writes[i] && (t.dim() == 0 || facts_.host_indices))) {
          TORCH_CHECK(facts_.foreach, "Expected all tensors to be on the same device, but found at least two devices, ",
                      Device(kSim, current_device()), " and ", t.device(), "! (when calling ", op_.schema().name(), ")");
          several = true;
        }
      });
    if (several) return std::nullopt;
    for (const IValue& a : args_)
      if (!found && a.isDevice() && a.toDevice().type() == kSim) found = a.toDevice();
    return found && found->has_index() ? *found : Device(kSim, current_device());
  }

  void run(Device device, Stack* results) {
    stream_ = current_stream(device.index());
    data_dependent_ = facts_.data_dependent && !(facts_.host_indices && indexed_by_numbers());
    if (facts_.queueable && !data_dependent_) shapes_ = shapes_of(op_, facts_, args_);
    if (shapes_) {
      reshape_outs();
      bind(device);
      put_in_queue(device, results);
    } else {
      bind(device);
      run_now(device, results);
    }
  }

 private:
  bool indexed_by_numbers() const {  // not by masks, whose count decides the result's shape
    bool numbers = true;
    for (const IValue& a : args_)
      if (a.isList())
        each_tensor(a, [&](const Tensor& t) { numbers = numbers && t.scalar_type() != at::kBool && t.scalar_type() != at::kByte; });
    return numbers;
  }

  void reshape_outs() const {
    for (size_t i = 0; i < shapes_->arguments.size(); i++) {
      if (!facts_.writes[i]) continue;
      const auto mine = tensors_in(args_[i]), theirs = tensors_in(shapes_->arguments[i]);
      for (size_t k = 0; k < mine.size(); k++)
        if (on_device(mine[k]) && mine[k].sizes() != theirs[k].sizes()) reshape(mine[k], theirs[k]);
    }
  }
  static void reshape(const Tensor& t, const Tensor& like) {
    t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    int64_t last = t.storage_offset();
    for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
    const size_t needed = t.numel() ? size_t(last + 1) * t.itemsize() : 0;
    if (needed > t.storage().nbytes()) resize_storage(t.storage(), needed);
  }

  // The arguments as the stream's thread is given them. Values of the host are copied, as a GPU's launch copies them.
  void bind(Device device) {
    for (size_t i = 0; i < args_.size(); i++) {
      const IValue& a = args_[i];
      const bool training = facts_.training >= 0 && args_[facts_.training].isBool() && args_[facts_.training].toBool();
      const bool writes = facts_.writes[i] || (facts_.running[i] && training);
      if (a.isDevice() && a.toDevice().type() == kSim) {
        bound_.emplace_back(Device(at::kCPU));
      } else if (int(i) == facts_.generator) {
        bound_.emplace_back(seeded_for_launch(a.isGenerator() ? a.toGenerator() : default_generator(device.index())));
      } else {
        bound_.push_back(map_tensors(a, [&](const Tensor& t) {
          if (facts_.outs[i] && !shapes_) return at::empty({0}, t.options().device(at::kCPU));
          if (on_device(t)) {
            add_extents(t, writes, extents_);
            return streams_.of(t);
          }
          Tensor copied = t.detach().clone();
          if (t.unsafeGetTensorImpl()->is_wrapped_number()) copied.unsafeGetTensorImpl()->set_wrapped_number(true);
          return copied;
        }));
      }
    }
  }

  static Tensor make(const Tensor& like, Device device) {
    bool repeats = false;  // expanded: nothing can be written to it
    for (int64_t d = 0; d < like.dim(); d++) repeats = repeats || (like.stride(d) == 0 && like.size(d) > 1);
    return repeats ? empty(like.sizes(), like.scalar_type(), std::nullopt, device.index())
                   : empty_strided(like.sizes(), like.strides(), like.scalar_type(), device.index());
  }

  void put_in_queue(Device device, Stack* results) {
    auto into = std::vector<std::vector<Tensor>>(facts_.source.size());  // by result, if it is new
    bool views_only = !facts_.source.empty();
    for (size_t r = 0; r < facts_.source.size(); r++) {
      const int source = facts_.source[r];
      views_only = views_only && source >= 0 && !facts_.written[r];
      if (source >= 0 && facts_.written[r]) {
        results->push_back(args_[source]);
      } else if (source >= 0) {
        const Tensor base = args_[source].toTensor();
        results->push_back(map_tensors(shapes_->results[r], [&](const Tensor& t) { return view_like(base, t); }));
      } else {
        results->push_back(map_tensors(shapes_->results[r], [&](const Tensor& t) {
          Tensor made = make(t, device);
          add_extents(made, true, extents_);
          into[r].push_back(streams_.of(made));
          return made;
        }));
      }
    }
    if (views_only) return;
    queue(stream_, op_.schema().name(), extents_, [op = op_, given = std::move(bound_), into = std::move(into)]() mutable {
      op.callBoxed(&given);
      for (size_t r = 0; r < into.size(); r++) {
        size_t k = 0;
        if (into[r].empty()) continue;
        each_tensor(given[r], [&](const Tensor& t) {
          TORCH_CHECK(k < into[r].size() && into[r][k].sizes() == t.sizes() && into[r][k].dtype() == t.dtype(),
                      "the CPU's kernel of ", op.schema().name(), " gave another result than Meta's: ", t.dtype(), " ",
                      t.sizes());
          into[r][k++].copy_(t);
        });
      }
      given.clear();
    });
  }

  void run_now(Device device, Stack* results) {
    auto given = std::make_shared<Stack>(std::move(bound_));
    auto ended = std::make_shared<std::promise<void>>();
    queue(stream_, op_.schema().name(), extents_, [op = op_, given, ended] {
      try {
        op.callBoxed(given.get());
        ended->set_value();
      } catch (...) {
        ended->set_exception(std::current_exception());
      }
    });
    auto end = ended->get_future();
    if (data_dependent_) {
      wait_as_cuda(stream_, op_.schema().name().c_str());
    } else {  // a wait that the detector must not take for an order
      unlike_cuda++;
      WithoutGil release;
      end.wait();
    }
    end.get();
    for (size_t r = 0; r < facts_.source.size(); r++) {
      const int source = facts_.source[r];
      if (source >= 0) {
        if (facts_.outs[source]) {
          const Tensor out = args_[source].toTensor(), made = (*given)[r].toTensor();
          if (out.sizes() != made.sizes()) reshape(out, made);
          deliver(made, out);
        }
        results->push_back(args_[source]);
      } else {
        results->push_back(map_tensors((*given)[r], [&](const Tensor& t) {
          TORCH_CHECK(t.layout() == at::kStrided, op_.schema().name(), ": sim has strided tensors only, not ", t.layout());
          Tensor made = make(t, device);
          deliver(t, made);
          return made;
        }));
      }
    }
  }

  void deliver(const Tensor& result, const Tensor& into) {
    std::vector<Extent> written;
    add_extents(into, true, written);
    queue(stream_, op_.schema().name(), written,
          [into = Mirror(at::kCPU).of(into), result]() mutable { into.copy_(result); });
  }

  const c10::OperatorHandle& op_;
  const Facts& facts_;
  std::vector<IValue> args_;
  StreamIndex stream_ = 0;
  bool data_dependent_ = false;
  std::shared_ptr<const Shapes> shapes_;  // null: known when the kernel has run
  Stack bound_;
  Mirror streams_{at::kCPU};
  std::vector<Extent> extents_;
};

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  const Facts& facts = facts_of(op);
  const size_t n = facts.writes.size();
  Call call(op, facts, {stack->end() - n, stack->end()});
  const auto device = call.device();
  if (!device) {
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
    return;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(DispatchKey::CPU), op.schema().name(),
                              " has no kernel for the CPU, and the simulated accelerator runs the CPU's kernels");
  stack->resize(stack->size() - n);
  c10::DeviceGuard guard(*device);
  at::AutoDispatchBelowADInplaceOrView below;
  call.run(*device, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

// Every operator with a CPU kernel is one kernel, also where torch would decompose it for other devices. So its results
// have the CPU's bits, and Meta is asked once. Operators that are one launch on a GPU are one kernel too.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  static const std::set<std::string> launches{"aten::convolution", "aten::convolution_backward"};
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema()) continue;
    const bool taken_apart = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                             op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                             op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool out = name.overload_name.find("out") != std::string::npos;
    if ((taken_apart && op->hasKernelForDispatchKey(DispatchKey::CPU)) ||
        (!out && (launches.count(name.name) || name.name.rfind("aten::_foreach_", 0) == 0)))
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
}
}  // namespace
}  // namespace sim
