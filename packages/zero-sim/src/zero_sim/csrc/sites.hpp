// Where the host program is, for reports. Knows Python and not torch.
#pragma once

#include <string>
#include <vector>

#include "runtime.hpp"

namespace sim {
// The calling thread's Python stack, without the frames whose file starts with one of the skipped prefixes. `node` and
// `forward`: the backward node that the thread runs and where its operator was called, if it runs one.
Site python_site(const char* node, Site forward);
std::string describe_python_site(Site);
// Frames whose file begins so are left out; and with the second, those that called them too.
void skip_frames_of(const std::vector<std::string>& prefixes, const std::vector<std::string>& from_here_up);

class WithoutGil {  // lets other Python threads run, if this thread holds them up
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;

 private:
  void* saved_;
};
}  // namespace sim
