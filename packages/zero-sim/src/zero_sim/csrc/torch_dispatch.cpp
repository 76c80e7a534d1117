// Every operator of torch as a kernel that runs later: shapes from Meta, memory now, the CPU's kernel on the stream.
#include "torch_device.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <future>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>

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
std::atomic<uint64_t> queued{0}, waited{0}, unlike_cuda{0};
std::mutex waited_lock;
std::map<std::string, uint64_t> waited_for;

// The same bits whatever torch.set_num_threads says, and no more threads than streams.
const bool one_thread_a_stream = [] {
  stream_thread_begins = [] {
    at::get_num_threads();  // sets OpenMP's number for this thread, once
    if (omp_set_num_threads) omp_set_num_threads(1);
  };
  return true;
}();

void count_wait(const char* what, std::atomic<uint64_t>& total) {
  total++;
  std::lock_guard<std::mutex> lock(waited_lock);
  waited_for[what]++;
}
}  // namespace

Counts counts() { return {queued, waited, unlike_cuda}; }
std::vector<std::pair<std::string, uint64_t>> waited_operations() {
  std::lock_guard<std::mutex> lock(waited_lock);
  return {waited_for.begin(), waited_for.end()};
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
  count_wait(what, waited);
  const Waiting mode = waiting;
  TORCH_CHECK(mode != Waiting::kError, "called a synchronizing operation of the device: ", what);
  if (mode == Waiting::kWarn) TORCH_WARN("called a synchronizing operation of the device: ", what);
}
void wait_as_cuda(StreamIndex stream, const char* what) {
  about_to_wait(what);
  WithoutGil release;
  wait_for_stream(stream);
}

