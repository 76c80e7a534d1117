// The watch over torch's host side, for the bindings.
#pragma once

#include "torch_device.hpp"

namespace sim {
void watch_torch();
std::shared_ptr<Backward> enter_backward();
void leave_backward(const std::shared_ptr<Backward>&);
}  // namespace sim
