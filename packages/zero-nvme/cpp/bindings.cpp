// Translates zero_nvme to Python: names as in C++, the GIL released in every wait, buffers kept until completion.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <system_error>
#include <thread>

#include "zero_nvme/checksum.hpp"
#include "zero_nvme/memory.hpp"
#include "zero_nvme/store.hpp"

namespace py = pybind11;
using namespace zero_nvme;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kSlice{20};  // how long Ctrl-C may go unnoticed

// Waits in slices without the GIL, looking for signals in between. False: the time is up.
template <typename Wait>
bool wait_interruptibly(std::optional<double> timeout_seconds, Wait&& wait) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (;;) {
    milliseconds slice = kSlice;
    if (timeout_seconds) {
      const std::chrono::duration<double> left(*timeout_seconds - std::chrono::duration<double>(Clock::now() - start).count());
      slice = std::min(slice, std::max(milliseconds(0), std::chrono::ceil<milliseconds>(left)));
    }
    bool ready;
    {
      py::gil_scoped_release released;
      ready = wait(slice);
    }
    if (ready) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (timeout_seconds && Clock::now() - start >= std::chrono::duration<double>(*timeout_seconds)) return false;
  }
}

// A request, and the buffer view or other object that keeps the caller's memory alive.
class PyRequest {
 public:
  PyRequest(std::shared_ptr<Request> request, py::object keep) : request_(std::move(request)), keep_(std::move(keep)) {}

  bool done() {
    if (!request_->done()) return false;
    keep_ = py::none();
    return true;
  }
  bool wait(std::optional<double> timeout_seconds) {
    const bool completed =
        request_->done() || wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return request_->wait_for(slice); });
    return completed && done();
  }
  // None, or (errno, path index, offset, wanted, got). A cancelled request that lost nothing is a success.
  std::optional<std::tuple<int, std::uint32_t, std::uint64_t, std::size_t, std::size_t>> failure() const {
    const auto failure = request_->failure();
    if (!failure) return std::nullopt;
    return std::make_tuple(failure->code, failure->path, failure->offset, failure->wanted, failure->got);
  }
  bool cancelled() const { return request_->cancelled() && request_->skipped() > 0 && !request_->failure(); }
  Request& request() { return *request_; }

 private:
  std::shared_ptr<Request> request_;
  py::object keep_;
};

using RequestHandle = std::shared_ptr<PyRequest>;

class PyStore {
 public:
  PyStore(const std::vector<std::tuple<int, bool, std::size_t, std::size_t>>& files, std::vector<std::uint32_t> pattern,
          const std::string& backend, std::size_t block_bytes, std::size_t inflight_bytes, unsigned depth,
          unsigned threads, std::size_t max_requests)
      : process_(::getpid()) {
    std::vector<PathFile> paths;
    for (const auto& [fd, direct, alignment, memory_alignment] : files) {
      paths.push_back({fd, direct, alignment, memory_alignment});
    }
    py::gil_scoped_release released;
    store_ = std::make_shared<Store>(paths, StripeMap(std::move(pattern), block_bytes),
                                     Options{backend, {block_bytes, inflight_bytes, depth}, threads, max_requests});
  }

  ~PyStore() {
    if (::getpid() != process_) {
      abandon();
    } else {
      close();
    }
  }

  RequestHandle submit(bool write, std::uint64_t offset, std::uintptr_t address, std::size_t nbytes, py::object keep) {
    reap();
    std::shared_ptr<Request> request;
    for (;;) {
      const auto store = open();
      {
        py::gil_scoped_release released;
        request = store->try_submit(write ? Op::write : Op::read, offset, reinterpret_cast<char*>(address), nbytes);
      }
      if (request) break;
      wait_interruptibly(std::nullopt, [&](milliseconds slice) { return store->gate().wait_for_room(slice); });
    }
    auto handle = std::make_shared<PyRequest>(std::move(request), std::move(keep));
    kept_.push_back(handle);
    return handle;
  }

  bool drain(std::optional<double> timeout_seconds) {
    const auto store = open();
    const bool empty =
        wait_interruptibly(timeout_seconds, [&](milliseconds slice) { return store->gate().wait_for_empty(slice); });
    reap();
    return empty;
  }

  void cancel() {
    for (auto& handle : kept_) handle->request().cancel();
  }

  std::size_t pending() { return open()->gate().inside(); }

  py::list statistics();

  void close() {
    if (!store_ || ::getpid() != process_) return;
    std::shared_ptr<Store> last = std::move(store_);  // no new requests
    store_ = nullptr;
    {
      py::gil_scoped_release released;
      while (last.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));  // calls of other threads
      last.reset();                                                               // waits for requests in flight
    }
    std::deque<RequestHandle>().swap(kept_);
  }

  // In a forked child: the threads are not here, their locks may be held. Close the descriptors, leave the rest be.
  void abandon() {
    if (!store_) return;
    store_->close_in_child();
    new std::shared_ptr<Store>(std::move(store_));  // never destroyed
  }

 private:
  std::shared_ptr<Store> open() {
    if (!store_) throw py::value_error("closed");
    return store_;
  }

  // Lets go of the memory of completed requests: those at the front at once, others when they outnumber the rest.
  // Letting go runs the owner's code, which may come back here: kept_ is whole whenever done() is called.
  void reap() {
    while (!kept_.empty() && kept_.front()->request().done()) {
      const RequestHandle handle = std::move(kept_.front());
      kept_.pop_front();
      handle->done();
    }
    if (kept_.size() < 2 * live_after_sweep_ + 64) return;
    std::deque<RequestHandle> live, completed;
    for (auto& handle : kept_) (handle->request().done() ? completed : live).push_back(std::move(handle));
    kept_.swap(live);
    live_after_sweep_ = kept_.size();
    for (auto& handle : completed) handle->done();
  }

  const pid_t process_;
  std::shared_ptr<Store> store_;
  std::deque<RequestHandle> kept_;
  std::size_t live_after_sweep_ = 0;
};

