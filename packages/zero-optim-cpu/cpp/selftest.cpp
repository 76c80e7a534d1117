// The kernels without Python: every rule, master, layout of moments and gradient type, on every instruction set of the
// machine, against the scalar one, bit for bit. Prints a digest of all results, which is the same on every
// architecture: run it under an emulator and compare. Exit status 1 if any bit differs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "batch.hpp"
#include "convert.hpp"
#include "dispatch.hpp"
#include "pool.hpp"

using namespace zero_optim;

namespace {

// 70'001: more than one thread's part. The first argument makes it less, for emulators; digests are of one size.
std::int64_t numel = 70'001;
std::int64_t blocks() { return (numel + block_numel - 1) / block_numel; }

struct Random {  // xorshift: the same numbers everywhere
    std::uint64_t state;
    std::uint32_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return std::uint32_t(state >> 32);
    }
    // Both signs, magnitudes 2^-20 … 2, sometimes zero or denormal: exact powers and small integers only.
    float value() {
        const std::uint32_t r = next();
        if (r % 97 == 0) return 0.0f;
        if (r % 89 == 0) return 0x1p-140f;
        return std::ldexp(float(r >> 8) - 0x1p23f, -23 - int(r % 20));
    }
};

struct Tile {
    std::vector<float> master = std::vector<float>(numel), moments[2];
    std::vector<std::uint16_t> parameter = std::vector<std::uint16_t>(numel), low = std::vector<std::uint16_t>(numel);
    std::vector<std::uint32_t> gradient = std::vector<std::uint32_t>(numel);
    std::vector<float> scales[2];
    Item item{};

    Tile(Master kind, DType parameter_dtype, DType gradient_dtype) {
        for (auto& moment : moments) moment.resize(numel);
        for (auto& scale : scales) scale.resize(std::size_t(blocks()));
        item.numel = numel;
        item.parameter_dtype = parameter_dtype;
        item.gradient_dtype = gradient_dtype;
        item.parameter = parameter_dtype == DType::f32 ? static_cast<void*>(master.data()) : parameter.data();
        if (kind == Master::split) item.master = low.data();
        if (kind == Master::full && parameter_dtype != DType::f32) item.master = master.data();
        item.gradient = gradient.data();
        for (int k = 0; k < 2; ++k) {
            item.state[k] = moments[k].data();
            item.scale[k] = scales[k].data();
        }
    }

    void fill_gradient(Random& random) {
        for (std::int64_t i = 0; i < numel; ++i) {
            const float x = random.value();
            if (item.gradient_dtype == DType::f32) {
                std::memcpy(&gradient[i], &x, 4);
            } else {  // any pattern that is finite will do for both 16-bit types
                reinterpret_cast<std::uint16_t*>(gradient.data())[i] = std::uint16_t(random.next() & 0xbbff);
            }
        }
    }

