// Operators that are not a CPU kernel run later: memory, views, storages, copies, and dropout.
#include "torch_copies.hpp"

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {
using at::Tensor;
using c10::Device;

namespace {
// -- memory ---------------------------------------------------------------------------------------------------------
c10::DeviceIndex number(std::optional<Device> d) { return d && d->has_index() ? d->index() : current_device(); }

Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                           std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the CPU can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim has strided tensors only");
  return empty(size, c10::dtype_or_default(type), format, number(device));
}
Tensor empty_strided_(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type,
                      std::optional<at::Layout> layout, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only memory of the CPU can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "sim has strided tensors only");
  return empty_strided(size, stride, c10::dtype_or_default(type), number(device));
}
void grow(const Tensor& t) {
  int64_t last = t.storage_offset();
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  const size_t needed = t.numel() ? size_t(last + 1) * t.itemsize() : 0;
  if (needed > t.storage().nbytes()) resize_storage(t.storage(), needed);
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size || format) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    grow(self);
  }
  return self;
}
void record_stream_(Tensor& self, at::Stream s) {
  if (self.storage().data()) record_stream(self.storage().mutable_data(), index_of(s));
}

// -- views: free ----------------------------------------------------------------------------------------------------
Tensor shown(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(size, stride);
  impl->set_storage_offset(offset);
  return made;
}
Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  TORCH_CHECK(size.size() == stride.size(), "as_strided: ", size.size(), " sizes and ", stride.size(), " strides");
  const int64_t at = offset.value_or(self.storage_offset());
  int64_t last = at;
  bool any = true;
  for (size_t d = 0; d < size.size(); d++) {
    TORCH_CHECK(stride[d] >= 0, "as_strided: Negative strides are not supported at the moment");
    last += (size[d] - 1) * stride[d], any = any && size[d];
  }
  TORCH_CHECK(!any || size_t(last + 1) * self.itemsize() <= self.storage().nbytes() || self.storage().nbytes() == 0,
              "setStorage: sizes ", size, ", strides ", stride, ", storage offset ", at, " and itemsize ",
              self.itemsize(), " require ", (last + 1) * self.itemsize(), " bytes; the storage has ",
              self.storage().nbytes());
  return shown(self, size, stride, at);
}
Tensor view(const Tensor& self, at::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return shown(self, inferred, *stride, self.storage_offset());
}
Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return shown(self, size, stride, self.storage_offset());
}

// -- storages -------------------------------------------------------------------------------------------------------
Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device().type() == kSim, "set_ of a tensor on ", self.device(), " to a storage on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  grow(self);
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const int64_t numel = int64_t(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {numel}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_storage(self, empty({0}, self.scalar_type(), std::nullopt, self.device().index()).storage(), 0, {0}, {});
}
bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}
// Between CPU and sim: see kKeys in torch_memory.cpp, and for torch from 2.13 on this operator.
bool may_take_data_of(const Tensor& self, const Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& into) {
  into.resize_(self.sizes());
  return copy_from(self, into, false);
}

// -- dropout: the CPU's would draw from the CPU's generator, at any time ---------------------------------------------
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}
Tensor native_dropout_backward(const Tensor& gradient, const Tensor& mask, double scale) {
  return gradient.mul(mask).mul_(scale);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided_));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("record_stream", TORCH_FN(record_stream_));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("is_set_to", TORCH_FN(is_set_to));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_take_data_of));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("native_dropout_backward", TORCH_FN(native_dropout_backward));
}
}  // namespace
}  // namespace sim
