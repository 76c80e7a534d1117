// Copies, for the table of kernels.
#pragma once

#include "torch_device.hpp"

namespace sim {
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& into, bool non_blocking);
at::Scalar local_scalar_dense(const at::Tensor&);
}  // namespace sim
