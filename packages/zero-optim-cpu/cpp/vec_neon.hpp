// Four lanes: AArch64 NEON. Included inside an anonymous namespace.
//
// No fused multiply-add: vmulq then vaddq stay two roundings under -ffp-contract=off.

struct Neon {
    static constexpr int width = 4;
    static constexpr int phased = 4;  // vectors that an update takes together: [Note: flight]
    using F = float32x4_t;
    using I = uint32x4_t;
    using M = uint32x4_t;  // all bits of a lane, or none

    static F set(float x) { return vdupq_n_f32(x); }
    static I seti(std::uint32_t x) { return vdupq_n_u32(x); }
    static F load(const float* p) { return vld1q_f32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static I load_u16(const std::uint16_t* p) { return vmovl_u16(vld1_u16(p)); }
    static I load_i16(const std::uint16_t* p) {
        return vreinterpretq_u32_s32(vmovl_s16(vreinterpret_s16_u16(vld1_u16(p))));
    }
    static I load_i32(const std::uint32_t* p) { return vld1q_u32(p); }
    static void store_u16(std::uint16_t* p, I x) { vst1_u16(p, vmovn_u32(x)); }
    // Two vectors of lanes below 2^16.
    static void store_u16x2(std::uint16_t* p, I x, I y) { vst1q_u16(p, vcombine_u16(vmovn_u32(x), vmovn_u32(y))); }
    // Words: a vector of twice as many 16-bit lanes as it has floats, in the order of memory.
    static uint16x8_t words(I x) { return vreinterpretq_u16_u32(x); }
    static I of_words(uint16x8_t x) { return vreinterpretq_u32_u16(x); }
    static I set_words(std::uint32_t x) { return of_words(vdupq_n_u16(std::uint16_t(x))); }
    static I load_words(const std::uint16_t* p) { return of_words(vld1q_u16(p)); }
    static void store_words(std::uint16_t* p, I x) { vst1q_u16(p, words(x)); }
    static I load_bytes(const std::uint8_t* p) { return of_words(vmovl_u8(vld1_u8(p))); }
    // The low (high) half of each lane of x below that of y's.
    static I low_halves(I x, I y) { return of_words(vtrn1q_u16(words(x), words(y))); }
    static I high_halves(I x, I y) { return of_words(vtrn2q_u16(words(x), words(y))); }
    static I add_words(I a, I b) { return of_words(vaddq_u16(words(a), words(b))); }
    static I sub_words(I a, I b) { return of_words(vsubq_u16(words(a), words(b))); }
    static I sub_to_zero(I a, I b) { return of_words(vqsubq_u16(words(a), words(b))); }
    static I max_words(I a, I b) { return of_words(vmaxq_u16(words(a), words(b))); }
    template <int N> static I shl_words(I a) { return of_words(vshlq_n_u16(words(a), N)); }
    template <int N> static I shr_words(I a) { return of_words(vshrq_n_u16(words(a), N)); }
    template <int N> static I sar_words(I a) {
        return vreinterpretq_u32_s16(vshrq_n_s16(vreinterpretq_s16_u32(a), N));
    }
    static std::uint32_t largest_word(I x) { return vmaxvq_u16(words(x)); }
    // [Note: codes] of bytes s mmmmmmm.
    static I load_signed(const std::uint8_t* p, I offset) {
        const I code = vreinterpretq_u32_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p))));
        const I placed = iand(shl_words<4>(code), set_words(0x87f0u));
        const uint16x8_t nonzero = vtstq_u16(words(code), vdupq_n_u16(0x7f));
        return iand(of_words(nonzero), add_words(placed, offset));
    }
    // Words below 256, and the top bits of others, to bytes.
    static uint8x16_t bytes(I x, I y) { return vcombine_u8(vmovn_u16(words(x)), vmovn_u16(words(y))); }
    static void store_codes(std::uint8_t* p, I x, I y) { vst1q_u8(p, bytes(x, y)); }
    static void store_signed(std::uint8_t* p, I x, I y, I sign_x, I sign_y) {
        const uint8x16_t signs = vandq_u8(bytes(shr_words<8>(sign_x), shr_words<8>(sign_y)), vdupq_n_u8(0x80));
        vst1q_u8(p, vorrq_u8(signs, bytes(x, y)));
    }
    // Lanes of even and of odd place, and back.
    static void unzip(F x, F y, F& even, F& odd) {
        even = vuzp1q_f32(x, y);
        odd = vuzp2q_f32(x, y);
    }
    static void zip(F even, F odd, F& x, F& y) {
        x = vzip1q_f32(even, odd);
        y = vzip2q_f32(even, odd);
    }
    static F load_f16(const std::uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static void store_f16(std::uint16_t* p, F x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }

    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F sqrt(F a) { return vsqrtq_f32(a); }
    static M gt(F a, F b) { return vcgtq_f32(a, b); }
    static M is_nan(F a) { return vmvnq_u32(vceqq_f32(a, a)); }
    static F select(M m, F a, F b) { return vbslq_f32(m, a, b); }

    static I bits(F a) { return vreinterpretq_u32_f32(a); }
    static F from_bits(I a) { return vreinterpretq_f32_u32(a); }
    static I iadd(I a, I b) { return vaddq_u32(a, b); }
    static I isub(I a, I b) { return vsubq_u32(a, b); }
    static I iand(I a, I b) { return vandq_u32(a, b); }
    static I ior(I a, I b) { return vorrq_u32(a, b); }
    template <int N> static I shl(I a) { return vshlq_n_u32(a, N); }
    template <int N> static I shr(I a) { return vshrq_n_u32(a, N); }
    static M ieq(I a, I b) { return vceqq_u32(a, b); }
    static I iselect(M m, I a, I b) { return vbslq_u32(m, a, b); }
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
