// Collectives in the order of streams, as NCCL's: gloo on the bytes, called by the stream's own thread.
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>

#include "torch_device.hpp"

namespace sim {
using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;

namespace {
// One communicator's collectives happen one after the other, in the order of their calls, whatever streams they are on.
class Order {
 public:
  uint64_t take() { return taken_++; }  // by the host
  class Turn {                          // by the stream's thread
   public:
    Turn(Order& order, uint64_t number) : order_(order) {
      std::unique_lock<std::mutex> lock(order_.lock_);
      order_.next_.wait(lock, [&] { return order_.served_ == number; });
    }
    ~Turn() {
      std::lock_guard<std::mutex> lock(order_.lock_);
      order_.served_++;
      order_.next_.notify_all();
    }

   private:
    Order& order_;
  };

 private:
  std::mutex lock_;
  std::condition_variable next_;
  std::atomic<uint64_t> taken_{0};
  uint64_t served_ = 0;
};

// Called by the stream's thread: begins the communication, and returns a function that ends it. Only messages from one
// rank to one other rank may end later. All other communication is over when Start returns, and Finish is empty.
using Finish = std::function<void()>;
using Start = std::function<Finish()>;

struct Parts {
  OpType type;
  std::string name;
  Tensors in, out;
  Start start;
};

struct SimWork final : c10d::Work {
  SimWork(int rank, OpType type, c10::Device device, StreamIndex stream, bool blocks_host)
      : Work(rank, type), device_(device), stream_(stream), blocks_host_(blocks_host) {
    record(done_, stream);
  }
  ~SimWork() override {  // nobody waited: the memory goes back to its stream after the collective
    for (const Tensor& t : kept_)
      if (t.storage().data()) record_stream(t.storage().mutable_data(), stream_);
  }
  bool isCompleted() override { return query(done_); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    stream_waits(current_stream(device_.index()), done_);
    if (blocks_host_) {
      count_wait("barrier");
      WithoutGil release;
      wait_for_event(done_);
    }
    kept_.clear();
  }
  Tensors result() override { return out_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void keep(const Tensors& in, const Tensors& out) {  // until it is waited for, as NCCL does
    kept_ = in;
    kept_.insert(kept_.end(), out.begin(), out.end());
  }
  void promise(const Tensors& out) {
    out_ = out;
    c10::StreamGuard guard(stream_at(stream_));
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device_});
    future_->markCompleted(c10::IValue(out));
  }

