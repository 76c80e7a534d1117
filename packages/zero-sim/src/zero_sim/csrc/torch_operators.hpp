// The facts of an operator, found once, and the shapes of its results, found once for arguments of the same shapes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "torch_device.hpp"

namespace sim {
struct Facts {
  std::vector<bool> writes;   // by argument
  std::vector<bool> outs;     // by argument: out=, which takes the shape of the result
  std::vector<bool> running;  // by argument: statistics of a normalisation
  std::vector<int> source;    // by result: the argument that it is or views, or -1
  std::vector<bool> written;  // by result: it is its source, changed
  int generator = -1;         // argument
  int training = -1;          // argument: whether `running` is written, which the schema does not say
  bool queueable = true;      // Meta can tell the results before the kernel has run
  bool data_dependent = false;
  bool host_indices = false;  // takes tensors of the CPU beside the device's
  bool foreach = false;
  bool unlike_meta = false;   // the CPU's kernel returns other types and shapes than Meta's
  bool makes_tensors = false; // some result is new
  bool places_matter = false; // results view arguments, or arguments may overlap
};
const Facts& facts_of(const c10::OperatorHandle&);

struct Shapes {
  torch::jit::Stack results;    // tensors of Meta
  torch::jit::Stack arguments;  // as Meta left them: an out= may have another shape now
};
// Null if Meta cannot tell.
std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle&, const Facts&, const std::vector<c10::IValue>& args);
}  // namespace sim
