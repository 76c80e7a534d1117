// Sixteen lanes: AVX-512 F, BW, VL, DQ. Included inside an anonymous namespace.

struct Avx512 {
    static constexpr int width = 16;
    static constexpr int phased = 4;  // vectors that an update takes together: [Note: flight]
    using F = __m512;
    using I = __m512i;
    using M = __mmask16;

    static F set(float x) { return _mm512_set1_ps(x); }
    static I seti(std::uint32_t x) { return _mm512_set1_epi32(int(x)); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static I load_u16(const std::uint16_t* p) { return _mm512_cvtepu16_epi32(load256(p)); }
    static I load_i16(const std::uint16_t* p) { return _mm512_cvtepi16_epi32(load256(p)); }
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
    // Words: a vector of twice as many 16-bit lanes as it has floats, in the order of memory.
    static I set_words(std::uint32_t x) { return _mm512_set1_epi16(short(x)); }
    static I load_words(const std::uint16_t* p) { return _mm512_loadu_si512(p); }
    static void store_words(std::uint16_t* p, I x) { store_bytes(p, x); }
    static I load_bytes(const std::uint8_t* p) { return _mm512_cvtepu8_epi16(load256(p)); }
    // The low (high) half of each lane of x below that of y's.
    static I low_halves(I x, I y) { return _mm512_mask_blend_epi16(0xaaaaaaaau, x, _mm512_slli_epi32(y, 16)); }
    static I high_halves(I x, I y) { return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(x, 16), y); }
    static I add_words(I a, I b) { return _mm512_add_epi16(a, b); }
    static I sub_words(I a, I b) { return _mm512_sub_epi16(a, b); }
    static I sub_to_zero(I a, I b) { return _mm512_subs_epu16(a, b); }
    static I max_words(I a, I b) { return _mm512_max_epu16(a, b); }
    template <int N> static I shl_words(I a) { return _mm512_slli_epi16(a, N); }
    template <int N> static I shr_words(I a) { return _mm512_srli_epi16(a, N); }
    template <int N> static I sar_words(I a) { return _mm512_srai_epi16(a, N); }
    static std::uint32_t largest_word(I x) {
        const __m256i y = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
        const __m128i z = _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
        return 0xffffu ^ std::uint16_t(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(z, _mm_set1_epi32(-1)))));
    }
    // [Note: codes] of bytes s mmmmmmm.
    static I load_signed(const std::uint8_t* p, I offset) {
        const I code = _mm512_cvtepi8_epi16(load256(p));
        const I placed = _mm512_and_si512(_mm512_slli_epi16(code, 4), set_words(0x87f0u));
        return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(code, set_words(0x7fu)), placed, offset);
    }
    static I bytes_in_order(I x) { return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x); }
    // Words below 256, and the top bits of others, to bytes.
    static void store_codes(std::uint8_t* p, I x, I y) { store_bytes(p, bytes_in_order(_mm512_packus_epi16(x, y))); }
    static void store_signed(std::uint8_t* p, I x, I y, I sign_x, I sign_y) {
        const I signs = _mm512_packs_epi16(sign_x, sign_y), codes = _mm512_packus_epi16(x, y);
        store_bytes(p, bytes_in_order(_mm512_ternarylogic_epi32(signs, _mm512_set1_epi8(char(0x80)), codes, 0xea)));
    }
    // Lanes of even and of odd place, and back.
    static void unzip(F x, F y, F& even, F& odd) {
        const I of_even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        even = _mm512_permutex2var_ps(x, of_even, y);
        odd = _mm512_permutex2var_ps(x, _mm512_add_epi32(of_even, seti(1)), y);
    }
    static void zip(F even, F odd, F& x, F& y) {
        const I low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        x = _mm512_permutex2var_ps(even, low, odd);
        y = _mm512_permutex2var_ps(even, _mm512_add_epi32(low, seti(8)), odd);
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
    static M gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
    static M is_nan(F a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
    static F select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }

    static I bits(F a) { return _mm512_castps_si512(a); }
    static F from_bits(I a) { return _mm512_castsi512_ps(a); }
    static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
    static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I iand(I a, I b) { return _mm512_and_si512(a, b); }
    static I ior(I a, I b) { return _mm512_or_si512(a, b); }
    template <int N> static I shl(I a) { return _mm512_slli_epi32(a, N); }
    template <int N> static I shr(I a) { return _mm512_srli_epi32(a, N); }
    static M ieq(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
    static I iselect(M m, I a, I b) { return _mm512_mask_blend_epi32(m, b, a); }
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
