// What crosses translation units: plain records and the table of kernels that each instruction set fills.
// No templates and no inline functions with code in them, so that nothing compiled for one instruction set can be
// picked by the linker for another.
#pragma once

#include <cstddef>
#include <cstdint>

// For functions that a loop calls once an element: gcc by itself does not inline a rule of this size.
#define ZERO_OPTIM_INLINE inline __attribute__((always_inline))
#define ZERO_OPTIM_INLINE_LAMBDA __attribute__((always_inline))

namespace zero_optim {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };
enum class Rule : int { adam = 0, lion = 1, adagrad = 2, sgd_momentum = 3, sgd = 4 };

// How the fp32 master is kept.
enum class Master : int {
    full = 0,   // fp32 array; a 16-bit parameter, where there is one, is written beside it
    split = 1,  // bf16 parameter + int16 remainder
};

// How the moments are kept. A "signed" moment is exp_avg or momentum_buffer, an "unsigned" one exp_avg_sq or sum.
enum class Moments : int {
    f32 = 0,
    bf16 = 1,    // signed moments in bf16, unsigned ones in fp32
    byte8 = 2,   // 8-bit codes in blocks of 256 with one fp32 scale a block
};

inline constexpr int rule_count = 5, master_count = 2, moments_count = 3, dtype_count = 3;
inline constexpr std::int64_t block_numel = 256;          // 8-bit moments
inline constexpr std::int64_t norm_chunk_numel = 1 << 20; // squared norms are summed within, then across, chunks

// Numbers of one segment in one step, rounded to float once from double (see coefficients.cpp).
struct Coefficients {
    float scale;      // multiplies the gradient; negative with maximize
    float coupled;    // weight decay added to the gradient
    float decoupled;  // lr * weight decay, times the parameter
    float c1, beta1;  // 1 - beta1 and beta1; SGD: 1 - dampening and momentum
    float c2, beta2;
    float step_size;  // lr / bias correction, or lr
    float denominator_scale;  // 1 / sqrt(bias correction 2)
    float eps;
    std::uint32_t key;         // the step, for the dither of 8-bit codes
    std::uint32_t lerp_from_gradient, nesterov, first_step, plain;  // 0 or 1
};

struct Segment {
    std::int64_t start, stop;  // elements of the item
    Coefficients c;
};

// One contiguous run of elements with its states: a tile or a tensor.
struct Item {
    void* parameter;       // parameter_dtype; fp32: is the master
    void* master;          // Master::full with a 16-bit parameter: fp32; Master::split: int16; else null
    const void* gradient;  // gradient_dtype
    void* state[2];        // fp32, bf16 or codes
    float* scale[2];       // one a block of 256, for codes
    std::int64_t numel;
    const Segment* segments;  // sorted, disjoint
    std::int64_t segment_count;
    DType parameter_dtype, gradient_dtype;
};

using UpdateKernel = void (*)(const Item&, std::int64_t begin, std::int64_t end);

// Kernels of one instruction set. Ranges are elements; `begin` of an 8-bit update is a multiple of 256.
struct Table {
    UpdateKernel update[rule_count][master_count][moments_count][dtype_count];
#ifdef ZERO_OPTIM_ROOFLINE  // Adam's streams without its arithmetic, for tests/benchmarks/test_optim.py
    UpdateKernel roofline[master_count][moments_count][dtype_count];
#endif
    void (*accumulate[dtype_count])(float* into, const void* values, std::int64_t begin, std::int64_t end);
    // Sum of squares in double over [begin, end), 16 lanes whatever the vector width.
    double (*norm_squared[dtype_count])(const void* values, std::int64_t begin, std::int64_t end);
    std::int64_t (*count_nonfinite[dtype_count])(const void* values, std::int64_t begin, std::int64_t end);
};

const Table* table_scalar();
const Table* table_avx2();
const Table* table_avx512();
const Table* table_neon();

}  // namespace zero_optim
