// Stored states <-> logical fp32 values, for reading, writing and initialising. Scalar code: this is done once a run or
// once a checkpoint, and the disk is slower. Each call handles elements [begin, end).
#pragma once

#include "types.hpp"

namespace zero_optim {

// fp32 -> parameter (and remainder). bf16 rounds to nearest with ties away, fp16 to nearest even. Every pattern comes
// back from Master::split bit for bit; a few signalling or full-mantissa NaNs look like infinity or zero as bf16.
void encode_master(const float* values, const Item& item, Master master, std::int64_t begin, std::int64_t end);
void decode_master(float* values, const Item& item, Master master, std::int64_t begin, std::int64_t end);

// One moment (state 0 or 1) of a layout. For 8-bit moments `begin` is a multiple of 256.
void encode_moment(const float* values, const Item& item, int state, Moments moments, std::int64_t begin,
                   std::int64_t end);
void decode_moment(float* values, const Item& item, int state, Moments moments, std::int64_t begin,
                   std::int64_t end);

}  // namespace zero_optim
