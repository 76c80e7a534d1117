// One lane: the plain C++ meaning of every vector operation, and the tail of every wider loop.
// Included inside an anonymous namespace of each translation unit.

struct Scalar {
    static constexpr int width = 1;
    static constexpr int phased = 1;  // vectors that an update takes together: [Note: flight]
    using F = float;
    using I = std::uint32_t;
    using M = bool;

    static F set(float x) { return x; }
    static I seti(std::uint32_t x) { return x; }
    static F load(const float* p) { return *p; }
    static void store(float* p, F x) { *p = x; }
    static I load_u16(const std::uint16_t* p) { return *p; }
    static I load_i16(const std::uint16_t* p) { return std::uint32_t(std::int32_t(std::int16_t(*p))); }
    static I load_i32(const std::uint32_t* p) { return *p; }
    static void store_u16(std::uint16_t* p, I x) { *p = std::uint16_t(x); }
    static F load_f16(const std::uint16_t* p) { return half_to_float(*p); }
    static void store_f16(std::uint16_t* p, F x) { *p = float_to_half(x); }

    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F sqrt(F a) { return __builtin_sqrtf(a); }
    static M gt(F a, F b) { return a > b; }
    static M is_nan(F a) { return a != a; }
    static F select(M m, F a, F b) { return m ? a : b; }

    static I bits(F a) { I r; __builtin_memcpy(&r, &a, 4); return r; }
    static F from_bits(I a) { F r; __builtin_memcpy(&r, &a, 4); return r; }
    static I iadd(I a, I b) { return a + b; }
    static I isub(I a, I b) { return a - b; }
    static I iand(I a, I b) { return a & b; }
    static I ior(I a, I b) { return a | b; }
    template <int N> static I shl(I a) { return a << N; }
    template <int N> static I shr(I a) { return a >> N; }
    static M ieq(I a, I b) { return a == b; }
    static I iselect(M m, I a, I b) { return m ? a : b; }
    static int count(M m) { return m ? 1 : 0; }

    // IEEE half <-> single, round to nearest even, as F16C does it: NaN keeps its top payload bits and turns quiet.
    static F half_to_float(std::uint16_t h) {
        const I sign = I(h & 0x8000u) << 16;
        const I exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
        if (exponent == 31) return from_bits(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
        if (exponent == 0) return from_bits(sign | bits(float(mantissa) * 0x1p-24f));
        return from_bits(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    }
    static std::uint16_t float_to_half(F x) {
        const I b = bits(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
        if (magnitude > 0x7f800000u) return std::uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
        if (magnitude >= 0x477ff000u) return std::uint16_t(sign | 0x7c00u);  // rounds to infinity
        if (magnitude < 0x38800000u) {
            // Below 2^-14: adding 0.5 lets the hardware round to a multiple of 2^-24.
            return std::uint16_t(sign | (bits(from_bits(magnitude) + 0.5f) - 0x3f000000u));
        }
        const I odd = (magnitude >> 13) & 1u;
        return std::uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
    }
};
