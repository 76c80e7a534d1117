// Tensors as kernels see them: the bytes they touch, their mirrors on CPU and Meta, and views.
#include "torch_device.hpp"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <array>

namespace sim {
namespace {
constexpr int64_t kRuns = 4096;  // more runs than this are closed over their gaps, innermost first

struct Dim {
  int64_t size, stride;  // of bytes
};

void check_storage(const at::Tensor& t) {
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  const size_t needed = size_t(last + 1) * t.itemsize();
  TORCH_CHECK(needed <= t.storage().nbytes(), "a kernel would read or write ", needed, " bytes of a storage that has ",
              t.storage().nbytes(), " bytes (on a GPU: an illegal memory access); resize the storage before its use");
}
}  // namespace

void add_extents(const at::Tensor& t, bool write, std::vector<Extent>& into) {
  if (!t.defined() || t.numel() == 0 || !t.has_storage()) return;
  check_storage(t);
  const auto begin = uintptr_t(t.storage().data()) + t.storage_offset() * t.itemsize();
  int64_t run = int64_t(t.itemsize());
  if (t.is_contiguous()) {
    into.push_back({begin, begin + t.numel() * run, write});
    return;
  }
  c10::SmallVector<Dim, 8> dims;
  for (int64_t d = 0; d < t.dim(); d++)
    if (t.size(d) > 1 && t.stride(d) != 0) dims.push_back({t.size(d), t.stride(d) * run});
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  c10::SmallVector<Dim, 8> outer;  // innermost first
  int64_t count = 1;
  for (const Dim& d : dims) {
    if (outer.empty() && d.stride <= run) {
      run += (d.size - 1) * d.stride;
    } else if (!outer.empty() && outer.back().stride * outer.back().size == d.stride) {
      outer.back().size *= d.size, count *= d.size;
    } else {
      outer.push_back(d), count *= d.size;
    }
  }
  while (count > kRuns) {
    run += (outer.front().size - 1) * outer.front().stride;
    count /= outer.front().size;
    outer.erase(outer.begin());
  }
  const size_t first = into.size();
  bool sorted = true;
  c10::SmallVector<int64_t, 8> at(outer.size(), 0);
  for (int64_t k = 0; k < count; k++) {
    uintptr_t p = begin;
    for (size_t d = 0; d < outer.size(); d++) p += at[d] * outer[d].stride;
    sorted = sorted && (into.size() == first || into.back().end < p);
    into.push_back({p, p + run, write});
    for (size_t d = 0; d < outer.size() && ++at[d] == outer[d].size; d++) at[d] = 0;
  }
  if (sorted) return;  // else windows that overlap or touch
  std::sort(into.begin() + first, into.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  size_t last = first;
  for (size_t k = first + 1; k < into.size(); k++) {
    if (into[k].begin <= into[last].end) into[last].end = std::max(into[last].end, into[k].end);
    else into[++last] = into[k];
  }
  into.resize(last + 1);
}

at::Tensor Mirror::of(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  at::Tensor& made = tensors_[impl];
  if (made.defined()) return made;
  if (type_ == at::kCPU && t.numel()) check_storage(t);
  c10::Storage& storage = storages_[t.storage().unsafeGetStorageImpl()];
  if (!storage) {
    void* p = type_ == at::kCPU ? seen_by_streams(t.storage().data()) : nullptr;
    storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(p, c10::Device(type_)),
                           type_ == at::kMeta ? c10::GetAllocator(at::kMeta) : nullptr, type_ == at::kMeta);
  }
  const auto key = type_ == at::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), t.dtype());
  auto* mirror = made.unsafeGetTensorImpl();
  mirror->set_sizes_and_strides(t.sizes(), t.strides());
  mirror->set_storage_offset(t.storage_offset());
  if (impl->is_wrapped_number()) mirror->set_wrapped_number(true);
  mirror->_set_conj(t.is_conj());
  mirror->_set_neg(t.is_neg());
  return made;
}

at::Tensor view_like(const at::Tensor& base, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->set_storage_offset(like.storage_offset());
  return made;
}
}  // namespace sim
