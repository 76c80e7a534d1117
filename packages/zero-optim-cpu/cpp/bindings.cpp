// Python names of the other C++ files: they take addresses and numbers, no tensors. The GIL is released in every call
// that computes or waits. Not here: checks of dtypes, devices and contiguity (in zero_optim_cpu/tensors.py).
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "batch.hpp"
#include "convert.hpp"
#include "dispatch.hpp"
#include "pool.hpp"

namespace py = pybind11;
using namespace zero_optim;

namespace {

template <class T> T* pointer(std::uintptr_t address) { return reinterpret_cast<T*>(address); }

// A submitted update. Keeps the tensors alive, and outlives the work.
class Handle {
public:
    Handle(std::shared_ptr<Job> job, py::object keep) : job_(std::move(job)), keep_(std::move(keep)) {}
    Handle(Handle&&) = default;
    ~Handle() {
        if (job_ == nullptr || job_->done()) return;
        const py::gil_scoped_release release;
        try {
            job_->wait();
        } catch (const std::runtime_error&) {  // of a parent process: nothing runs here
        }
    }
    bool done() const { return job_->done(); }
    void wait(std::optional<double> timeout) {
        bool ended;
        {
            const py::gil_scoped_release release;
            ended = job_->wait(timeout ? std::max(0.0, *timeout) : -1.0);
        }
        if (!ended) {
            PyErr_Format(PyExc_TimeoutError, "the update did not end within %S seconds", py::float_(*timeout).ptr());
            throw py::error_already_set();
        }
        keep_ = py::none();
    }

private:
    std::shared_ptr<Job> job_;
    py::object keep_;
};

// Destroying a pool waits for its threads, which must not need the GIL meanwhile.
struct ReleasedDelete {
    void operator()(Pool* pool) const {
        const py::gil_scoped_release release;
        delete pool;
    }
};
using PoolPointer = std::unique_ptr<Pool, ReleasedDelete>;

void over_elements(Pool& pool, std::int64_t numel, std::function<void(std::int64_t, std::int64_t)> body) {
    const py::gil_scoped_release release;
    const Cut pieces = cut({numel}, pool.threads());
    pool.run(std::make_shared<Job>(std::int64_t(pieces.parts.size()), [&](std::int64_t k) {
        body(pieces.parts[k].begin, pieces.parts[k].end);
    }));
}

// One value a chunk of norm_chunk_numel elements, in order.
template <class T, class Kernel>
std::vector<T> over_chunks(Pool& pool, Kernel kernel, std::uintptr_t values, std::int64_t numel) {
    const py::gil_scoped_release release;
    std::vector<T> results(std::size_t((numel + norm_chunk_numel - 1) / norm_chunk_numel));
    pool.run(std::make_shared<Job>(std::int64_t(results.size()), [&](std::int64_t k) {
        const std::int64_t begin = k * norm_chunk_numel;
        results[k] = kernel(pointer<const void>(values), begin, std::min(numel, begin + norm_chunk_numel));
    }));
    return results;
}

using Addresses = std::array<std::uintptr_t, 2>;

Item make_item(std::uintptr_t parameter, int parameter_dtype, std::uintptr_t master, const Addresses& states,
               const Addresses& scales, std::int64_t numel) {
    Item item{};
    item.parameter = pointer<void>(parameter);
    item.parameter_dtype = DType(parameter_dtype);
    item.master = pointer<void>(master);
    for (int k = 0; k < 2; ++k) {
        item.state[k] = pointer<void>(states[k]);
        item.scale[k] = pointer<float>(scales[k]);
    }
    item.numel = numel;
    return item;
}

void bind_values(py::module_& m) {
    m.def("compiled_isas", compiled_isas);
    m.def("available_isas", available_isas);
    m.def("physical_cores", physical_cores);
    py::class_<Table, std::unique_ptr<Table, py::nodelete>>(m, "Table");
    m.def("table", [](const std::string& isa) { return const_cast<Table*>(table_of(isa)); },
          py::return_value_policy::reference);
    py::class_<Pool, PoolPointer>(m, "Pool")
        .def(py::init([](int threads, std::vector<int> cores) {
                 return PoolPointer(new Pool(threads, std::move(cores)));
             }),
             py::arg("threads"), py::arg("cores") = std::vector<int>())
        .def_property_readonly("threads", &Pool::threads);
    py::class_<Handle>(m, "Handle", "An update that runs in the background. Dropping it waits for the end.")
        .def("done", &Handle::done, "Returns whether the update has ended. Never blocks.")
        .def("wait", &Handle::wait, py::arg("timeout") = py::none(),
             "Blocks until the update has ended. Raises TimeoutError after `timeout` seconds.");
    py::class_<Hyper>(m, "Hyper")
        .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, double momentum,
                         double dampening, double lr_decay, std::int64_t step, bool decoupled, bool nesterov,
                         bool maximize) {
                 return Hyper{lr,        beta1,    beta2, eps,       weight_decay, momentum,
                              dampening, lr_decay, step,  decoupled, nesterov,     maximize};
             }),
             py::kw_only(), py::arg("lr"), py::arg("beta1") = 0.0, py::arg("beta2") = 0.0, py::arg("eps") = 0.0,
             py::arg("weight_decay") = 0.0, py::arg("momentum") = 0.0, py::arg("dampening") = 0.0,
             py::arg("lr_decay") = 0.0, py::arg("step") = 1, py::arg("decoupled") = false, py::arg("nesterov") = false,
             py::arg("maximize") = false);
    py::class_<Item>(m, "Item").def(py::init(&make_item), py::arg("parameter"), py::arg("parameter_dtype"),
                                    py::arg("master"), py::arg("states"), py::arg("scales"), py::arg("numel"));
}

