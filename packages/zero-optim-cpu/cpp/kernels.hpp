// The generic kernels, put together for one translation unit. The unit defines ZERO_OPTIM_VECTOR, includes its
// intrinsics, and then this, inside namespace zero_optim::{anonymous}: everything here has internal linkage, so that
// no function compiled for a wider instruction set can replace another's.
#include "vec_scalar.hpp"
#if defined(ZERO_OPTIM_VECTOR_HEADER)
#include ZERO_OPTIM_VECTOR_HEADER
#endif

// The first segment that ends after `begin`.
inline std::int64_t first_segment(const Item& t, std::int64_t begin) {
    std::int64_t low = 0, high = t.segment_count;
    while (low < high) {
        const std::int64_t middle = (low + high) / 2;
        if (t.segments[middle].stop <= begin) low = middle + 1;
        else high = middle;
    }
    return low;
}

#include "codec.hpp"
#include "codes.hpp"
#include "rules.hpp"
#include "update_body.hpp"
#include "coded_body.hpp"
#include "reduce_body.hpp"
#ifdef ZERO_OPTIM_ROOFLINE
#include "roofline_body.hpp"
#endif
#include "table_body.hpp"
