// The formats of a stream of values in memory: load as fp32, store from fp32. Every load and store is unaligned. A load
// is of one vector, a store of the N that a loop has in hand: narrow types are packed from several.
// Included inside an anonymous namespace, after the vector types.

constexpr std::int64_t prefetch_bytes = 2048;       // MACHINE.md: 512 bytes ahead costs 5-12 %
constexpr std::int64_t prefetch_bytes_fp32 = 1024;  // more streams of whole lines: nearer is better

template <int K> struct Index {
    static constexpr int value = K;
};

// f(0), f(1) … f(N - 1), written out: what f keeps in arrays stays in registers.
template <int N, int K = 0, class Function> ZERO_OPTIM_INLINE void each(const Function& f) {
    if constexpr (K < N) {
        f(Index<K>{});
        each<N, K + 1>(f);
    }
}

// Lanes below 2^16.
template <class V, int N> ZERO_OPTIM_INLINE void store_narrow(std::uint16_t* p, const typename V::I (&x)[N]) {
    if constexpr (N == 1) {
        V::store_u16(p, x[0]);
    } else {
        static_assert(N % 2 == 0);
        each<N / 2>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
            V::store_u16x2(p + 2 * k.value * V::width, x[2 * k.value], x[2 * k.value + 1]);
        });
    }
}

ZERO_OPTIM_INLINE void prefetch(const void* base, std::int64_t byte) {
    __builtin_prefetch(static_cast<const char*>(base) + byte, 1, 3);
}

// Prefetch for the 32 elements at i of a stream: half a line of bytes, one line of 16-bit values, two of fp32.
template <int Bytes> ZERO_OPTIM_INLINE void prefetch_group(const void* base, std::int64_t i) {
    if constexpr (Bytes == 4) {
        prefetch(base, 4 * i + prefetch_bytes_fp32);
        prefetch(base, 4 * i + 64 + prefetch_bytes_fp32);
    } else {
        prefetch(base, Bytes * i + prefetch_bytes * Bytes / 2);
    }
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
    template <class V, int N> ZERO_OPTIM_INLINE void store(std::int64_t i, const typename V::F (&x)[N]) const {
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { V::store(p + i + k.value * V::width, x[k.value]); });
    }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const { prefetch_group<4>(p, i); }
};

struct Bf16 {
    std::uint16_t* p;
    static constexpr int bytes = 2;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i) const { return bf16_to_float<V>(V::load_u16(p + i)); }
    template <class V, int N> ZERO_OPTIM_INLINE void store(std::int64_t i, const typename V::F (&x)[N]) const {
        typename V::I narrow[N];
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { narrow[k.value] = float_to_bf16<V>(x[k.value]); });
        store_narrow<V>(p + i, narrow);
    }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const { prefetch_group<2>(p, i); }
};

struct F16 {
    std::uint16_t* p;
    static constexpr int bytes = 2;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t i) const { return V::load_f16(p + i); }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const { prefetch_group<2>(p, i); }
};

// No stream: a moment that the rule does not have.
struct Nothing {
    static constexpr int bytes = 0;
    template <class V>
    ZERO_OPTIM_INLINE typename V::F load(std::int64_t) const { return V::set(0.0f); }
    template <class V, int N> ZERO_OPTIM_INLINE void store(std::int64_t, const typename V::F (&)[N]) const {}
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
    template <class V, int N>
    ZERO_OPTIM_INLINE void store(std::int64_t i, const typename V::F (&x)[N], const Coefficients&) const {
        F32{p}.template store<V>(i, x);
        if (out == nullptr) return;
        if (half) {
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { V::store_f16(out + i + k.value * V::width, x[k.value]); });
        } else {
            Bf16{out}.template store<V>(i, x);
        }
    }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const {
        F32{p}.ahead(i);
        if (out != nullptr) prefetch_group<2>(out, i);
    }
};

// Every NaN as 0x7fc00000. One look at all N: NaN is rare.
template <class V, int N> ZERO_OPTIM_INLINE void canonical_bits(const typename V::F (&x)[N], typename V::I (&b)[N]) {
    each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { b[k.value] = V::bits(x[k.value]); });
    if constexpr (N == 4) {
        if (__builtin_expect(!V::any_nan(x), 1)) return;
    }
    each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
        b[k.value] = V::iselect(V::is_nan(x[k.value]), V::seti(0x7fc00000u), b[k.value]);
    });
}

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
    template <class V, int N>
    ZERO_OPTIM_INLINE void store(std::int64_t i, const typename V::F (&x)[N], const Coefficients&) const {
        typename V::I b[N], top[N], rest[N];
        canonical_bits<V>(x, b);
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
            top[k.value] = V::template shr<16>(V::iadd(b[k.value], V::seti(0x8000u)));
            rest[k.value] = V::iand(b[k.value], V::seti(0xffffu));
        });
        store_narrow<V>(high + i, top);
        store_narrow<V>(low + i, rest);
    }
    ZERO_OPTIM_INLINE void ahead(std::int64_t i) const {
        prefetch_group<2>(high, i);
        prefetch_group<2>(low, i);
    }
};
