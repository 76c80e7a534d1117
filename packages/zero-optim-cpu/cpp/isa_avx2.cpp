#include "types.hpp"

#include <immintrin.h>

#define ZERO_OPTIM_VECTOR_HEADER "vec_avx2.hpp"

namespace zero_optim {
namespace {
#include "kernels.hpp"
}  // namespace

const Table* table_avx2() {
    static const Table table = make_table<Avx2>();
    return &table;
}

}  // namespace zero_optim
