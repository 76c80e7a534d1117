// How one stream of values lies in memory: load as fp32, store from fp32. Every load and store is unaligned.
// Included inside an anonymous namespace, after the vector types.

constexpr std::int64_t prefetch_bytes = 2048;       // MACHINE.md: 512 bytes ahead costs 5-12 %
constexpr std::int64_t prefetch_bytes_fp32 = 1024;  // more streams of whole lines: nearer is better

ZERO_OPTIM_INLINE void prefetch(const void* base, std::int64_t byte, std::int64_t ahead) {
    __builtin_prefetch(static_cast<const char*>(base) + byte + ahead, 1, 3);
}

// ---- bf16: nearest, ties away from zero; NaN stays NaN ----------------------------------------------------------

template <class V> ZERO_OPTIM_INLINE typename V::F bf16_to_float(typename V::I x) {
    return V::from_bits(V::template shl<16>(x));
}

// Adding half to the magnitude bits carries into the exponent, up to infinity; NaN must not wrap, so it is replaced.
template <class V> ZERO_OPTIM_INLINE typename V::I float_to_bf16(typename V::F x) {
    const typename V::I rounded = V::template shr<16>(V::iadd(V::bits(x), V::seti(0x8000u)));
    return V::iselect(V::is_nan(x), V::seti(0x7fc0u), rounded);
}

struct F32 {
    float* p;
    static constexpr int bytes = 4;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i) const { return V::load(p + i); }
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t i, typename V::F x) const { V::store(p + i, x); }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const {
        prefetch(p, 4 * i, prefetch_bytes_fp32);
        prefetch(p, 4 * i + 64, prefetch_bytes_fp32);
    }
};

struct Bf16 {
    std::uint16_t* p;
    static constexpr int bytes = 2;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i) const { return bf16_to_float<V>(V::load_u16(p + i)); }
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t i, typename V::F x) const { V::store_u16(p + i, float_to_bf16<V>(x)); }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const { prefetch(p, 2 * i, prefetch_bytes); }
};

struct F16 {
    std::uint16_t* p;
    static constexpr int bytes = 2;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i) const { return V::load_f16(p + i); }
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t i, typename V::F x) const { V::store_f16(p + i, x); }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const { prefetch(p, 2 * i, prefetch_bytes); }
};

// No stream: a moment that the rule does not have.
struct Nothing {
    static constexpr int bytes = 0;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t) const { return V::set(0.0f); }
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t, typename V::F) const {}
    ZERO_OPTIM_INLINE void ahead(std::int64_t) const {}
};

// ---- masters -----------------------------------------------------------------------------------------------------

// fp32 array, and where there is one the 16-bit parameter that it rounds to.
struct Full {
    float* p;
    std::uint16_t* out;  // null: the array is the parameter
    bool half;           // out is fp16, else bf16
    static Full of(const Item& t) {
        if (t.parameter_dtype == DType::f32) return {static_cast<float*>(t.parameter), nullptr, false};
        const bool half = t.parameter_dtype == DType::f16;
        return {static_cast<float*>(t.master), static_cast<std::uint16_t*>(t.parameter), half};
    }
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i) const { return V::load(p + i); }
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t i, typename V::F x, const Coefficients&) const {
        V::store(p + i, x);
        if (out == nullptr) return;
        if (half) V::store_f16(out + i, x);
        else V::store_u16(out + i, float_to_bf16<V>(x));
    }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const {
        F32{p}.ahead(i);
        if (out != nullptr) prefetch(out, 2 * i, prefetch_bytes);
    }
};

// bits == (parameter << 16) + sign-extended remainder, modulo 2^32: exact for every pattern that `store` is given,
// because ties go away from zero. A NaN that arithmetic made is stored as the canonical one: rounding another's
// mantissa up could carry out of it.
struct Split {
    std::uint16_t* high;
    std::uint16_t* low;
    static Split of(const Item& t) {
        return {static_cast<std::uint16_t*>(t.parameter), static_cast<std::uint16_t*>(t.master)};
    }
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i) const {
        return V::from_bits(V::iadd(V::template shl<16>(V::load_u16(high + i)), V::load_i16(low + i)));
    }
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t i, typename V::F x, const Coefficients&) const {
        const typename V::I b = V::iselect(V::is_nan(x), V::seti(0x7fc00000u), V::bits(x));
        V::store_u16(high + i, V::template shr<16>(V::iadd(b, V::seti(0x8000u))));
        V::store_u16(low + i, b);
    }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const {
        prefetch(high, 2 * i, prefetch_bytes);
        prefetch(low, 2 * i, prefetch_bytes);
    }
};

// Two multiplications and three shifts: every input bit reaches the low 16 output bits (avalanche of murmur3's end).
template <class V> ZERO_OPTIM_INLINE typename V::I mix(typename V::I x) {
    x = V::ixor(x, V::template shr<16>(x));
    x = V::imul(x, V::seti(0x85ebca6bu));
    x = V::ixor(x, V::template shr<13>(x));
    x = V::imul(x, V::seti(0xc2b2ae35u));
    return V::ixor(x, V::template shr<16>(x));
}

