// Eight lanes: AVX2, FMA, F16C. Included inside an anonymous namespace.

struct Avx2 {
    static constexpr int width = 8;
    static constexpr int phased = 4;  // vectors that an update takes together: [Note: flight]
    using F = __m256;
    using I = __m256i;
    using M = __m256;  // all bits of a lane, or none

    static F set(float x) { return _mm256_set1_ps(x); }
    static I seti(std::uint32_t x) { return _mm256_set1_epi32(int(x)); }
    static I iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static I load_u16(const std::uint16_t* p) { return _mm256_cvtepu16_epi32(load128(p)); }
    static I load_i16(const std::uint16_t* p) { return _mm256_cvtepi16_epi32(load128(p)); }
    static I load_u8(const std::uint8_t* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_i8(const std::uint8_t* p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
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
    static I bytes_in_order(I x) { return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }
    static I pack_signed(const I (&x)[4]) {  // saturates
        return _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
    }
    // Signed lanes, clamped to 0 … 255.
    static void store_clamped(std::uint8_t* p, const I (&x)[4]) {
        const I low = _mm256_packs_epi32(x[0], x[1]), high = _mm256_packs_epi32(x[2], x[3]);
        store_bytes(p, bytes_in_order(_mm256_packus_epi16(low, high)));
    }
    // Signed lanes, clamped to 0 … 127, below the signs of others.
    static void store_clamped_signed(std::uint8_t* p, const I (&x)[4], const I (&sign)[4]) {
        const I magnitude = _mm256_max_epi8(pack_signed(x), _mm256_setzero_si256());
        const I signs = _mm256_and_si256(pack_signed(sign), _mm256_set1_epi8(char(0x80)));
        store_bytes(p, bytes_in_order(_mm256_or_si256(magnitude, signs)));
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
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static M gt(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
    static M is_nan(F a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
    static F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }
    static float reduce_max(F a) {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
    }

    static I bits(F a) { return _mm256_castps_si256(a); }
    static F from_bits(I a) { return _mm256_castsi256_ps(a); }
    static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
    static I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
    static I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I iand(I a, I b) { return _mm256_and_si256(a, b); }
    static I ior(I a, I b) { return _mm256_or_si256(a, b); }
    static I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
    template <int N> static I shl(I a) { return _mm256_slli_epi32(a, N); }
    template <int N> static I shr(I a) { return _mm256_srli_epi32(a, N); }
    template <int N> static I sar(I a) { return _mm256_srai_epi32(a, N); }
    static I imax(I a, I b) { return _mm256_max_epi32(a, b); }
    static I imin(I a, I b) { return _mm256_min_epi32(a, b); }
    static M ieq(I a, I b) { return from_bits(_mm256_cmpeq_epi32(a, b)); }
    static I iselect(M m, I a, I b) { return bits(select(m, from_bits(a), from_bits(b))); }
    template <std::uint32_t Mask> static F mul_where(I test, F x, F y) {
        const I zero = _mm256_setzero_si256();
        const I unset = _mm256_cmpeq_epi32(Mask == ~0u ? test : iand(test, seti(Mask)), zero);
        return _mm256_andnot_ps(from_bits(unset), mul(x, y));
    }
    static I merge(I x, I mask, I others) { return ior(iand(x, mask), others); }
    static F max_magnitude(F x, F most) { return max(from_bits(iand(bits(x), seti(0x7fffffffu))), most); }
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
