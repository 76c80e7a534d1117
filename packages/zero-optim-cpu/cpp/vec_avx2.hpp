// Eight lanes: AVX2, FMA, F16C. Included inside an anonymous namespace.

struct Avx2 {
    static constexpr int width = 8;
    static constexpr int phased = 4;  // vectors that an update takes together: [Note: flight]
    using F = __m256;
    using I = __m256i;
    using M = __m256;  // all bits of a lane, or none

    static F set(float x) { return _mm256_set1_ps(x); }
    static I seti(std::uint32_t x) { return _mm256_set1_epi32(int(x)); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static I load_u16(const std::uint16_t* p) { return _mm256_cvtepu16_epi32(load128(p)); }
    static I load_i16(const std::uint16_t* p) { return _mm256_cvtepi16_epi32(load128(p)); }
    static I load_i32(const std::uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static __m128i narrow(I x) {  // low 16 bits of each lane
        const I masked = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
        const I packed = _mm256_packus_epi32(masked, masked);
        return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    }
    static void store_u16(std::uint16_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
    static void store_bytes(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
    // Two vectors of lanes below 2^16.
    static void store_u16x2(std::uint16_t* p, I x, I y) {
        store_bytes(p, _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8));
    }
    // Words: a vector of twice as many 16-bit lanes as it has floats, in the order of memory.
    static I set_words(std::uint32_t x) { return _mm256_set1_epi16(short(x)); }
    static I load_words(const std::uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store_words(std::uint16_t* p, I x) { store_bytes(p, x); }
    static I load_bytes(const std::uint8_t* p) { return _mm256_cvtepu8_epi16(load128(p)); }
    // The low (high) half of each lane of x below that of y's.
    static I low_halves(I x, I y) { return _mm256_blend_epi16(x, _mm256_slli_epi32(y, 16), 0xaa); }
    static I high_halves(I x, I y) { return _mm256_blend_epi16(_mm256_srli_epi32(x, 16), y, 0xaa); }
    static I add_words(I a, I b) { return _mm256_add_epi16(a, b); }
    static I sub_words(I a, I b) { return _mm256_sub_epi16(a, b); }
    static I sub_to_zero(I a, I b) { return _mm256_subs_epu16(a, b); }
    static I max_words(I a, I b) { return _mm256_max_epu16(a, b); }
    template <int N> static I shl_words(I a) { return _mm256_slli_epi16(a, N); }
    template <int N> static I shr_words(I a) { return _mm256_srli_epi16(a, N); }
    template <int N> static I sar_words(I a) { return _mm256_srai_epi16(a, N); }
    static std::uint32_t largest_word(I x) {
        const __m128i y = _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        return 0xffffu ^ std::uint16_t(_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(y, _mm_set1_epi32(-1)))));
    }
    // [Note: codes] of bytes s mmmmmmm.
    static I load_signed(const std::uint8_t* p, I offset) {
        const I code = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 4);
        const I zero = _mm256_cmpeq_epi16(_mm256_and_si256(code, set_words(0x7f0u)), _mm256_setzero_si256());
        return _mm256_andnot_si256(zero, add_words(_mm256_and_si256(code, set_words(0x87f0u)), offset));
    }
    static I bytes_in_order(I x) { return _mm256_permute4x64_epi64(x, 0xd8); }
    // Words below 256, and the top bits of others, to bytes.
    static void store_codes(std::uint8_t* p, I x, I y) { store_bytes(p, bytes_in_order(_mm256_packus_epi16(x, y))); }
    static void store_signed(std::uint8_t* p, I x, I y, I sign_x, I sign_y) {
        const I signs = _mm256_and_si256(_mm256_packs_epi16(sign_x, sign_y), _mm256_set1_epi8(char(0x80)));
        store_bytes(p, bytes_in_order(_mm256_or_si256(signs, _mm256_packus_epi16(x, y))));
    }
    // Lanes of even and of odd place, and back.
    static void unzip(F x, F y, F& even, F& odd) {
        const auto in_order = [](F z) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(z), 0xd8)); };
        even = in_order(_mm256_shuffle_ps(x, y, 0x88));
        odd = in_order(_mm256_shuffle_ps(x, y, 0xdd));
    }
    static void zip(F even, F odd, F& x, F& y) {
        const F low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
        x = _mm256_permute2f128_ps(low, high, 0x20);
        y = _mm256_permute2f128_ps(low, high, 0x31);
    }
    static F load_f16(const std::uint16_t* p) { return _mm256_cvtph_ps(load128(p)); }
    static void store_f16(std::uint16_t* p, F x) {
        const __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
    }

    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static M gt(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
    static M is_nan(F a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
    static F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }

    static I bits(F a) { return _mm256_castps_si256(a); }
    static F from_bits(I a) { return _mm256_castsi256_ps(a); }
    static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
    static I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
    static I iand(I a, I b) { return _mm256_and_si256(a, b); }
    static I ior(I a, I b) { return _mm256_or_si256(a, b); }
    template <int N> static I shl(I a) { return _mm256_slli_epi32(a, N); }
    template <int N> static I shr(I a) { return _mm256_srli_epi32(a, N); }
    static M ieq(I a, I b) { return from_bits(_mm256_cmpeq_epi32(a, b)); }
    static I iselect(M m, I a, I b) { return bits(select(m, from_bits(a), from_bits(b))); }
    static bool any_nan(const F (&x)[4]) {
        const M first = _mm256_cmp_ps(x[0], x[1], _CMP_UNORD_Q), second = _mm256_cmp_ps(x[2], x[3], _CMP_UNORD_Q);
        return _mm256_movemask_ps(_mm256_or_ps(first, second)) != 0;
    }
    static int count(M m) { return __builtin_popcount(unsigned(_mm256_movemask_ps(m))); }

    // lanes[First + k] += double(x[k])^2 of 16 lanes.
    struct Squares {
        __m256d lane[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
        template <int First> void add(F x) {
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
            lane[First / 4] = _mm256_add_pd(lane[First / 4], _mm256_mul_pd(low, low));
            lane[First / 4 + 1] = _mm256_add_pd(lane[First / 4 + 1], _mm256_mul_pd(high, high));
        }
        void store(double* out) const {
            for (int k = 0; k < 4; ++k) _mm256_storeu_pd(out + 4 * k, lane[k]);
        }
    };
};
