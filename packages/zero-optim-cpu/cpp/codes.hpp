// 8-bit moments: the format of a block of 256 values. Included in an anonymous namespace, after codec.hpp.
//
// [Note: codes]  A code is a float of few bits: three of mantissa, and the distance of its exponent below that of the
// block's largest value. Its value's upper half, a `word`, is the code moved to where a float has these bits, plus an
// `offset` of the block:
//
//   word = s 0000 eeee mmm 0000 + (E - 15 << 7)    signed: sign, 4 + 3 bits. No magnitude: 0.
//   word = 0 000 eeeee mmm 0000 + (E - 31 << 7)    unsigned: 5 + 3 bits. Code 0 is 2^-32 of the largest, not 0: its
//                                                  root is a divisor, and so small a moment is as good as zero.
//
// E is the exponent of the block's scale, a power of two: its fp32 is what memory has. A scale of 0 is of a block of
// zeros, offset 0. To encode, a number from `dither_of` is added to the 20 bits that will be cut off, so that moments
// which move by less than a step of 12.5 % still move on average; the largest word so made has E; every code is its
// word less the offset, in saturating arithmetic of 16 bits. No multiplication, no table, no root.
//
// Values that are not finite do not count for the largest, and are stored as the largest code. A block without finite
// values has E = 254.

constexpr std::uint32_t least_exponent = 40;  // of a scale that is not zero: no code is a denormal, nor beta times it
constexpr std::uint32_t word_of_infinity = 0x7f80u;

// A hash (the end of murmur3) of each position in a block. The compiler computes them, because every kernel call needs all.
struct Positions {
    std::uint32_t mixed[block_numel];
};
constexpr Positions mixed_positions() {
    Positions all{};
    for (std::int64_t k = 0; k < block_numel; ++k) {
        std::uint32_t x = std::uint32_t(k) + 1u;
        x = (x ^ (x >> 16)) * 0x85ebca6bu;
        x = (x ^ (x >> 13)) * 0xc2b2ae35u;
        all.mixed[k] = x ^ (x >> 16);
    }
    return all;
}
constexpr Positions positions = mixed_positions();

// 20 random-looking bits of the position in the block and the step, equidistributed over steps.
inline std::uint32_t dither_of(std::int64_t position, std::uint32_t key) {
    return (positions.mixed[position] + key * 0x9e3779b9u) >> 12;
}
constexpr std::uint32_t dither_nearest = 1u << 19;

inline std::uint16_t word_of(float x, std::uint32_t dither) { return std::uint16_t((Scalar::bits(x) + dither) >> 16); }
inline float value_of(std::uint32_t word) { return Scalar::from_bits(word << 16); }

template <bool Signed> struct Code {
    static constexpr std::uint32_t magnitude_bits = Signed ? 7 : 8, reach = Signed ? 15 : 31;
    static constexpr std::uint32_t top = (1u << magnitude_bits) - 1u;
    std::uint8_t* p;

    static std::uint32_t offset_of(float scale) {
        const std::uint32_t e = Scalar::bits(scale) >> 23;
        return e == 0 ? 0 : (e - reach) << 7;
    }
    std::uint32_t load(std::int64_t i, std::uint32_t offset) const {
        const std::uint32_t magnitude = p[i] & top, sign = Signed ? (p[i] & 0x80u) << 8 : 0u;
        return Signed && magnitude == 0 ? 0u : sign + (magnitude << 4) + offset;
    }
    // Words of 2 * V::width elements.
    template <class V> ZERO_OPTIM_INLINE typename V::I load_vector(std::int64_t i, typename V::I offset) const {
        if constexpr (Signed) return V::load_signed(p + i, offset);
        else return V::add_words(V::template shl_words<4>(V::load_bytes(p + i)), offset);
    }
    template <class V>
    ZERO_OPTIM_INLINE static typename V::I code_of(typename V::I word, typename V::I offset) {
        const typename V::I magnitude = Signed ? V::iand(word, V::set_words(0x7fffu)) : word;
        return V::template shr_words<4>(V::sub_to_zero(magnitude, offset));
    }
};
using SignedCode = Code<true>;
using UnsignedCode = Code<false>;

// The largest of a whole block's magnitudes.
template <class V, bool Signed> ZERO_OPTIM_INLINE std::uint32_t largest_of(const std::uint16_t* words) {
    if constexpr (V::width == 1) {
        std::uint32_t most = 0;
        for (std::int64_t k = 0; k < block_numel; ++k) most = words[k] % 0x8000u > most ? words[k] % 0x8000u : most;
        return most;
    } else {
        constexpr int chains = 4;
        typename V::I most[chains];
        for (std::int64_t k = 0; k < block_numel; k += chains * 2 * V::width) {
            each<chains>([&](auto n) ZERO_OPTIM_INLINE_LAMBDA {
                typename V::I x = V::load_words(words + k + n.value * 2 * V::width);
                if constexpr (Signed) x = V::iand(x, V::set_words(0x7fffu));
                most[n.value] = k == 0 ? x : V::max_words(x, most[n.value]);
            });
        }
        return V::largest_word(V::max_words(V::max_words(most[0], most[1]), V::max_words(most[2], most[3])));
    }
}