void bind_batch(py::module_& m) {
    using Segments = std::vector<std::tuple<std::int64_t, std::int64_t, Hyper>>;
    py::class_<Batch>(m, "Batch")
        .def(py::init([](const Table& table, int rule, int moments) {
            return Batch(&table, Rule(rule), Moments(moments));
        }))
        .def("__len__", &Batch::size)
        .def("add",
             [](Batch& batch, Item item, int master, std::uintptr_t gradient, int gradient_dtype, const Segments& segments) {
                 item.gradient = pointer<const void>(gradient);
                 item.gradient_dtype = DType(gradient_dtype);
                 std::vector<HyperSegment> list;
                 list.reserve(segments.size());
                 for (const auto& [start, stop, hyper] : segments) list.push_back({start, stop, hyper});
                 batch.add(item, Master(master), std::move(list));
             })
        .def("check_disjoint", &Batch::check_disjoint)
        .def("refresh", &Batch::refresh)
        .def("run",
             [](const Batch& batch, Pool& pool, double scale) {
                 const py::gil_scoped_release release;
                 pool.run(batch.job(scale, pool.threads()));
             })
#ifdef ZERO_OPTIM_ROOFLINE
        .def("run_roofline",
             [](const Batch& batch, Pool& pool) {
                 const py::gil_scoped_release release;
                 pool.run(batch.roofline_job(pool.threads()));
             })
#endif
        .def("start", [](const Batch& batch, Pool& pool, double scale, py::object keep) {
            std::shared_ptr<Job> job;
            {
                const py::gil_scoped_release release;
                job = batch.job(scale, pool.threads());
                pool.submit(job);
            }
            return Handle(std::move(job), std::move(keep));
        });
}

void bind_tensors(py::module_& m) {
    m.def("accumulate", [](Pool& pool, const Table& table, std::uintptr_t into, std::uintptr_t values, int dtype,
                           std::int64_t numel) {
        const auto kernel = table.accumulate[dtype];
        over_elements(pool, numel, [=](std::int64_t begin, std::int64_t end) {
            kernel(pointer<float>(into), pointer<const void>(values), begin, end);
        });
    });
    m.def("chunk_norms_squared", [](Pool& pool, const Table& table, std::uintptr_t values, int dtype,
                                    std::int64_t numel) {
        return over_chunks<double>(pool, table.norm_squared[dtype], values, numel);
    });
    m.def("count_nonfinite", [](Pool& pool, const Table& table, std::uintptr_t values, int dtype, std::int64_t numel) {
        std::int64_t sum = 0;
        const auto kernel = table.count_nonfinite[dtype];
        for (const auto chunk : over_chunks<std::int64_t>(pool, kernel, values, numel)) sum += chunk;
        return sum;
    });
    // `slot` is -1 for the master, else of a state; `kind` is a Master or a Moments accordingly.
    m.def("encode", [](Pool& pool, const Item& item, int slot, int kind, std::uintptr_t values) {
        over_elements(pool, item.numel, [=](std::int64_t begin, std::int64_t end) {
            if (slot < 0) encode_master(pointer<const float>(values), item, Master(kind), begin, end);
            else encode_moment(pointer<const float>(values), item, slot, Moments(kind), begin, end);
        });
    });
    m.def("decode", [](Pool& pool, const Item& item, int slot, int kind, std::uintptr_t values) {
        over_elements(pool, item.numel, [=](std::int64_t begin, std::int64_t end) {
            if (slot < 0) decode_master(pointer<float>(values), item, Master(kind), begin, end);
            else decode_moment(pointer<float>(values), item, slot, Moments(kind), begin, end);
        });
    });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "Optimizer kernels for CPUs: addresses and numbers in, no torch. Private to zero_optim_cpu.";
    bind_values(m);
    bind_batch(m);
    bind_tensors(m);
}
