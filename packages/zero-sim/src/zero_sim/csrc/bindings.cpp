// The native module: the runtime's names, and what needs torch. Waits release the GIL.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "torch_watch.hpp"

namespace py = pybind11;

namespace sim {
void bind_runtime(py::module_&);
void bind_collectives(py::module_&);

namespace {
void bind_device(py::module_& m) {
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", [](int d) { set_current_device(c10::DeviceIndex(d)); });
  m.def("stream_index", [](const c10::Stream& s) { return index_of(s); });
  m.def("current_stream_index", [](int device) { return current_stream(c10::DeviceIndex(device)); });
  m.def("milliseconds_between", [](uintptr_t first, uintptr_t second) {
    TORCH_CHECK(first && second, "both events must be recorded before their elapsed time is asked for");
    return milliseconds_between(*reinterpret_cast<const Event*>(first), *reinterpret_cast<const Event*>(second));
  });
  m.def("default_generator", [](int d) { return default_generator(c10::DeviceIndex(d)); });
  m.def("is_device", [](uintptr_t address) { return is_device(reinterpret_cast<void*>(address)); });
  m.def("get_sync_debug_mode", [] { return int(waiting.load()); });
  m.def("set_sync_debug_mode", [](int mode) { waiting = Waiting(mode); });
  m.def("counts", [] {
    const Counts c = counts();
    std::vector<std::tuple<std::string, std::string, int, uint64_t>> waits;
    for (const auto& [of, times] : c.waits)
      waits.emplace_back(std::get<0>(of), describe_python_site(std::get<1>(of)), std::get<2>(of), times);
    return std::make_tuple(c.queued, c.unlike_cuda, c.copies, waits);
  });
  m.def("extents", [](const at::Tensor& t, bool write) {
    std::vector<Extent> found;
    add_extents(t, write, found);
    std::vector<std::tuple<uintptr_t, uintptr_t, bool>> out;
    for (const Extent& e : found) out.emplace_back(e.begin, e.end, e.write);
    return out;
  });
}

struct BackwardCall {
  std::shared_ptr<Backward> call;
};

void bind_watch(py::module_& m) {
  py::class_<BackwardCall>(m, "BackwardCall");
  m.def("begin_backward", [] { return BackwardCall{enter_backward()}; });
  m.def("end_backward", [](const BackwardCall& self) { leave_backward(self.call); });
  m.def("skip_frames_of", &skip_frames_of);
  m.def("host_reads", &host_reads);
  watch_torch();
}
}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  sim::bind_runtime(m);
  sim::bind_device(m);
  sim::bind_watch(m);
  sim::bind_collectives(m);
}