// -- what an operator is, found once --------------------------------------------------------------------------------
namespace {
struct Facts {
  std::vector<bool> writes;  // by argument
  std::vector<int> source;   // by result: the argument that it is or views, or -1
  std::vector<bool> written; // by result: it is its source, changed
  std::vector<bool> running; // by argument: statistics of a normalisation
  std::vector<bool> outs;    // by argument: out=, which takes the shape of the result
  int generator = -1;
  bool queueable = true;      // Meta can tell the results before the kernel has run
  bool data_dependent = false;
  bool host_indices = false;  // takes tensors of the CPU beside the device's
  bool foreach = false;
  bool unlike_meta = false;   // the CPU's kernel returns other types and shapes than Meta's
  int training = -1;          // a flag: the running statistics are written, which their schema does not say
};

bool holds_tensors(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  return type->kind() == c10::TypeKind::ListType && type->containedType(0)->kind() == c10::TypeKind::TensorType;
}

Facts find_facts(const c10::OperatorHandle& op) {
  static const std::set<std::string> host_indices{"aten::index", "aten::index_put", "aten::index_put_",
                                                  "aten::_index_put_impl_", "aten::_unsafe_index",
                                                  "aten::_unsafe_index_put", "aten::_pack_padded_sequence"};
  const auto& schema = op.schema();
  Facts f;
  for (const auto& argument : schema.arguments()) {
    f.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    f.outs.push_back(argument.is_out());
    if (argument.name() == "training" || argument.name() == "train") f.training = int(f.writes.size()) - 1;
    f.running.push_back(argument.name() == "running_mean" || argument.name() == "running_var");
    if (argument.type()->str().find("Generator") != std::string::npos) f.generator = int(f.writes.size()) - 1;
  }
  for (const auto& result : schema.returns()) {
    f.queueable = f.queueable && holds_tensors(result.type());
    int source = -1;
    if (const auto* alias = result.alias_info())
      for (size_t i = 0; i < f.writes.size(); i++) {
        const auto* other = schema.arguments()[i].alias_info();
        if (other && other->beforeSets() == alias->beforeSets()) source = int(i);
      }
    f.source.push_back(source);
    f.written.push_back(source >= 0 && result.alias_info()->isWrite());
  }
  for (at::Tag tag : op.getTags())
    f.data_dependent = f.data_dependent || tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output;
  f.queueable = f.queueable && op.hasComputedKernelForDispatchKey(DispatchKey::Meta);
  f.host_indices = host_indices.count(schema.name());
  f.foreach = schema.name().find("_foreach_") != std::string::npos;
  f.unlike_meta = schema.returns().size() > 1 && (schema.name().find("norm") != std::string::npos ||
                                                  schema.name().find("embedding_bag") != std::string::npos);
  return f;
}

const Facts& facts_of(const c10::OperatorHandle& op) {
  static auto* known = new std::unordered_map<c10::OperatorHandle, std::unique_ptr<Facts>>;
  static auto* lock = new std::shared_mutex;
  {
    std::shared_lock<std::shared_mutex> reading(*lock);
    if (auto it = known->find(op); it != known->end()) return *it->second;
  }
  auto made = std::make_unique<Facts>(find_facts(op));
  std::unique_lock<std::shared_mutex> writing(*lock);
  return *known->emplace(op, std::move(made)).first->second;
}

// -- tensors inside of values ---------------------------------------------------------------------------------------
template <class F>
IValue map_tensors(const IValue& v, F&& f) {
  if (v.isTensor()) return v.toTensor().defined() ? IValue(f(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : v.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
      out.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return out;
  }
  return v;
}
template <class F>
void each_tensor(const IValue& v, F&& f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) f(v.toTensor());
  } else if (v.isTensorList() || v.isOptionalTensorList()) {
    map_tensors(v, [&](const Tensor& t) {
      f(t);
      return t;
    });
  }
}
std::vector<Tensor> tensors_in(const IValue& v) {  // undefined ones too
  if (v.isTensor()) return {v.toTensor()};
  if (v.isTensorList()) return v.toTensorVector();
  return {};
}

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
    shapes_known_ = facts_.queueable && !data_dependent_ && ask_meta();
    if (shapes_known_) {
      ask_cpu();
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

  // The results' shapes. False if Meta cannot tell: then the CPU's kernel runs at once, and says what is wrong.
  bool ask_meta() {
    Mirror meta(at::kMeta);
    std::vector<IValue> given;
    for (const IValue& a : args_) {
      if (a.isDevice() && a.toDevice().type() == kSim) given.emplace_back(Device(at::kMeta));
      else if (a.isGenerator()) given.emplace_back();
      else
        given.push_back(map_tensors(a, [&](const Tensor& t) {
          return on_device(t) || t.dim() ? meta.of(t) : t;
        }));
    }
    metas_ = given;
    try {
      op_.callBoxed(&metas_);
    } catch (const std::exception&) {
      return false;
    }
    bool all = true;
    for (const IValue& m : metas_) each_tensor(m, [&](const Tensor& t) { all = all && t.is_meta(); });
    if (!all) return false;
    for (size_t i = 0; i < args_.size(); i++) {  // an out= takes its shape
      if (!facts_.writes[i]) continue;
      const auto mine = tensors_in(args_[i]), theirs = tensors_in(given[i]);
      for (size_t k = 0; k < mine.size(); k++)
        if (on_device(mine[k]) && mine[k].sizes() != theirs[k].sizes()) reshape(mine[k], theirs[k]);
    }
    return true;
  }

  static void reshape(const Tensor& t, const Tensor& like) {
    t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    int64_t last = t.storage_offset();
    for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
    const size_t needed = t.numel() ? size_t(last + 1) * t.itemsize() : 0;
    if (needed > t.storage().nbytes()) resize_storage(t.storage(), needed);
  }

  // Normalisations and bags keep statistics whose types and shapes Meta does not know as the CPU's kernels have them. They
  // depend on the arguments' types, shapes and flags only: asked once of the CPU's kernel, on zeros.
  void ask_cpu() {
    if (!facts_.unlike_meta) return;
    static auto* known = new std::map<std::string, std::vector<Tensor>>;
    static std::mutex lock;
    std::string key = toString(op_.schema().operator_name());
    for (const IValue& a : args_) {
      if (a.isBool() || a.isInt()) key += " " + std::to_string(a.isBool() ? a.toBool() : a.toInt());
      if (a.isBoolList())
        for (bool flag : a.toBoolList()) key += flag ? " 1" : " 0";
      if (a.isNone()) key += " -";
      each_tensor(a, [&](const Tensor& t) {
        key += std::string(" ") + c10::toString(t.scalar_type());
        for (int64_t size : t.sizes()) key += "," + std::to_string(size);
      });
    }
    std::lock_guard<std::mutex> guard(lock);
    auto it = known->find(key);
    if (it == known->end()) {
      Stack tried;
      for (const IValue& a : args_)
        tried.push_back(map_tensors(a, [](const Tensor& t) {
          return at::empty(t.sizes(), t.options().device(at::kCPU)).zero_();
        }));
      op_.callBoxed(&tried);
      std::vector<Tensor> found;
      for (const IValue& v : tried) {
        const Tensor& t = v.toTensor();
        found.push_back(t.defined() ? at::empty(t.sizes(), t.options().device(at::kMeta)) : t);
      }
      it = known->emplace(key, std::move(found)).first;
    }
    for (size_t r = 0; r < it->second.size(); r++) {
      const Tensor &found = it->second[r], &meta = metas_[r].toTensor();
      if (found.defined() && meta.defined() && (found.sizes() != meta.sizes() || found.dtype() != meta.dtype()))
        metas_[r] = found;
    }
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
          if (facts_.outs[i] && !shapes_known_) return at::empty({0}, t.options().device(at::kCPU));
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
        results->push_back(map_tensors(metas_[r], [&](const Tensor& t) { return view_like(base, t); }));
      } else {
        results->push_back(map_tensors(metas_[r], [&](const Tensor& t) {
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
      count_wait(op_.schema().name().c_str(), unlike_cuda);
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
  bool shapes_known_ = false, data_dependent_ = false;
  Stack metas_, bound_;
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

// Whatever has a CPU's kernel is one kernel, also where torch would take it apart for other devices: the CPU's bits, and
// Meta is asked once. So is what is one launch on a GPU.
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
