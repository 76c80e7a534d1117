#include "types.hpp"

#include <arm_neon.h>

#define ZERO_OPTIM_VECTOR_HEADER "vec_neon.hpp"

namespace zero_optim {
namespace {
#include "kernels.hpp"
}  // namespace

const Table* table_neon() {
    static const Table table = make_table<Neon>();
    return &table;
}

}  // namespace zero_optim