py::dict buckets(const Histogram& histogram) {
  py::dict result;
  for (int i = 0; i < Histogram::kBuckets; ++i) {
    if (histogram.bucket(i) > 0) result[py::int_(Histogram::upper_edge(i))] = histogram.bucket(i);
  }
  return result;
}

// One dict a path; histograms as {largest value of the bucket: count}.
py::list PyStore::statistics() {
  const auto store = open();
  py::list result;
  for (const auto& path : store->paths()) {
    const Statistics& statistics = path->statistics();
    py::dict entry;
    for (int op = 0; op < 2; ++op) {
      const Direction& d = statistics.direction[op];
      py::dict direction;
      direction["bytes"] = d.bytes.load();
      direction["blocks"] = d.blocks.load();
      direction["retries"] = d.retries.load();
      direction["failures"] = d.failures.load();
      direction["bounced_bytes"] = d.bounced_bytes.load();
      direction["latency_nanoseconds"] = buckets(d.latency_nanoseconds);
      direction["latency_nanoseconds_maximum"] = d.latency_nanoseconds.maximum();
      entry[op == 0 ? "read" : "write"] = direction;
    }
    entry["depth"] = buckets(statistics.depth);
    entry["registered_file"] = path->backend().registered_file();
    result.append(entry);
  }
  return result;
}

bool wait_for_mail(const Mailbox& mailbox, std::optional<double> timeout_seconds) {
  return wait_interruptibly(timeout_seconds,
                            [&](milliseconds slice) { return mailbox.wait_for(static_cast<int>(slice.count())); });
}

std::uintptr_t address_of(const py::buffer& object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_CONTIG_RO) != 0) throw py::error_already_set();
  const auto address = reinterpret_cast<std::uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native part of zero_nvme. Not an interface: use zero_nvme.";

  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
      py::object arguments = py::make_tuple(error.code().value(), std::string(error.what()));
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });

  py::class_<PyRequest, RequestHandle>(m, "Request")
      .def("done", &PyRequest::done)
      .def("wait", &PyRequest::wait, py::arg("timeout_seconds") = py::none())
      .def("failure", &PyRequest::failure)
      .def("cancel", [](PyRequest& self) { self.request().cancel(); })
      .def("cancelled", &PyRequest::cancelled)
      .def("notify", [](PyRequest& self, std::shared_ptr<Mailbox> mailbox, std::uint64_t token) {
             self.request().notify(std::move(mailbox), token);
           });

  py::class_<Mailbox, std::shared_ptr<Mailbox>>(m, "Mailbox")
      .def(py::init<>())
      .def("fileno", &Mailbox::fd)
      .def("post", &Mailbox::post, py::arg("token"))
      .def("take", &Mailbox::take)
      .def("wait", &wait_for_mail, py::arg("timeout_seconds") = py::none());

  py::class_<PyStore>(m, "Store")
      .def(py::init<const std::vector<std::tuple<int, bool, std::size_t, std::size_t>>&, std::vector<std::uint32_t>,
                    const std::string&, std::size_t, std::size_t, unsigned, unsigned, std::size_t>(),
           py::arg("files"), py::arg("pattern"), py::arg("backend"), py::arg("block_bytes"),
           py::arg("inflight_bytes"), py::arg("depth"), py::arg("threads"), py::arg("max_requests"))
      .def("submit", &PyStore::submit, py::arg("write"), py::arg("offset"), py::arg("address"), py::arg("nbytes"),
           py::arg("keep"))
      .def("drain", &PyStore::drain, py::arg("timeout_seconds") = py::none())
      .def("cancel", &PyStore::cancel)
      .def("pending", &PyStore::pending)
      .def("statistics", &PyStore::statistics)
      .def("close", &PyStore::close)
      .def("abandon", &PyStore::abandon);

  py::class_<HugeMapping>(m, "HugeBuffer", py::buffer_protocol())
      .def(py::init<std::size_t>(), py::arg("nbytes"))
      .def_buffer([](HugeMapping& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.data()), static_cast<py::ssize_t>(self.nbytes()));
      });

  m.def("backends", [] {
    std::vector<std::string> names;
    for (const RegisteredBackend& entry : backends()) names.emplace_back(entry.name);
    return names;
  });
  m.def("address_of", &address_of, py::arg("object"));
  m.def("has_checksum", &has_checksum);
  m.def("checksum",
        [](std::uintptr_t address, std::size_t nbytes) { return checksum(reinterpret_cast<const char*>(address), nbytes); },
        py::arg("address"), py::arg("nbytes"), py::call_guard<py::gil_scoped_release>());
}