    std::uint64_t digest() const {
        std::uint64_t h = 0xcbf29ce484222325u;
        const auto take = [&h](const void* data, std::size_t bytes) {
            for (std::size_t i = 0; i < bytes; ++i) {
                h = (h ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
            }
        };
        take(master.data(), numel * 4);
        take(parameter.data(), numel * 2);
        take(low.data(), numel * 2);
        for (int k = 0; k < 2; ++k) {
            take(moments[k].data(), numel * 4);
            take(scales[k].data(), std::size_t(blocks()) * 4);
        }
        return h;
    }
};

std::uint64_t update_digest(const Table* table, Pool& pool, Rule rule, Master master, Moments moments, DType parameter,
                            DType gradient) {
    Tile tile(master, parameter, gradient);
    Random random{88172645463325252u};
    std::vector<float> start(numel);
    for (float& x : start) x = random.value();
    encode_master(start.data(), tile.item, master, 0, numel);
    Hyper hyper;
    hyper.lr = 0.01;
    hyper.beta1 = hyper.momentum = 0.9;
    hyper.beta2 = 0.999;
    hyper.eps = 1e-8;
    hyper.weight_decay = 0.1;
    hyper.decoupled = rule == Rule::adam || rule == Rule::lion;
    for (hyper.step = 1; hyper.step <= 3; ++hyper.step) {
        tile.fill_gradient(random);
        Batch batch(table, rule, moments);
        batch.add(tile.item, master, {{0, numel / 2 + 3, hyper}, {numel / 2 + 10, numel, hyper}});
        pool.run(batch.job(0.5, pool.threads()));
    }
    return tile.digest();
}

// Jobs in flight together, waited for from other threads: for the thread sanitizer. True if each part ran once.
// `cores`: CPUs that the workers stay on while callers sleep.
bool pool_holds(const std::vector<int>& cores) {
    std::vector<std::shared_ptr<Job>> jobs;
    std::vector<std::vector<int>> runs(8, std::vector<int>(500));
    {
        Pool pool(3, cores);
        for (auto& counts : runs) {
            jobs.push_back(std::make_shared<Job>(500, [&counts](std::int64_t k) { ++counts[k]; }));
            pool.submit(jobs.back());
        }
        std::vector<std::thread> waiters;
        for (const auto& job : jobs) waiters.emplace_back([&job] { job->wait(); });
        std::vector<int> own(100);
        pool.run(std::make_shared<Job>(100, [&own](std::int64_t k) { ++own[k]; }));
        for (std::thread& waiter : waiters) waiter.join();
        runs.push_back(own);
    }
    for (const auto& counts : runs) {
        for (const int count : counts) {
            if (count != 1) return false;
        }
    }
    return true;
}

std::uint64_t reductions_digest(const Table* table) {
    Tile tile(Master::full, DType::f32, DType::f32);
    Random random{362436069u};
    std::uint64_t h = 0;
    for (int dtype = 0; dtype < dtype_count; ++dtype) {
        tile.item.gradient_dtype = DType(dtype);
        tile.fill_gradient(random);
        table->accumulate[dtype](tile.master.data(), tile.gradient.data(), 0, numel);
        const double sum = table->norm_squared[dtype](tile.gradient.data(), 0, numel);
        std::uint64_t bits;
        std::memcpy(&bits, &sum, 8);
        h = h * 31 + bits + std::uint64_t(table->count_nonfinite[dtype](tile.gradient.data(), 0, numel));
    }
    return h * 31 + tile.digest();
}

// Instruction sets of this build that the CPU lacks are refused by name; how many are not.
int unrefused() {
    int wrong = 0;
    const std::vector<std::string> available = available_isas();
    for (const std::string& isa : compiled_isas()) {
        if (std::find(available.begin(), available.end(), isa) != available.end()) continue;
        std::string text;
        try {
            table_of(isa);
        } catch (const std::invalid_argument& error) {
            text = error.what();
        }
        std::printf("%s: %s\n", isa.c_str(), text.c_str());
        wrong += text.find("'" + isa + "' is not supported by this CPU; it has scalar") == std::string::npos;
    }
    return wrong;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1) numel = std::stoll(argv[1]);
    const Table* scalar = table_of("scalar");
    std::uint64_t all = 0;
    int failures = (pool_holds({}) ? 0 : 1) + (pool_holds({0, 0, 0}) ? 0 : 1) + unrefused(), combinations = 0;
    for (const std::string& isa : available_isas()) {
        const Table* table = table_of(isa);
        Pool pool(isa == "scalar" ? 1 : 3);
        Pool one(1);
        failures += reductions_digest(table) != reductions_digest(scalar);
        for (int r = 0; r < rule_count; ++r) {
            for (int c = 0; c < master_count * moments_count * dtype_count; ++c) {
                const int m = c / (moments_count * dtype_count), s = c / dtype_count % moments_count;
                const int d = c % dtype_count;
                const DType parameter = Master(m) == Master::full ? DType(d) : DType::bf16;
                const auto digest = [&](const Table* t, Pool& p) {
                    return update_digest(t, p, Rule(r), Master(m), Moments(s), parameter, DType(d));
                };
                const std::uint64_t expected = digest(scalar, one);
                ++combinations;
                if (isa == "scalar") all = all * 1099511628211u + expected;
                if (digest(table, pool) == expected) continue;
                ++failures;
                std::printf("%s differs: rule %d master %d moments %d gradient %d\n", isa.c_str(), r, m, s, d);
            }
        }
        std::printf("%s: compared\n", isa.c_str());
    }
    all ^= reductions_digest(scalar);
    std::printf("%d combinations, %d differ\ndigest %016llx\n", combinations, failures, (unsigned long long)all);
    return failures == 0 ? 0 : 1;
}
