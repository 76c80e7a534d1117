#include "batch.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace zero_optim {
namespace {

constexpr std::int64_t cut_numel = 4096;           // multiple of an 8-bit block and of a page of bf16
constexpr std::int64_t largest_bundle = 256 << 10; // MACHINE.md: below it, threads meet too often
constexpr std::int64_t smallest_bundle = 32 << 10; // below it, waking a thread costs more than it helps

std::int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

struct Buffer {
    const char* name;
    const void* address;
    std::int64_t bytes, alignment;
};

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

std::vector<Buffer> buffers_of(const Item& t, Rule rule, Master master, Moments moments) {
    const bool has_a = rule != Rule::adagrad && rule != Rule::sgd, has_b = rule == Rule::adam || rule == Rule::adagrad;
    const std::int64_t n = t.numel, blocks = (n + block_numel - 1) / block_numel;
    const std::int64_t width_a = moments == Moments::f32 ? 4 : moments == Moments::bf16 ? 2 : 1;
    const std::int64_t width_b = moments == Moments::byte8 ? 1 : 4;
    const std::int64_t parameter = bytes_of(t.parameter_dtype), gradient = bytes_of(t.gradient_dtype);
    std::vector<Buffer> buffers = {{"parameter", t.parameter, n * parameter, parameter},
                                   {"gradient", t.gradient, n * gradient, gradient}};
    if (master == Master::split) buffers.push_back({"remainder", t.master, n * 2, 2});
    if (master == Master::full && t.parameter_dtype != DType::f32) buffers.push_back({"master", t.master, n * 4, 4});
    if (has_a) buffers.push_back({"first state", t.state[0], n * width_a, width_a});
    if (has_b) buffers.push_back({"second state", t.state[1], n * width_b, width_b});
    if (has_a && moments == Moments::byte8) buffers.push_back({"first state's scales", t.scale[0], blocks * 4, 4});
    if (has_b && moments == Moments::byte8) buffers.push_back({"second state's scales", t.scale[1], blocks * 4, 4});
    return buffers;
}

void check_buffers(const std::vector<Buffer>& buffers) {
    for (std::size_t i = 0; i < buffers.size(); ++i) {
        const Buffer& x = buffers[i];
        const auto begin = reinterpret_cast<std::uintptr_t>(x.address);
        if (x.bytes > 0 && begin == 0) refuse(std::string(x.name) + " has no memory");
        if (begin % std::uintptr_t(x.alignment) != 0) {
            refuse(std::string(x.name) + " at an address that is not a multiple of its element's " +
                   std::to_string(x.alignment) + " bytes; copy it to a new tensor");
        }
        for (std::size_t j = 0; j < i; ++j) {
            const auto other = reinterpret_cast<std::uintptr_t>(buffers[j].address);
            if (begin < other + std::uintptr_t(buffers[j].bytes) && other < begin + std::uintptr_t(x.bytes)) {
                refuse(std::string(x.name) + " and " + buffers[j].name + " overlap in memory; clone one of them");
            }
        }
    }
}

void check_segments(std::vector<HyperSegment>& segments, std::int64_t numel) {
    std::sort(segments.begin(), segments.end(), [](const auto& x, const auto& y) { return x.start < y.start; });
    std::int64_t end = 0;
    for (const HyperSegment& s : segments) {
        const std::string range = "[" + std::to_string(s.start) + ", " + std::to_string(s.stop) + ")";
        if (s.start < 0 || s.stop < s.start || s.stop > numel) {
            refuse("segment " + range + " is not within the tile's " + std::to_string(numel) + " elements");
        }
        if (s.start < end) {
            refuse("segment " + range + " overlaps the one before it, which ends at " + std::to_string(end));
        }
        if (s.hyper.step < 1) {
            refuse("segment " + range + " has step " + std::to_string(s.hyper.step) + "; steps count from 1");
        }
        end = s.stop;
    }
}

// The data of a job while it runs.
struct Work {
    std::vector<Item> items;
    std::vector<UpdateKernel> kernels;
    std::vector<Segment> segments;
    Cut cut;
};

}  // namespace

Coefficients coefficients(Rule rule, const Hyper& h, double scale) {
    Coefficients c{};
    c.scale = float(h.maximize ? -scale : scale);
    c.eps = float(h.eps);
    c.key = std::uint32_t(std::uint64_t(h.step));
    (h.decoupled ? c.decoupled : c.coupled) = float(h.decoupled ? h.lr * h.weight_decay : h.weight_decay);
    c.beta1 = float(h.beta1);
    c.c1 = float(1.0 - h.beta1);
    c.beta2 = float(h.beta2);
    c.c2 = float(1.0 - h.beta2);
    c.lerp_from_gradient = 1.0 - h.beta1 >= 0.5;
    c.step_size = float(h.lr);
    if (rule == Rule::adam) {
        const double t = double(h.step);
        c.step_size = float(h.lr / (1.0 - std::pow(h.beta1, t)));
        c.denominator_scale = float(1.0 / std::sqrt(1.0 - std::pow(h.beta2, t)));
    } else if (rule == Rule::adagrad) {
        c.step_size = float(h.lr / (1.0 + double(h.step - 1) * h.lr_decay));
    } else if (rule == Rule::sgd_momentum) {
        c.beta1 = float(h.momentum);
        c.c1 = float(1.0 - h.dampening);
        c.nesterov = h.nesterov;
        c.first_step = h.step == 1;
        c.plain = h.momentum == 0.0;
    }
    return c;
}

