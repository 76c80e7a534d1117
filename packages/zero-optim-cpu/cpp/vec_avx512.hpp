// Sixteen lanes: AVX-512 F, BW, VL, DQ. Included inside an anonymous namespace.

struct Avx512 {
    static constexpr int width = 16;
    static constexpr int phased = 4;  // vectors that an update takes together: [Note: flight]
    using F = __m512;
    using I = __m512i;
    using M = __mmask16;

    static F set(float x) { return _mm512_set1_ps(x); }
    static I seti(std::uint32_t x) { return _mm512_set1_epi32(int(x)); }
    static I iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static I load_u16(const std::uint16_t* p) { return _mm512_cvtepu16_epi32(load256(p)); }
    static I load_i16(const std::uint16_t* p) { return _mm512_cvtepi16_epi32(load256(p)); }
    static I load_u8(const std::uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_i8(const std::uint8_t* p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_i32(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
    static void store_u16(std::uint16_t* p, I x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
    }
    static void store_bytes(void* p, I x) { _mm512_storeu_si512(p, x); }
    // Two vectors of lanes below 2^16: half the shuffles of two stores.
    static void store_u16x2(std::uint16_t* p, I x, I y) {
        const I order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        store_bytes(p, _mm512_permutexvar_epi64(order, _mm512_packus_epi32(x, y)));
    }
    static I bytes_in_order(I x) {
        const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_permutexvar_epi32(order, x);
    }
    static I pack_signed(const I (&x)[4]) {  // saturates
        return _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
    }
    // Signed lanes, clamped to 0 … 255.
    static void store_clamped(std::uint8_t* p, const I (&x)[4]) {
        const I low = _mm512_packs_epi32(x[0], x[1]), high = _mm512_packs_epi32(x[2], x[3]);
        store_bytes(p, bytes_in_order(_mm512_packus_epi16(low, high)));
    }
    // Signed lanes, clamped to 0 … 127, below the signs of others.
    static void store_clamped_signed(std::uint8_t* p, const I (&x)[4], const I (&sign)[4]) {
        const I magnitude = _mm512_max_epi8(pack_signed(x), _mm512_setzero_si512());
        const I signs = _mm512_and_si512(pack_signed(sign), _mm512_set1_epi8(char(0x80)));
        store_bytes(p, bytes_in_order(_mm512_or_si512(magnitude, signs)));
    }
    static F load_f16(const std::uint16_t* p) { return _mm512_cvtph_ps(load256(p)); }
    static void store_f16(std::uint16_t* p, F x) {
        const __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
    }

    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static M gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
    static M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
    static F select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
    static float reduce_max(F a) { return _mm512_reduce_max_ps(a); }

    static I bits(F a) { return _mm512_castps_si512(a); }
    static F from_bits(I a) { return _mm512_castsi512_ps(a); }
    static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
    static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I iand(I a, I b) { return _mm512_and_si512(a, b); }
    static I ior(I a, I b) { return _mm512_or_si512(a, b); }
    static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
    template <int N> static I shl(I a) { return _mm512_slli_epi32(a, N); }
    template <int N> static I shr(I a) { return _mm512_srli_epi32(a, N); }
    template <int N> static I sar(I a) { return _mm512_srai_epi32(a, N); }
    static I imax(I a, I b) { return _mm512_max_epi32(a, b); }
    static I imin(I a, I b) { return _mm512_min_epi32(a, b); }
    static M ieq(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
    static I iselect(M m, I a, I b) { return _mm512_mask_blend_epi32(m, b, a); }
    template <std::uint32_t Mask> static F mul_where(I test, F x, F y) {
        return _mm512_maskz_mul_ps(_mm512_test_epi32_mask(test, Mask == ~0u ? test : seti(Mask)), x, y);
    }
    static I merge(I x, I mask, I others) { return _mm512_ternarylogic_epi32(x, mask, others, 0xea); }
    static F max_magnitude(F x, F most) { return _mm512_range_ps(x, most, 0b1011); }  // larger magnitude, sign cleared
    static bool any_nan(const F (&x)[4]) {
        const M first = _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q);
        const M second = _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q);
        return !_mm512_kortestz(first, second);
    }
    static int count(M m) { return __builtin_popcount(m); }

    // lanes[k] += double(x[k])^2 for 16 lanes; x starts at lane `first`, which is 0 here.
    struct Squares {
        __m512d lane[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
        template <int First> void add(F x) {
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
            lane[0] = _mm512_add_pd(lane[0], _mm512_mul_pd(low, low));
            lane[1] = _mm512_add_pd(lane[1], _mm512_mul_pd(high, high));
        }
        void store(double* out) const {
            _mm512_storeu_pd(out, lane[0]);
            _mm512_storeu_pd(out + 8, lane[1]);
        }
    };
};
