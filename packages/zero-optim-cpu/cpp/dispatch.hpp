// Which instruction sets this build has, which this CPU has, and the table of one. Nothing is chosen here: the caller
// names a set, or asks for the best.
#pragma once

#include <string>
#include <vector>

#include "types.hpp"

namespace zero_optim {

std::vector<std::string> compiled_isas();   // narrowest first
std::vector<std::string> available_isas();  // compiled ones that the CPU and the kernel support

// Throws std::invalid_argument with the names there are.
const Table* table_of(const std::string& isa);

// CPUs that the calling thread may run on, one a physical core.
int physical_cores();

}  // namespace zero_optim
