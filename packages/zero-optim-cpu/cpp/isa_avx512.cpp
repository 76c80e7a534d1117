#include "types.hpp"

#include <immintrin.h>

#define ZERO_OPTIM_VECTOR_HEADER "vec_avx512.hpp"

namespace zero_optim {
namespace {
#include "kernels.hpp"
}  // namespace

const Table* table_avx512() {
    static const Table table = make_table<Avx512>();
    return &table;
}

}  // namespace zero_optim
