// Sixteen lanes: AVX-512 F, BW, VL, DQ. Included inside an anonymous namespace.

struct Avx512 {
    static constexpr int width = 16;
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
    static I load_i32(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
    static void store_u16(std::uint16_t* p, I x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
    }
    static void store_u8(std::uint8_t* p, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
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
    static I imax(I a, I b) { return _mm512_max_epi32(a, b); }
    static I imin(I a, I b) { return _mm512_min_epi32(a, b); }
    static M ieq(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
    static I iselect(M m, I a, I b) { return _mm512_mask_blend_epi32(m, b, a); }
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
