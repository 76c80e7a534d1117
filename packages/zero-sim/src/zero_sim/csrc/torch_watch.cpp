// What torch does on the host: CPU operators that touch memory which copies use, and autograd's threads.
#include "torch_watch.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <cstring>
#include <mutex>

#include "torch_values.hpp"

namespace sim {
namespace {
// -- the call of backward that a thread works for: autograd carries the caller's debug information to its threads ------
const auto kBackward = c10::DebugInfoKind::TEST_INFO_2;  // torch's own use of it is in its tests
struct BackwardInfo : c10::DebugInfoBase {
  explicit BackwardInfo(std::shared_ptr<Backward> c) : call(std::move(c)) {}
  std::shared_ptr<Backward> call;
};
Backward* call_of_this_thread() {
  auto* info = static_cast<BackwardInfo*>(c10::ThreadLocalDebugInfo::get(kBackward));
  return info ? info->call.get() : nullptr;
}

// -- sites: a backward node is where its forward operator was -----------------------------------------------------------
// Autograd numbers its nodes per thread. The first work queued after a node is made has its place in the program.
struct ForwardSites {
  static constexpr size_t kKept = 1 << 16;
  std::array<std::atomic<Site>, kKept> by_number{};
};
std::mutex threads_lock;
std::unordered_map<uint64_t, std::shared_ptr<ForwardSites>>& threads() {
  static auto* all = new std::unordered_map<uint64_t, std::shared_ptr<ForwardSites>>;
  return *all;
}

struct Node {
  const char* name = nullptr;  // null: this thread runs no node
  Site forward = 0;
};
thread_local Node t_node;
thread_local uint64_t t_numbered = 0;  // nodes below this number have their site
thread_local std::shared_ptr<ForwardSites> t_forward;

Site site_now() {
  const Site here = python_site(t_node.name, t_node.forward);
  const uint64_t number = at::sequence_number::peek();
  if (number > t_numbered && here && !t_node.name) {
    if (!t_forward) {
      t_forward = std::make_shared<ForwardSites>();
      std::lock_guard<std::mutex> lock(threads_lock);
      threads()[at::RecordFunction::currentThreadId()] = t_forward;
    }
    const uint64_t first = number - t_numbered > ForwardSites::kKept ? number - ForwardSites::kKept : t_numbered;
    for (uint64_t n = first; n < number; n++) t_forward->by_number[n % ForwardSites::kKept] = here;
    t_numbered = number;
  }
  return here;
}

struct Before : at::ObserverContext {
  Node node;
};
std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& node) {
  hear_backward();
  auto before = std::make_unique<Before>();
  before->node = t_node;
  t_node = {node.name(), 0};
  if (node.seqNr() >= 0) {
    std::lock_guard<std::mutex> lock(threads_lock);
    auto it = threads().find(node.forwardThreadId());
    if (it != threads().end()) t_node.forward = it->second->by_number[uint64_t(node.seqNr()) % ForwardSites::kKept];
  }
  return before;
}
void node_ends(const at::RecordFunction&, at::ObserverContext* before) {
  t_node = static_cast<Before*>(before)->node;
}

// -- CPU operators on pinned and registered memory ------------------------------------------------------------------------
// Operators whose name says that they look at no element.
bool touches_nothing(const char* name, const c10::FunctionSchema& schema) {
  static const std::array names{"aten::set_", "aten::resize_", "aten::is_pinned", "aten::detach_", "aten::_version",
                                "aten::record_stream", "aten::requires_grad_", "aten::is_same_size", "aten::is_set_to",
                                "aten::_has_compatible_shallow_copy_type", "aten::set_data", "aten::result_type",
                                "aten::pin_memory", "aten::retain_grad", "aten::output_nr", "aten::is_leaf"};
  for (const char* other : names)
    if (!std::strcmp(name, other)) return true;
  const size_t length = std::strlen(name);
  if (!std::strncmp(name, "aten::new_", 10) || (length > 5 && !std::strcmp(name + length - 5, "_like"))) return true;
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;  // a view
  return false;
}

bool on_pinned_memory(const at::Tensor& t) {
  if (!t.device().is_cpu() || t.layout() != at::kStrided || !t.has_storage() || !t.numel()) return false;
  const auto p = uintptr_t(t.storage().data());
  return p && touches_pinned(p, p + t.storage().nbytes());
}

std::unique_ptr<at::ObserverContext> operator_begins(const at::RecordFunction& call) {
  if (in_stream_thread()) return nullptr;
  bool pinned = false, device = false;
  for (const auto& input : call.inputs())
    each_tensor(input, [&](const at::Tensor& t) {
      if (on_device(t)) device = true;
      else pinned = pinned || on_pinned_memory(t);
    });
  if (!pinned || device) return nullptr;  // copies to and from a device give their own extents
  const auto schema = call.operator_schema();
  if (!schema || touches_nothing(call.name(), *schema)) return nullptr;
  std::vector<Extent> extents;
  const auto inputs = call.inputs();
  for (size_t i = 0; i < inputs.size() && i < schema->arguments().size(); i++) {
    const auto* alias = schema->arguments()[i].alias_info();
    each_tensor(inputs[i], [&](const at::Tensor& t) {
      if (t.device().is_cpu() && t.layout() == at::kStrided)
        add_extents(t, alias && alias->isWrite(), extents);
    });
  }
  host_access(call.name(), extents);
  return nullptr;
}
}  // namespace

std::shared_ptr<Backward> enter_backward() {
  auto call = begin_backward();
  c10::ThreadLocalDebugInfo::_push(kBackward, std::make_shared<BackwardInfo>(call));
  return call;
}
void leave_backward(const std::shared_ptr<Backward>& call) {
  c10::ThreadLocalDebugInfo::_pop(kBackward);
  end_backward(call);
}

void host_reads(const std::string& what, const at::Tensor& t) {
  if (in_stream_thread() || t.key_set().has(c10::DispatchKey::Python) || !on_pinned_memory(t)) return;
  std::vector<Extent> extents;
  add_extents(t, false, extents);
  host_access(what.c_str(), extents);
}

void watch_torch() {
  capture_site = &site_now;
  describe_site = &describe_python_site;
  backward_of_this_thread = &call_of_this_thread;
  at::addGlobalCallback(at::RecordFunctionCallback(&node_begins, &node_ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  at::addGlobalCallback(
      at::RecordFunctionCallback(&operator_begins).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
}  // namespace sim
