// Finds the facts of an operator, once, and the shapes of its results, once for arguments of the same shapes.
#include "torch_operators.hpp"

#include <ATen/core/enum_tag.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "torch_values.hpp"

namespace sim {
using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

namespace {
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
  for (size_t i = 0; i < f.writes.size(); i++) f.places_matter = f.places_matter || f.writes[i];
  for (int source : f.source) {
    f.places_matter = f.places_matter || source >= 0;
    f.makes_tensors = f.makes_tensors || source < 0;
  }
  f.foreach = schema.name().find("_foreach_") != std::string::npos;
  f.unlike_meta = schema.returns().size() > 1 && (schema.name().find("norm") != std::string::npos ||
                                                  schema.name().find("embedding_bag") != std::string::npos);
  return f;
}
}  // namespace

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

// -- shapes -----------------------------------------------------------------------------------------------------------
namespace {
// All of a call's arguments that shapes can depend on. Many Meta kernels are written in Python and take 100 us.
class Key {
 public:
  explicit Key(const Facts& facts) : facts_(facts) {
    number(int64_t(&facts));
    number(int64_t(c10::get_default_dtype_as_scalartype()));
  }
  void number(int64_t n) { numbers_.push_back(n); }
  bool add(const IValue& v) {  // false: a value of a kind that is not compared
    if (v.isTensor()) return add_tensor(v.toTensor());
    if (v.isNone()) return number(-1), true;
    if (v.isInt()) return number(-2), number(v.toInt()), true;
    if (v.isBool()) return number(-3), number(v.toBool()), true;
    if (v.isDouble()) return number(-4), add_bits(v.toDouble()), true;
    if (v.isComplexDouble()) return number(-5), add_bits(v.toComplexDouble().real()), add_bits(v.toComplexDouble().imag()), true;
    if (v.isString()) return number(-6), number(int64_t(std::hash<std::string>()(v.toStringRef()))), true;
    if (v.isDevice() || v.isGenerator()) return number(-7), true;
    if (!v.isList()) return false;
    const auto list = v.toListRef();
    number(-8), number(int64_t(list.size()));
    for (const IValue& one : list)
      if (!add(one)) return false;
    return true;
  }
  bool operator==(const Key& other) const { return numbers_ == other.numbers_; }
  struct Hash {
    size_t operator()(const Key& key) const {
      uint64_t h = 1469598103934665603u;
      for (int64_t n : key.numbers_) h = (h ^ uint64_t(n)) * 1099511628211u, h ^= h >> 29;
      return h;
    }
  };

 private:
  bool add_tensor(const Tensor& t) {
    if (!t.defined()) return number(-9), true;
    if (!on_device(t) && t.dim()) return false;
    const auto* impl = t.unsafeGetTensorImpl();
    number(-10), number(int64_t(t.scalar_type()) * 8 + on_device(t) * 4 + impl->is_wrapped_number() * 2 + t.is_conj());
    number(t.dim());
    for (int64_t size : t.sizes()) number(size);
    for (int64_t stride : t.strides()) number(stride);
    if (facts_.places_matter) {
      const void* storage = t.storage().unsafeGetStorageImpl();
      const auto at = std::find(storages_.begin(), storages_.end(), storage);
      number(at - storages_.begin()), number(t.storage_offset()), number(int64_t(t.storage().nbytes()));
      if (at == storages_.end()) storages_.push_back(storage);
    }
    return true;
  }
  void add_bits(double d) {
    if (!facts_.makes_tensors) return;  // a step size, say, which changes with every call
    int64_t bits;
    std::memcpy(&bits, &d, sizeof bits);
    number(bits);
  }
  const Facts& facts_;
  std::vector<int64_t> numbers_;
  std::vector<const void*> storages_;
};

std::shared_ptr<Shapes> ask_meta(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  Mirror meta(at::kMeta);
  auto shapes = std::make_shared<Shapes>();
  for (const IValue& a : args) {
    if (a.isDevice() && a.toDevice().type() == kSim) shapes->arguments.emplace_back(c10::Device(at::kMeta));
    else if (a.isGenerator()) shapes->arguments.emplace_back();
    else
      shapes->arguments.push_back(map_tensors(a, [&](const Tensor& t) { return on_device(t) || t.dim() ? meta.of(t) : t; }));
  }
  shapes->results = shapes->arguments;
  try {
    op.callBoxed(&shapes->results);
  } catch (const std::exception&) {
    return nullptr;  // the CPU's kernel runs at once instead, and raises its own error
  }
  bool all = true;
  for (const IValue& m : shapes->results) each_tensor(m, [&](const Tensor& t) { all = all && t.is_meta(); });
  return all ? shapes : nullptr;
}

// Normalisations and bags keep statistics whose types and shapes Meta does not know as the CPU's kernels have them: asked
// of the CPU's kernel, on zeros.
void ask_cpu(const c10::OperatorHandle& op, const std::vector<IValue>& args, Shapes& shapes) {
  Stack tried;
  for (const IValue& a : args)
    tried.push_back(
        map_tensors(a, [](const Tensor& t) { return at::empty(t.sizes(), t.options().device(at::kCPU)).zero_(); }));
  op.callBoxed(&tried);
  for (size_t r = 0; r < tried.size(); r++) {
    const Tensor &found = tried[r].toTensor(), &meta = shapes.results[r].toTensor();
    if (found.defined() && meta.defined() && (found.sizes() != meta.sizes() || found.dtype() != meta.dtype()))
      shapes.results[r] = at::empty(found.sizes(), found.options().device(at::kMeta));
  }
}
}  // namespace

std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op, const Facts& facts, const std::vector<IValue>& args) {
  static auto* known = new std::unordered_map<Key, std::shared_ptr<const Shapes>, Key::Hash>;
  static auto* lock = new std::shared_mutex;
  constexpr size_t kKept = 20000;
  Key key(facts);
  bool comparable = true;
  for (size_t i = 0; i < args.size() && comparable; i++) comparable = !facts.outs[i] && key.add(args[i]);
  if (comparable) {
    std::shared_lock<std::shared_mutex> reading(*lock);
    if (auto it = known->find(key); it != known->end()) return it->second;
  }
  auto shapes = ask_meta(op, args);
  if (shapes && facts.unlike_meta) ask_cpu(op, args, *shapes);
  if (shapes && comparable) {
    shapes->arguments.clear();
    std::unique_lock<std::shared_mutex> writing(*lock);
    if (known->size() >= kKept) known->clear();
    known->emplace(std::move(key), shapes);
  }
  return shapes;
}
}  // namespace sim
