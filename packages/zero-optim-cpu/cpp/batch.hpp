// A list of items updated in one dispatch: coefficients, cutting into parts, checks of addresses.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pool.hpp"
#include "types.hpp"

namespace zero_optim {

// Options of one segment, as torch.optim names them, in double.
struct Hyper {
    double lr = 0.0, beta1 = 0.0, beta2 = 0.0, eps = 0.0, weight_decay = 0.0;
    double momentum = 0.0, dampening = 0.0, lr_decay = 0.0;
    std::int64_t step = 1;
    bool decoupled = false, nesterov = false, maximize = false;
};

// Rounds to float once, after the last operation in double. `scale` multiplies the gradient.
Coefficients coefficients(Rule rule, const Hyper& hyper, double scale);

struct HyperSegment {
    std::int64_t start, stop;
    Hyper hyper;
};

// Items of one rule and one layout of moments; parameter and gradient types may differ from item to item.
class Batch {
public:
    Batch(const Table* table, Rule rule, Moments moments) : table_(table), rule_(rule), moments_(moments) {}

    // Throws std::invalid_argument for a combination without a kernel, a misaligned address, buffers of the item that
    // overlap, or segments that are out of range or overlap.
    void add(const Item& item, Master master, std::vector<HyperSegment> segments);
    std::size_t size() const { return items_.size(); }

    // Throws std::invalid_argument if memory that one item writes overlaps another's.
    void check_disjoint() const;

    // For the next job: the gradient's address and the options of every item, each of one segment. Gradients keep their
    // types. Throws as `add`.
    void refresh(const std::vector<std::uintptr_t>& gradients, const std::vector<const Hyper*>& hypers);

    // The job that updates all items. It owns copies of all its inputs, except the items' memory.
    std::shared_ptr<Job> job(double scale, int threads) const {
        return job(scale, threads, table_->update[int(rule_)]);
    }
#ifdef ZERO_OPTIM_ROOFLINE
    // The job that moves the same bytes as Adam's update and does no arithmetic.
    std::shared_ptr<Job> roofline_job(int threads) const { return job(1.0, threads, table_->roofline); }
#endif

private:
    using KernelsOfRule = UpdateKernel[master_count][moments_count][dtype_count];
    std::shared_ptr<Job> job(double scale, int threads, const KernelsOfRule& kernels) const;

    struct Entry {
        Item item;
        Master master;
        std::vector<HyperSegment> segments;
    };
    const Table* table_;
    Rule rule_;
    Moments moments_;
    std::vector<Entry> items_;
};

// Elements [begin, end) of item `item`, which a thread updates in one piece.
struct Part {
    std::size_t item;
    std::int64_t begin, end;
};

// Cuts items of these sizes at multiples of 4096 elements, and ties short pieces together. Result: parts, and where in
// them each thread's bundle begins (with the end of the last one).
struct Cut {
    std::vector<Part> parts;
    std::vector<std::size_t> bundles;
};
Cut cut(const std::vector<std::int64_t>& numels, int threads);

}  // namespace zero_optim