 private:
  Event done_;
  c10::Device device_;
  StreamIndex stream_;
  bool blocks_host_;
  Tensors kept_, out_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Bytes where they only travel: gloo knows fewer types than NCCL.
Tensor bytes(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat: case at::kDouble: case at::kHalf: case at::kBFloat16: case at::kByte: case at::kChar: case at::kInt:
    case at::kLong:
      return t;
    default:
      return t.dim() ? t.view(at::kByte) : t.view({1}).view(at::kByte);
  }
}
Tensors bytes(const Tensors& ts) {
  Tensors out;
  for (const Tensor& t : ts) out.push_back(bytes(t));
  return out;
}

// What some versions of torch lack: not marked `override`, and asked of gloo only where it is there.
template <class B>
auto options_of(B& gloo, int) -> decltype(gloo.getBackendOptions()) { return gloo.getBackendOptions(); }
c10::intrusive_ptr<c10d::Backend::Options> options_of(c10d::Backend&, long) { return nullptr; }
template <class B>
auto set_timeout(B& gloo, std::chrono::milliseconds t, int) -> decltype(gloo.setTimeout(t)) { gloo.setTimeout(t); }
void set_timeout(c10d::Backend&, std::chrono::milliseconds, long) {}

struct SimCCL final : c10d::Backend {
  SimCCL(c10::intrusive_ptr<Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() { return options_of(*gloo_, 0); }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds t) { set_timeout(*gloo_, t, 0); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void startCoalescing() override {
    TORCH_CHECK(!group_, "a group of collectives has begun in the one before");
    group_.emplace();
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(group_, "endCoalescing without startCoalescing");
    std::vector<Parts> parts = std::move(*group_);
    group_.reset();
    TORCH_CHECK(!parts.empty(), "a group of collectives without any");
    Parts all{OpType::COALESCED, "group of", {}, {}, nullptr};
    std::vector<Start> starts;
    for (Parts& p : parts) {
      all.name += " " + p.name;
      all.in.insert(all.in.end(), p.in.begin(), p.in.end());
      all.out.insert(all.out.end(), p.out.begin(), p.out.end());
      starts.push_back(std::move(p.start));
    }
    all.start = [starts = std::move(starts)]() -> Finish {
      std::vector<Finish> ends;
      for (const Start& start : starts)
        if (Finish end = start()) ends.push_back(std::move(end));
      for (const Finish& end : ends) end();
      return nullptr;
    };
    return run(std::move(all), true);
  }

  // -- collectives ----------------------------------------------------------------------------------------------------
  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return run({OpType::BROADCAST, "broadcast", t, t, [g = gloo_, x = bytes(seen(t)), o]() mutable -> Finish {
      g->broadcast(x, o)->wait();
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return run({OpType::ALLREDUCE, "all_reduce", t, t, [this, x = seen(t), o]() mutable -> Finish {
      reduce_all(x[0], o.reduceOp, o.timeout);
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    return run({OpType::ALLREDUCE_COALESCED, "all_reduce", t, t, [this, x = seen(t), o]() mutable -> Finish {
      for (Tensor& one : x) reduce_all(one, o.reduceOp, o.timeout);
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return run({OpType::REDUCE, "reduce", t, t, [this, x = seen(t), o]() mutable -> Finish {
      const bool mean = o.reduceOp == c10d::ReduceOp::AVG;
      Tensors work{x[0].clone()};  // gloo leaves partial sums on the other ranks
      auto options = o;
      if (mean) options.reduceOp = c10d::ReduceOp(c10d::ReduceOp::SUM);
      gloo_->reduce(work, options)->wait();
      if (rank_ == o.rootRank) x[0].copy_(mean ? work[0].div_(size_) : work[0]);
      return nullptr;
    }}, o.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return run({OpType::_ALLGATHER_BASE, "all_gather", {in}, {out}, [this, y = seen({out}), x = seen({in}), o]() -> Finish {
      gather_all(y[0], x[0], o);
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& out, Tensors& in,
                                                                 const c10d::AllgatherOptions& o) override {
    return run({OpType::ALLGATHER_COALESCED, "all_gather", in, out, [this, y = seen(out), x = seen(in), o]() -> Finish {
      for (size_t i = 0; i < y.size(); i++) gather_all(y[i], x[i], o);
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return run({OpType::ALLGATHER, "all_gather", in, out.at(0), [this, y = bytes(seen(out[0])), x = bytes(seen(in)), o]() -> Finish {
      gather_list(y, x[0], o);
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<Tensors>& out, Tensors& in,
                                                     const c10d::AllgatherOptions& o) override {
    Tensors flat;  // out[rank][i]
    for (const Tensors& of_rank : out) flat.insert(flat.end(), of_rank.begin(), of_rank.end());
    return run({OpType::ALLGATHER_COALESCED, "all_gather", in, flat, [this, y = bytes(seen(flat)), x = bytes(seen(in)), o]() -> Finish {
      for (size_t i = 0; i < x.size(); i++) {
        Tensors of_ranks;
        for (int r = 0; r < size_; r++) of_ranks.push_back(y[r * x.size() + i]);
        gather_list(of_ranks, x[i], o);
      }
      return nullptr;
    }}, o.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return run({OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", {in}, {out}, [this, y = seen({out}), x = seen({in}), o]() -> Finish {
      reduce_and_scatter(y[0], x[0].clone(), o);
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                                 const c10d::ReduceScatterOptions& o) override {
    return run({OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", in, out, [this, y = seen(out), x = seen(in), o]() -> Finish {
      for (size_t i = 0; i < y.size(); i++) reduce_and_scatter(y[i], x[i].clone(), o);
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors& out, std::vector<Tensors>& in,
                                                const c10d::ReduceScatterOptions& o) override {
    return run({OpType::REDUCE_SCATTER, "reduce_scatter", in.at(0), out, [this, y = seen(out), x = seen(in[0]), o]() -> Finish {
      bool equal = true;
      for (const Tensor& t : x) equal = equal && t.sizes() == y[0].sizes();
      if (equal) {
        Tensors flat;
        for (const Tensor& t : x) flat.push_back(t.reshape(-1));
        reduce_and_scatter(y[0], at::cat(flat), o);
      } else {
        for (int r = 0; r < size_; r++) {
          Tensor one = x[r].clone();
          reduce_all(one, o.reduceOp, o.timeout);
          if (r == rank_) y[0].copy_(one);
        }
      }
      return nullptr;
    }}, o.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& o) override {
    const Tensors flat = out.empty() ? Tensors{} : out[0];
    return run({OpType::GATHER, "gather", in, flat, [g = gloo_, y = bytes(seen(flat)), x = bytes(seen(in)), o]() mutable -> Finish {
      std::vector<Tensors> into;
      if (!y.empty()) into.push_back(y);
      g->gather(into, x, o)->wait();
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& o) override {
    const Tensors flat = in.empty() ? Tensors{} : in[0];
    return run({OpType::SCATTER, "scatter", flat, out, [g = gloo_, y = bytes(seen(out)), x = bytes(seen(flat)), o]() mutable -> Finish {
      std::vector<Tensors> from;
      if (!x.empty()) from.push_back(x);
      g->scatter(y, from, o)->wait();
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes,
                                               std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& o) override {
    return run({OpType::ALLTOALL_BASE, "all_to_all", {in}, {out},
                [g = gloo_, y = bytes(seen({out})), x = bytes(seen({in})), out_sizes, in_sizes, o]() mutable -> Finish {
      g->alltoall_base(y[0], x[0], out_sizes, in_sizes, o)->wait();
      return nullptr;
    }}, o.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& o) override {
    return run({OpType::ALLTOALL, "all_to_all", in, out, [g = gloo_, y = bytes(seen(out)), x = bytes(seen(in)), o]() mutable -> Finish {
      Tensors flat;
      std::vector<int64_t> out_sizes, in_sizes;
      for (const Tensor& t : x) flat.push_back(t.reshape(-1)), in_sizes.push_back(t.numel());
      int64_t total = 0;
      for (const Tensor& t : y) out_sizes.push_back(t.numel()), total += t.numel();
      Tensor from = at::cat(flat), into = at::empty({total}, y.at(0).options());
      g->alltoall_base(into, from, out_sizes, in_sizes, o)->wait();
      int64_t at = 0;
      for (Tensor& t : y) {
        t.copy_(into.narrow(0, at, t.numel()).view(t.sizes()));
        at += t.numel();
      }
      return nullptr;
    }}, o.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& t, int to, int tag) override {
    return run({OpType::SEND, "send", t, {}, [g = gloo_, x = bytes(seen(t)), to, tag]() mutable -> Finish {
      return [work = g->send(x, to, tag)] { work->wait(); };
    }}, true);
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& t, int from, int tag) override {
    return run({OpType::RECV, "recv", {}, t, [g = gloo_, x = bytes(seen(t)), from, tag]() mutable -> Finish {
      return [work = g->recv(x, from, tag)] { work->wait(); };
    }}, true);
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
    const auto device = o.device && o.device->type() == kSim && o.device->has_index()
                            ? *o.device
                            : c10::Device(kSim, o.device_ids.empty() ? current_device() : c10::DeviceIndex(o.device_ids[0]));
    return run({OpType::BARRIER, "barrier", {}, {}, [g = gloo_, o]() -> Finish {
      auto options = o;
      options.device = c10::Device(at::kCPU);
      options.device_ids.clear();
      g->barrier(options)->wait();
      return nullptr;
    }}, true, device);
  }

 private:
  static Tensors seen(const Tensors& ts) {
    Mirror streams(at::kCPU);
    Tensors out;
    for (const Tensor& t : ts) {
      TORCH_CHECK(on_device(t), "simccl moves tensors of sim, not of ", t.device());
      TORCH_CHECK(t.is_contiguous() || t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      out.push_back(streams.of(t));
    }
    return out;
  }

  c10::intrusive_ptr<c10d::Work> run(Parts parts, bool async, std::optional<c10::Device> device = std::nullopt) {
    if (group_ && parts.type != OpType::COALESCED) {
      group_->push_back(std::move(parts));
      return c10::make_intrusive<c10d::Work>();
    }
    if (!device) device = (parts.out.empty() ? parts.in : parts.out).at(0).device();
    c10::DeviceGuard guard(*device);
    const StreamIndex before = current_stream(device->index());
    const bool one_way = parts.type == OpType::SEND || parts.type == OpType::RECV;
    const StreamIndex on = async ? stream_for(device->index(), parts.type) : before;
    if (on != before) {
      Event ready;
      record(ready, before);
      stream_waits(on, ready);
    }
    std::vector<Extent> extents;
    for (const Tensor& t : parts.in) add_extents(t, false, extents);
    for (const Tensor& t : parts.out) add_extents(t, true, extents);
    sequence_++;
    if (one_way) {
      queue(on, parts.name, extents, [start = std::move(parts.start)] { start()(); });
    } else {
      queue(on, parts.name, extents, [self = c10::intrusive_ptr<SimCCL>::reclaim_copy(this), start = std::move(parts.start),
                                      number = order_.take()] {
        Order::Turn turn(self->order_, number);
        if (Finish end = start()) end();
      });
    }
    auto work = c10::make_intrusive<SimWork>(rank_, parts.type, *device, on, parts.type == OpType::BARRIER);
    if (async) work->keep(parts.in, parts.out);
    work->promise(parts.out.empty() ? parts.in : parts.out);
    return work;
  }

  // One stream per communicator and device, and one more each for sends and for receives, where NCCL would have further
  // communicators. Otherwise two ranks that both send before they receive would wait for each other.
  StreamIndex stream_for(c10::DeviceIndex device, OpType type) {
    const int kind = type == OpType::SEND ? 1 : type == OpType::RECV ? 2 : 0;
    const auto [it, added] = streams_.try_emplace(device * 3 + kind, 0);
    if (added) it->second = pool_stream(device);
    return it->second;
  }

  // -- in the stream's thread -------------------------------------------------------------------------------------------
  void reduce_all(Tensor& t, const c10d::ReduceOp& op, std::chrono::milliseconds timeout) {
    c10d::AllreduceOptions options;
    options.timeout = timeout;
    const bool mean = op == c10d::ReduceOp::AVG;
    options.reduceOp = mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    Tensors given{t.scalar_type() == at::kBool ? t.view(at::kByte) : t};
    gloo_->allreduce(given, options)->wait();
    if (mean) t.div_(size_);
  }
  void gather_all(const Tensor& out, const Tensor& in, const c10d::AllgatherOptions& o) {
    Tensor into = bytes(out.view(-1)), from = bytes(in.reshape(-1)).clone();  // the input may be a part of the output
    TORCH_CHECK(into.numel() == from.numel() * size_, "all_gather: the output has ", out.numel(), " elements, and ",
                size_, " inputs of ", in.numel(), " do not fill it");
    gloo_->_allgather_base(into, from, o)->wait();
  }
  void gather_list(const Tensors& out, const Tensor& in, const c10d::AllgatherOptions& o) {
    TORCH_CHECK(int(out.size()) == size_, "all_gather: ", out.size(), " outputs for ", size_, " ranks");
    bool equal = true;
    for (const Tensor& t : out) equal = equal && t.numel() == in.numel();
    if (equal) {
      std::vector<Tensors> into{out};
      Tensors from{in.clone()};
      gloo_->allgather(into, from, o)->wait();
      return;
    }
    for (int r = 0; r < size_; r++) {  // unequal sizes, as NCCL does it
      if (r == rank_) const_cast<Tensor&>(out[r]).copy_(in);
      c10d::BroadcastOptions from;
      from.rootRank = r, from.timeout = o.timeout;
      Tensors one{out[r]};
      gloo_->broadcast(one, from)->wait();
    }
  }
  void reduce_and_scatter(const Tensor& out, Tensor in, const c10d::ReduceScatterOptions& o) {
    TORCH_CHECK(in.numel() == out.numel() * size_, "reduce_scatter: the input has ", in.numel(), " elements, not those of ",
                size_, " outputs of ", out.numel());
    reduce_all(in, o.reduceOp, o.timeout);
    const_cast<Tensor&>(out).copy_(in.view({size_, -1})[rank_].view(out.sizes()));
  }

  c10::intrusive_ptr<Backend> gloo_;
  Order order_;
  std::atomic<uint64_t> sequence_{0};
  std::unordered_map<int, StreamIndex> streams_;
  std::optional<std::vector<Parts>> group_;  // the calls since startCoalescing
};
}  // namespace

void bind_collectives(pybind11::module& m) {
  pybind11::module::import("torch.distributed");
  pybind11::class_<SimCCL, c10d::Backend, c10::intrusive_ptr<SimCCL>>(m, "SimCCL")
      .def(pybind11::init([](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
        return c10::make_intrusive<SimCCL>(std::move(gloo), rank, size);
      }));
}
}  // namespace sim
