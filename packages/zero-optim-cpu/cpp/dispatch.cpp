#include "dispatch.hpp"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <stdexcept>
#include <thread>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace zero_optim {
namespace {

struct Isa {
    const char* name;
    bool (*supported)();
    const Table* (*table)();
};

bool always() { return true; }

#if defined(__x86_64__)
// __builtin_cpu_supports("f16c") is not known to clang 14. The system's part, saving the registers, is that of "avx2".
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
constexpr Isa isas[] = {
    {"scalar", always, table_scalar}, {"avx2", has_avx2, table_avx2}, {"avx512", has_avx512, table_avx512}};
#elif defined(__aarch64__)
constexpr Isa isas[] = {{"scalar", always, table_scalar}, {"neon", always, table_neon}};
#else
constexpr Isa isas[] = {{"scalar", always, table_scalar}};
#endif

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

}  // namespace

std::vector<std::string> compiled_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas) names.push_back(isa.name);
    return names;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas) {
        if (isa.supported()) names.push_back(isa.name);
    }
    return names;
}

const Table* table_of(const std::string& name) {
    for (const Isa& isa : isas) {
        if (name != isa.name) continue;
        if (isa.supported()) return isa.table();
        throw std::invalid_argument("instruction set '" + name + "' is not supported by this CPU; it has " +
                                    joined(available_isas()));
    }
    throw std::invalid_argument("instruction set '" + name + "' is unknown; this build has " + joined(compiled_isas()));
}

int physical_cores() {
    cpu_set_t mask;
    if (sched_getaffinity(0, sizeof mask, &mask) != 0) {
        return std::max(1, int(std::thread::hardware_concurrency()));
    }
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &mask)) continue;
        std::string siblings = std::to_string(cpu);
        std::ifstream file("/sys/devices/system/cpu/cpu" + siblings + "/topology/thread_siblings_list");
        if (file) std::getline(file, siblings);
        cores.insert(siblings);
    }
    return std::max<int>(1, int(cores.size()));
}

}  // namespace zero_optim
