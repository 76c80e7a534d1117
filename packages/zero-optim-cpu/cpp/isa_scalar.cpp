#include "types.hpp"

namespace zero_optim {
namespace {
#include "kernels.hpp"
}  // namespace

const Table* table_scalar() {
    static const Table table = make_table<Scalar>();
    return &table;
}

}  // namespace zero_optim