// bf16 alone. The 16 bits that do not fit are added a random number of the element's global index and the step.
struct Stochastic {
    std::uint16_t* p;
    std::uint64_t counter;
    static Stochastic of(const Item& t) { return {static_cast<std::uint16_t*>(t.parameter), t.counter}; }
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i) const { return bf16_to_float<V>(V::load_u16(p + i)); }
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t i, typename V::F x, const Coefficients& c) const {
        // Modulo 2^32: elements that far apart share their numbers, and no vector has to care where it wraps.
        const typename V::I index = V::iadd(V::seti(std::uint32_t(counter + std::uint64_t(i))), V::iota());
        const typename V::I key = V::seti(c.key * 0x9e3779b9u);
        const typename V::I random = V::iand(mix<V>(V::ixor(mix<V>(index), key)), V::seti(0xffffu));
        const typename V::I b = V::iselect(V::is_nan(x), V::seti(0x7fc00000u), V::bits(x));
        V::store_u16(p + i, V::template shr<16>(V::iadd(b, random)));
    }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const { prefetch(p, 2 * i, prefetch_bytes); }
};

// ---- 8-bit codes: a float of few bits, relative to the largest of the block -------------------------------------
//
// The value, divided by the block's scale so that the largest becomes 1.875, is cut to its exponent and top three
// mantissa bits. Signed: sign + 7 bits, 2^-15.8 … 1 of the largest. Unsigned: 8 bits, 2^-31.8 … 1. Steps of 12.5 %
// at most, and the cut is dithered (see `dither_of`), so that moments which move by less than a step still move on
// average. Integer operations only: no table, no root.

constexpr std::uint32_t signed_offset = 0x3ffu - 127u, unsigned_offset = 0x3ffu - 255u;
constexpr float top = 1.875f;                        // 0x3ff << 20
constexpr float top_up = 1.875f + 0x1p-19f;          // so that the largest never falls to the code below
constexpr float smallest_scale = 1e-36f;             // below: the block is stored as zeros

// 20 random-looking bits of the position in the block and the step, equidistributed over steps.
inline std::uint32_t dither_of(std::uint32_t position, std::uint32_t key) {
    return (mix<Scalar>(position + 1u) + key * 0x9e3779b9u) >> 12;
}
constexpr std::uint32_t dither_nearest = 1u << 19;

// `unit` is scale / top, `inverse` is top_up / scale.
struct SignedCode {
    std::uint8_t* p;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i, float unit) const {
        const typename V::I code = V::load_u8(p + i);
        const typename V::I magnitude = V::iand(code, V::seti(127u));
        const typename V::I sign = V::template shl<24>(V::iand(code, V::seti(128u)));
        const typename V::F x = V::from_bits(V::template shl<20>(V::iadd(magnitude, V::seti(signed_offset))));
        const typename V::F y = V::mul(x, V::set(unit));
        const typename V::I zero = V::seti(0u);
        return V::from_bits(V::iselect(V::ieq(magnitude, zero), zero, V::ior(V::bits(y), sign)));
    }
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t i, typename V::F x, float inverse, typename V::I dither) const {
        const typename V::I b = V::bits(V::mul(x, V::set(inverse)));
        const typename V::I sign = V::template shr<24>(V::iand(b, V::seti(0x80000000u)));
        const typename V::I cut = V::template shr<20>(V::iadd(V::iand(b, V::seti(0x7fffffffu)), dither));
        const typename V::I code = V::imin(V::imax(V::isub(cut, V::seti(signed_offset)), V::seti(0u)), V::seti(127u));
        V::store_u8(p + i, V::ior(code, sign));
    }
};

struct UnsignedCode {
    std::uint8_t* p;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i, float unit) const {
        const typename V::I code = V::load_u8(p + i);
        const typename V::F x = V::from_bits(V::template shl<20>(V::iadd(code, V::seti(unsigned_offset))));
        const typename V::I zero = V::seti(0u);
        const typename V::I y = V::bits(V::mul(x, V::set(unit)));
        return V::from_bits(V::iselect(V::ieq(code, zero), zero, y));
    }
    // A value above zero is never stored as zero: the root of it divides.
    template <class V>
    ZERO_OPTIM_INLINE void store(std::int64_t i, typename V::F x, float inverse, typename V::I dither) const {
        const typename V::I b = V::iand(V::bits(V::mul(x, V::set(inverse))), V::seti(0x7fffffffu));
        const typename V::I cut = V::isub(V::template shr<20>(V::iadd(b, dither)), V::seti(unsigned_offset));
        const typename V::I code = V::imin(V::imax(cut, V::seti(1u)), V::seti(255u));
        V::store_u8(p + i, V::iselect(V::ieq(b, V::seti(0u)), V::seti(0u), code));
    }
};
