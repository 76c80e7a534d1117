// Python's names for the runtime: translates, and nothing else. Waits release the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "actors.hpp"

namespace sim {
namespace py = pybind11;
namespace {

using PyExtent = std::tuple<uintptr_t, uintptr_t, bool>;

std::vector<Extent> extents_of(const std::vector<PyExtent>& given) {
  std::vector<Extent> extents;
  for (auto& [begin, end, write] : given) extents.push_back({begin, end, write});
  return extents;
}

struct TaskInFlight {
  std::shared_ptr<Task> task;
};

// threading.Lock or RLock with an edge from each release to each later acquire. Written here rather than in Python, so
// that no signal's exception can come between an acquire and its caller learning of it.
class FollowedLock {
 public:
  explicit FollowedLock(const char* factory)
      : lock_(py::module_::import("_thread").attr(factory)()),
        acquire_(lock_.attr("acquire")),
        release_(lock_.attr("release")) {}

  bool acquire(bool blocking, double timeout) {
    const bool acquired = acquire_(blocking, timeout).cast<bool>();
    if (acquired) hear_word(meeting_);
    return acquired;
  }
  void release() {
    leave_word(meeting_);
    release_();
  }
  // What Condition.wait does with a reentrant lock.
  py::object release_save() {
    leave_word(meeting_);
    return lock_.attr("_release_save")();
  }
  void acquire_restore(const py::object& state) {
    lock_.attr("_acquire_restore")(state);
    hear_word(meeting_);
  }
  py::object of_lock(const char* name) const { return lock_.attr(name)(); }
  std::string text() const { return "<followed " + py::repr(lock_).cast<std::string>() + ">"; }

 private:
  py::object lock_, acquire_, release_;
  Meeting meeting_;
};
struct Lock : FollowedLock {
  Lock() : FollowedLock("allocate_lock") {}
};
struct RLock : FollowedLock {
  RLock() : FollowedLock("RLock") {}
};

template <class Kind>
py::class_<Kind> bind_lock(py::module_& m, const char* name) {
  auto forward = [](const char* method) { return [method](const Kind& self) { return self.of_lock(method); }; };
  return py::class_<Kind>(m, name)
      .def(py::init<>())
      .def("acquire", &Kind::acquire, py::arg("blocking") = true, py::arg("timeout") = -1.0)
      .def("release", &Kind::release)
      .def("__enter__", [](Kind& self) { return self.acquire(true, -1); })
      .def("__exit__", [](Kind& self, const py::args&) { self.release(); })
      .def("__repr__", &Kind::text)
      .def("locked", forward("locked"))
      .def("_at_fork_reinit", forward("_at_fork_reinit"));
}

}  // namespace

void bind_runtime(py::module_& m) {
  using released = py::call_guard<py::gil_scoped_release>;

  py::class_<Meeting>(m, "Meeting")
      .def(py::init<>())
      .def("leave", [](Meeting& self) { leave_word(self); })
      .def("hear", [](Meeting& self) { hear_word(self); });
  bind_lock<Lock>(m, "Lock");
  bind_lock<RLock>(m, "RLock")
      .def("_is_owned", [](const RLock& self) { return self.of_lock("_is_owned"); })
      .def("_recursion_count", [](const RLock& self) { return self.of_lock("_recursion_count"); })
      .def("_release_save", &RLock::release_save)
      .def("_acquire_restore", &RLock::acquire_restore);
  m.def("name_host_thread", &name_host_thread);
  m.def("host_access", [](const std::string& what, const std::vector<PyExtent>& extents) {
    host_access(what.c_str(), extents_of(extents));
  });
  py::class_<TaskInFlight>(m, "Task").def("finish", [](const TaskInFlight& self) { finish_task(self.task); });
  m.def("begin_task", [](const std::string& what, const std::vector<PyExtent>& extents) {
    return TaskInFlight{begin_task(what, extents_of(extents))};
  });

  py::class_<Party>(m, "Party")
      .def_readonly("actor", &Party::actor)
      .def_readonly("what", &Party::what)
      .def_readonly("site", &Party::site);
  py::class_<Race>(m, "Race")
      .def_readonly("kind", &Race::kind)
      .def_readonly("begin", &Race::begin)
      .def_readonly("end", &Race::end)
      .def_readonly("memory", &Race::memory)
      .def_readonly("now", &Race::now)
      .def_readonly("before", &Race::before)
      .def_readonly("missing", &Race::missing)
      .def_readonly("others", &Race::others);
  m.def("take_races", &take_races);
  m.def("race_count", &race_count);

  m.def("clock_components", [] {
    Locked locked;
    return components(locked);
  });

  py::class_<Options>(m, "Options")
      .def(py::init<>())
      .def_readwrite("races", &Options::races)
      .def_readwrite("strict", &Options::strict)
      .def_readwrite("seed", &Options::seed)
      .def_readwrite("latency_us", &Options::latency_us)
      .def_readwrite("jitter_us", &Options::jitter_us);
  m.def("begin_with", [](int devices, size_t memory, const Options& options) { begin_with({devices, memory, options}); });
  m.def("options", &options);
  m.def("set_options", &set_options);

  m.def("devices", &devices);
  m.def("default_stream", &default_stream);
  m.def("pool_stream", &pool_stream);
  m.def("device_of", &device_of);
  m.def("set_stream_latency", &set_stream_latency);
  m.def("launch", [](StreamIndex stream, const std::string& what, const std::vector<PyExtent>& extents) {
    launch(stream, what, extents_of(extents), [] {});
  });
  m.def("spin", &spin);
  m.def("kernels_run", &kernels_run);
  m.def("wait_for_stream", &wait_for_stream, released());
  m.def("stop", &stop, released());
  m.def("install_fault_handler", &install_fault_handler);

  py::class_<MemoryStats>(m, "MemoryStats")
      .def_readonly("allocated", &MemoryStats::allocated)
      .def_readonly("allocated_peak", &MemoryStats::allocated_peak)
      .def_readonly("reserved", &MemoryStats::reserved)
      .def_readonly("reserved_peak", &MemoryStats::reserved_peak)
      .def_readonly("active", &MemoryStats::active)
      .def_readonly("active_peak", &MemoryStats::active_peak)
      .def_readonly("allocations", &MemoryStats::allocations)
      .def_readonly("frees", &MemoryStats::frees)
      .def_readonly("segments", &MemoryStats::segments)
      .def_readonly("retries", &MemoryStats::retries)
      .def_readonly("ooms", &MemoryStats::ooms);
  m.def("memory_stats", &memory_stats);
  m.def("reset_peak_stats", &reset_peak_stats);
  m.def("total_memory", &total_memory);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("empty_cache", &empty_cache, released());
  m.def("host_register", [](uintptr_t address, size_t bytes) {
    return host_register(reinterpret_cast<void*>(address), bytes);
  });
  m.def("host_unregister", [](uintptr_t address) { return host_unregister(reinterpret_cast<void*>(address)); });
  m.def("is_pinned", [](uintptr_t address) { return is_pinned(reinterpret_cast<void*>(address)); });
}

}  // namespace sim