// Words that are not finite become the largest code of the others; its exponent. Out of line: rare.
__attribute__((noinline)) inline std::uint32_t tame(std::uint16_t* words) {
    std::uint32_t most = 0;
    for (std::int64_t k = 0; k < block_numel; ++k) {
        const std::uint32_t magnitude = words[k] & 0x7fffu;
        if (magnitude < word_of_infinity && magnitude > most) most = magnitude;
    }
    const std::uint32_t e = most >> 7 == 0 ? 254u : most >> 7 < least_exponent ? least_exponent : most >> 7;
    for (std::int64_t k = 0; k < block_numel; ++k) {
        if ((words[k] & 0x7fffu) >= word_of_infinity) words[k] = std::uint16_t((words[k] & 0x8000u) | (e << 7) | 0x7fu);
    }
    return e;
}

// The scale of a block whose largest word is this.
ZERO_OPTIM_INLINE float scale_of(std::uint32_t most, std::uint16_t* words) {
    std::uint32_t e = most >> 7;
    if (__builtin_expect(most >= word_of_infinity, 0)) e = tame(words);
    else if (e != 0 && e < least_exponent) e = least_exponent;
    return Scalar::from_bits(e << 23);
}

// A block's codes from its words. An offset that no word reaches makes the zeros of a scale of 0.
template <class V, bool Signed>
ZERO_OPTIM_INLINE void store_block(std::uint8_t* codes, const std::uint16_t* words, float scale) {
    const std::uint32_t of_block = scale == 0.0f ? 0xffffu : Code<Signed>::offset_of(scale);
    if constexpr (V::width == 1) {
        for (std::int64_t k = 0; k < block_numel; ++k) {
            const std::uint32_t magnitude = words[k] & 0x7fffu;
            const std::uint32_t above = magnitude > of_block ? magnitude - of_block : 0u;
            codes[k] = std::uint8_t((above >> 4) | (Signed ? (words[k] >> 8) & 0x80u : 0u));
        }
    } else {
        const typename V::I offset = V::set_words(of_block);
        for (std::int64_t k = 0; k < block_numel; k += 4 * V::width) {
            const typename V::I x = V::load_words(words + k), y = V::load_words(words + k + 2 * V::width);
            const typename V::I low = Code<Signed>::template code_of<V>(x, offset);
            const typename V::I high = Code<Signed>::template code_of<V>(y, offset);
            if constexpr (Signed) V::store_signed(codes + k, low, high, x, y);
            else V::store_codes(codes + k, low, high);
        }
    }
}

// ---- pairs: 2 * V::width elements of a stream, those of even place apart from those of odd place -----------------
//
// Two vectors that hold every other element cost no shuffle to make of 16-bit values, and none to store.

template <class V> ZERO_OPTIM_INLINE void floats_of(typename V::I words, typename V::F& even, typename V::F& odd) {
    even = V::from_bits(V::template shl<16>(words));
    odd = V::from_bits(V::iand(words, V::seti(0xffff0000u)));
}

template <class V, class Stream>
ZERO_OPTIM_INLINE void load_pair(V, const Stream& from, std::int64_t i, typename V::F& even, typename V::F& odd) {
    V::unzip(from.template load<V>(i), from.template load<V>(i + V::width), even, odd);
}
template <class V>
ZERO_OPTIM_INLINE void load_pair(V, const Bf16& from, std::int64_t i, typename V::F& even, typename V::F& odd) {
    floats_of<V>(V::load_words(from.p + i), even, odd);
}
template <class V>
ZERO_OPTIM_INLINE void load_pair(V, const Split& from, std::int64_t i, typename V::F& even, typename V::F& odd) {
    const typename V::I low = V::load_words(from.low + i);
    const typename V::I high = V::add_words(V::load_words(from.high + i), V::template sar_words<15>(low));
    even = V::from_bits(V::low_halves(low, high));
    odd = V::from_bits(V::high_halves(low, high));
}

// x: pairs one after the other.
template <class V, int N, class Master>
ZERO_OPTIM_INLINE void store_pairs(V, const Master& to, std::int64_t i, const typename V::F (&x)[N],
                                   const Coefficients& c) {
    typename V::F in_order[N];
    each<N / 2>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
        constexpr int n = 2 * k.value;
        V::zip(x[n], x[n + 1], in_order[n], in_order[n + 1]);
    });
    to.template store<V>(i, in_order, c);
}
template <class V, int N>
ZERO_OPTIM_INLINE void store_pairs(V, const Split& to, std::int64_t i, const typename V::F (&x)[N],
                                   const Coefficients&) {
    typename V::I b[N];
    canonical_bits<V>(x, b);
    each<N / 2>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
        constexpr int n = 2 * k.value;
        const typename V::I low = V::low_halves(b[n], b[n + 1]), high = V::high_halves(b[n], b[n + 1]);
        V::store_words(to.low + i + n * V::width, low);
        V::store_words(to.high + i + n * V::width, V::sub_words(high, V::template sar_words<15>(low)));
    });
}