void Batch::add(const Item& item, Master master, std::vector<HyperSegment> segments) {
    if (item.numel < 0) refuse("an item of " + std::to_string(item.numel) + " elements");
    if (master == Master::split && item.parameter_dtype != DType::bf16) refuse("only a bf16 parameter has a split master");
    check_buffers(buffers_of(item, rule_, master, moments_));
    check_segments(segments, item.numel);
    items_.push_back({item, master, std::move(segments)});
}

void Batch::check_disjoint() const {
    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges;
    for (const Entry& entry : items_) {
        for (const Buffer& buffer : buffers_of(entry.item, rule_, entry.master, moments_)) {
            if (buffer.bytes == 0 || buffer.address == entry.item.gradient) continue;
            const auto begin = reinterpret_cast<std::uintptr_t>(buffer.address);
            ranges.emplace_back(begin, begin + std::uintptr_t(buffer.bytes));
        }
    }
    std::sort(ranges.begin(), ranges.end());
    for (std::size_t k = 1; k < ranges.size(); ++k) {
        if (ranges[k].first < ranges[k - 1].second) {
            refuse("two parameters, or their states, overlap in memory; an update of both at once has no meaning");
        }
    }
}

void Batch::refresh(const std::vector<std::uintptr_t>& gradients, const std::vector<const Hyper*>& hypers) {
    if (gradients.size() != items_.size() || hypers.size() != items_.size()) {
        refuse("a batch of " + std::to_string(items_.size()) + " items was given " + std::to_string(gradients.size()) +
               " gradients and " + std::to_string(hypers.size()) + " options");
    }
    for (std::size_t k = 0; k < items_.size(); ++k) {
        Entry& entry = items_[k];
        entry.item.gradient = reinterpret_cast<const void*>(gradients[k]);
        entry.segments.assign(1, {0, entry.item.numel, *hypers[k]});
        check_buffers(buffers_of(entry.item, rule_, entry.master, moments_));
        check_segments(entry.segments, entry.item.numel);
    }
}

Cut cut(const std::vector<std::int64_t>& numels, int threads) {
    std::int64_t total = 0;
    for (const std::int64_t numel : numels) total += numel;
    const std::int64_t share = std::max(smallest_bundle, std::min(largest_bundle, total / std::max(1, threads)));
    const std::int64_t bundle = (share + cut_numel - 1) / cut_numel * cut_numel;
    Cut result;
    std::int64_t filled = bundle;  // of the bundle being filled; full: the next piece opens one
    for (std::size_t i = 0; i < numels.size(); ++i) {
        for (std::int64_t begin = 0; begin < numels[i];) {
            if (filled >= bundle) {
                result.bundles.push_back(result.parts.size());
                filled = 0;
            }
            const std::int64_t room = std::max((bundle - filled) / cut_numel * cut_numel, cut_numel);
            const std::int64_t end = std::min(numels[i], begin + room);
            result.parts.push_back({i, begin, end});
            filled += end - begin;
            begin = end;
        }
    }
    result.bundles.push_back(result.parts.size());
    return result;
}

std::shared_ptr<Job> Batch::job(double scale, int threads, const KernelsOfRule& kernels) const {
    auto work = std::make_shared<Work>();
    std::vector<std::int64_t> numels;
    std::size_t segment_count = 0;
    for (const Entry& entry : items_) segment_count += entry.segments.size();
    work->segments.reserve(segment_count);
    for (const Entry& entry : items_) {
        Item item = entry.item;
        item.segments = work->segments.data() + work->segments.size();
        item.segment_count = std::int64_t(entry.segments.size());
        for (const HyperSegment& s : entry.segments) {
            work->segments.push_back({s.start, s.stop, coefficients(rule_, s.hyper, scale)});
        }
        work->kernels.push_back(kernels[int(entry.master)][int(moments_)][int(item.gradient_dtype)]);
        work->items.push_back(item);
        numels.push_back(item.numel);
    }
    work->cut = cut(numels, threads);
    return std::make_shared<Job>(std::int64_t(work->cut.bundles.size()) - 1, [work](std::int64_t bundle) {
        for (std::size_t k = work->cut.bundles[bundle]; k < work->cut.bundles[bundle + 1]; ++k) {
            const Part& part = work->cut.parts[k];
            work->kernels[part.item](work->items[part.item], part.begin, part.end);
        }
    });
}

}  // namespace zero_optim
