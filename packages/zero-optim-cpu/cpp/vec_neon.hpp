// Four lanes: AArch64 NEON. Included inside an anonymous namespace.
//
// Nothing here contracts: vmulq then vaddq stay two roundings under -ffp-contract=off.

struct Neon {
    static constexpr int width = 4;
    static constexpr int phased = 4;  // vectors that an update takes together: [Note: flight]
    using F = float32x4_t;
    using I = uint32x4_t;
    using M = uint32x4_t;  // all bits of a lane, or none

    static F set(float x) { return vdupq_n_f32(x); }
    static I seti(std::uint32_t x) { return vdupq_n_u32(x); }
    static I iota() {
        const std::uint32_t lanes[4] = {0, 1, 2, 3};
        return vld1q_u32(lanes);
    }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static I load_u16(const std::uint16_t* p) { return vmovl_u16(vld1_u16(p)); }
    static I load_i16(const std::uint16_t* p) {
        return vreinterpretq_u32_s32(vmovl_s16(vreinterpret_s16_u16(vld1_u16(p))));
    }
    static I load_u8(const std::uint8_t* p) {
        std::uint32_t four;
        __builtin_memcpy(&four, p, 4);
        return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
    }
    static I load_i8(const std::uint8_t* p) {
        std::uint32_t four;
        __builtin_memcpy(&four, p, 4);
        return vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
    }
    static I load_i32(const std::uint32_t* p) { return vld1q_u32(p); }
    static void store_u16(std::uint16_t* p, I x) { vst1_u16(p, vmovn_u32(x)); }
    // Two vectors of lanes below 2^16.
    static void store_u16x2(std::uint16_t* p, I x, I y) { vst1q_u16(p, vcombine_u16(vmovn_u32(x), vmovn_u32(y))); }
    static int8x16_t pack_signed(const I (&x)[4]) {  // saturates
        const int16x8_t low = vcombine_s16(vqmovn_s32(as_signed(x[0])), vqmovn_s32(as_signed(x[1])));
        const int16x8_t high = vcombine_s16(vqmovn_s32(as_signed(x[2])), vqmovn_s32(as_signed(x[3])));
        return vcombine_s8(vqmovn_s16(low), vqmovn_s16(high));
    }
    // Signed lanes, clamped to 0 … 255.
    static void store_clamped(std::uint8_t* p, const I (&x)[4]) {
        const int16x8_t low = vcombine_s16(vqmovn_s32(as_signed(x[0])), vqmovn_s32(as_signed(x[1])));
        const int16x8_t high = vcombine_s16(vqmovn_s32(as_signed(x[2])), vqmovn_s32(as_signed(x[3])));
        vst1q_u8(p, vcombine_u8(vqmovun_s16(low), vqmovun_s16(high)));
    }
    // Signed lanes, clamped to 0 … 127, below the signs of others.
    static void store_clamped_signed(std::uint8_t* p, const I (&x)[4], const I (&sign)[4]) {
        const uint8x16_t magnitude = vreinterpretq_u8_s8(vmaxq_s8(pack_signed(x), vdupq_n_s8(0)));
        const uint8x16_t signs = vandq_u8(vreinterpretq_u8_s8(pack_signed(sign)), vdupq_n_u8(0x80));
        vst1q_u8(p, vorrq_u8(magnitude, signs));
    }
    static F load_f16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static void store_f16(std::uint16_t* p, F x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static F max(F a, F b) { return select(gt(a, b), a, b); }  // b if either is NaN; vmaxq would give NaN
    static M gt(F a, F b) { return vcgtq_f32(a, b); }
    static M is_nan(F a) { return vmvnq_u32(vceqq_f32(a, a)); }
    static F select(M m, F a, F b) { return vbslq_f32(m, a, b); }
    static float reduce_max(F a) { return vmaxvq_f32(a); }

    static I bits(F a) { return vreinterpretq_u32_f32(a); }
    static F from_bits(I a) { return vreinterpretq_f32_u32(a); }
    static I iadd(I a, I b) { return vaddq_u32(a, b); }
    static I isub(I a, I b) { return vsubq_u32(a, b); }
    static I imul(I a, I b) { return vmulq_u32(a, b); }
    static I iand(I a, I b) { return vandq_u32(a, b); }
    static I ior(I a, I b) { return vorrq_u32(a, b); }
    static I ixor(I a, I b) { return veorq_u32(a, b); }
    template <int N> static I shl(I a) { return vshlq_n_u32(a, N); }
    template <int N> static I shr(I a) { return vshrq_n_u32(a, N); }
    template <int N> static I sar(I a) { return vreinterpretq_u32_s32(vshrq_n_s32(as_signed(a), N)); }
    static int32x4_t as_signed(I a) { return vreinterpretq_s32_u32(a); }
    static I imax(I a, I b) { return vreinterpretq_u32_s32(vmaxq_s32(as_signed(a), as_signed(b))); }
    static I imin(I a, I b) { return vreinterpretq_u32_s32(vminq_s32(as_signed(a), as_signed(b))); }
    static M ieq(I a, I b) { return vceqq_u32(a, b); }
    static I iselect(M m, I a, I b) { return vbslq_u32(m, a, b); }
    template <std::uint32_t Mask> static F mul_where(I test, F x, F y) {
        return from_bits(vandq_u32(vtstq_u32(test, seti(Mask)), bits(mul(x, y))));
    }
    static I merge(I x, I mask, I others) { return ior(iand(x, mask), others); }
    static F max_magnitude(F x, F most) { return max(vabsq_f32(x), most); }
    static bool any_nan(const F (&x)[4]) {
        const M numbers = iand(iand(vceqq_f32(x[0], x[0]), vceqq_f32(x[1], x[1])),
                               iand(vceqq_f32(x[2], x[2]), vceqq_f32(x[3], x[3])));
        return vminvq_u32(numbers) == 0;
    }
    static int count(M m) { return int(vaddvq_u32(vshrq_n_u32(m, 31))); }

    // lanes[First + k] += double(x[k])^2 of 16 lanes.
    struct Squares {
        float64x2_t lane[8] = {vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0),
                               vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0), vdupq_n_f64(0)};
        template <int First> void add(F x) {
            const float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);
            lane[First / 2] = vaddq_f64(lane[First / 2], vmulq_f64(low, low));
            lane[First / 2 + 1] = vaddq_f64(lane[First / 2 + 1], vmulq_f64(high, high));
        }
        void store(double* out) const {
            for (int k = 0; k < 8; ++k) vst1q_f64(out + 2 * k, lane[k]);
        }
    };
};
