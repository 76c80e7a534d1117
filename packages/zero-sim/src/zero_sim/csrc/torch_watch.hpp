// The watch over torch's host side, for the bindings.
#pragma once

#include "torch_device.hpp"

namespace sim {
void watch_torch();
void host_reads(const std::string& what, const at::Tensor&);  // without an operator, if a copy may use its memory
std::shared_ptr<Backward> enter_backward();
void leave_backward(const std::shared_ptr<Backward>&);
}  // namespace sim
