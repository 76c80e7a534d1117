// Copies between host and device, within one and between two: when CUDA's are asynchronous, and when they are not.
#include "torch_copies.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

namespace sim {
using at::Tensor;

namespace {
bool pinned(const Tensor& t) { return t.numel() && is_pinned(t.const_data_ptr()); }

void queue_copy(StreamIndex stream, const char* what, const Tensor& into, const Tensor& from, std::vector<Extent> extents) {
  Mirror seen(at::kCPU);
  queue(stream, what, extents, [into = on_device(into) ? seen.of(into) : into,
                                from = on_device(from) ? seen.of(from) : from]() mutable { into.copy_(from); });
}

// The same device, or two: then each one's current stream waits for the other, as on CUDA.
void within(const Tensor& into, const Tensor& from) {
  const StreamIndex stream = current_stream(from.device().index()), other = current_stream(into.device().index());
  const bool peers = into.device() != from.device();
  if (peers) {
    Event ready;
    record(ready, other);
    stream_waits(stream, ready);
  }
  std::vector<Extent> extents;
  add_extents(from, false, extents);
  add_extents(into, true, extents);
  const char* what = peers ? "copy between devices" : "copy on the device";
  count_copy(what, false, into.nbytes());
  queue_copy(stream, what, into, from, extents);
  if (peers) {
    Event done;
    record(done, stream);
    stream_waits(other, done);
  }
}

// Same type, both contiguous, one on the host.
void across(const Tensor& into, const Tensor& from, bool non_blocking) {
  const bool up = on_device(into);
  const Tensor& host = up ? from : into;
  const StreamIndex stream = current_stream((up ? into : from).device().index());
  const bool is_pinned = pinned(host);
  const char* what = up ? "copy to the device" : "copy to the host";
  std::vector<Extent> extents;
  add_extents(up ? into : from, up, extents);
  count_copy(what, !is_pinned, host.nbytes());
  if (is_pinned) {
    TORCH_CHECK(pinned_in_one_piece(host.const_data_ptr(), host.nbytes()), "sim: a ", what, " of ", host.nbytes(),
                " bytes begins in host memory that is registered and ends beyond the piece that was registered. CUDA "
                "answers with an invalid argument. Cut the copy where a piece ends.");
    add_extents(host, !up, extents);
    Mirror seen(at::kCPU);
    // Over raw pointers: the copy in flight keeps pinned memory no more alive than the device's.
    queue_copy(stream, what, up ? into : seen.of(into), up ? seen.of(from) : from, extents);
    if (non_blocking) {
      at::getHostAllocator(kSim)->record_event(host.storage().mutable_data(), nullptr, stream_at(stream));
      return;
    }
  } else {  // pageable: staged on the way up; the way down ends before the call does
    queue_copy(stream, what, into, up ? from.clone() : from, extents);
    if (up && non_blocking) return;
  }
  if (non_blocking) {
    count_wait("copy to pageable memory of the host");
    WithoutGil release;
    wait_for_stream(stream);
  } else {
    wait_as_cuda(stream, what);
  }
}

bool dense_alike(const Tensor& a, const Tensor& b) {  // one run of bytes each, in the same order
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}
}  // namespace

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  TORCH_CHECK(self.defined() && source.defined(), "copy_ of an undefined tensor");
  if (self.is_same(source)) return self;
  Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (self.numel() == 0) return self;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::DeviceGuard guard(on_device(self) ? self.device() : from.device());
  for (const Tensor* t : {&static_cast<const Tensor&>(self), &static_cast<const Tensor&>(from)})
    TORCH_CHECK(on_device(*t) || t->device().is_cpu(), "a copy between sim and ", t->device(), ": go through the CPU");
  const bool same = self.scalar_type() == from.scalar_type() && self.is_conj() == from.is_conj() &&
                    self.is_neg() == from.is_neg();
  if (on_device(self) && on_device(from) && (self.device() == from.device() || same)) {
    within(self, from);
    return self;
  }
  if (same && !on_device(self) != !on_device(from) &&
      ((self.is_contiguous() && from.is_contiguous()) || dense_alike(self, from))) {
    across(self, from, non_blocking);
    return self;
  }
  // As CUDA does it: types change on the device if the copy may be asynchronous, else on the CPU, which saves memory;
  // tensors that are not contiguous are made so before and after, on their own side.
  const bool convert_on_device = non_blocking || (on_device(self) && on_device(from));
  Tensor packed, landed;
  if (on_device(from) == convert_on_device) {
    landed = self.is_contiguous() && !self.is_conj() && !self.is_neg()
                 ? self
                 : at::empty_like(self, at::MemoryFormat::Contiguous);
    packed = from.to(self.scalar_type()).resolve_conj().resolve_neg().contiguous();
  } else {
    packed = from.resolve_conj().resolve_neg().contiguous();
    const bool direct = self.is_contiguous() && self.scalar_type() == from.scalar_type() && !self.is_conj() && !self.is_neg();
    landed = direct ? self : at::empty_like(self, self.options().dtype(from.scalar_type()), at::MemoryFormat::Contiguous);
  }
  if (on_device(landed) && on_device(packed)) within(landed, packed);
  else across(landed, packed, non_blocking);
  if (!landed.is_same(self)) self.copy_(landed, non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& into, bool non_blocking) {
  Tensor target = into;
  return copy_(target, self, non_blocking);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  TORCH_CHECK(self.numel() == 1, "a Tensor with ", self.numel(), " elements cannot be converted to Scalar");
  Tensor host = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_(host, self, false);
  return host.item();
}
}  // namespace sim
