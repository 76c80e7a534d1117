// The update loops over one item: every rule x master x moments x gradient type. Included in an anonymous namespace.

constexpr std::int64_t group_numel = 32;  // one prefetch of a 16-bit stream, two of an fp32 one

template <DType> struct GradientOf;
template <> struct GradientOf<DType::f32> { using type = F32; };
template <> struct GradientOf<DType::bf16> { using type = Bf16; };
template <> struct GradientOf<DType::f16> { using type = F16; };

template <class Stream> Stream stream_of(const void* p) {
    return {static_cast<decltype(Stream::p)>(const_cast<void*>(p))};
}
template <> Nothing stream_of<Nothing>(const void*) { return {}; }

template <bool Has, class Stream> struct If { using type = Stream; };
template <class Stream> struct If<false, Stream> { using type = Nothing; };

// ---- fp32 and bf16 moments: one loop a segment -------------------------------------------------------------------

template <template <class> class R, class MasterStream, class G, class A, class B> struct Plain {
    MasterStream master;
    G gradient;
    A a;
    B b;

    template <class V> ZERO_OPTIM_INLINE void one(const R<V>& rule, const Coefficients& c, std::int64_t i) const {
        typename V::F p = master.template load<V>(i);
        const typename V::F g = V::mul(gradient.template load<V>(i), V::set(c.scale));
        typename V::F x = a.template load<V>(i), y = b.template load<V>(i);
        rule(p, g, x, y);
        a.template store<V>(i, x);
        b.template store<V>(i, y);
        master.template store<V>(i, p, c);
    }

    template <class V> void range(const Coefficients& c, std::int64_t i, std::int64_t end) const {
        const R<V> rule(c);
        for (; i + group_numel <= end; i += group_numel) {
            master.ahead(i);
            gradient.ahead(i);
            a.ahead(i);
            b.ahead(i);
            for (std::int64_t k = 0; k < group_numel; k += V::width) one<V>(rule, c, i + k);
        }
        for (; i + V::width <= end; i += V::width) one<V>(rule, c, i);
        const R<Scalar> last(c);
        for (; i < end; ++i) one<Scalar>(last, c, i);
    }
};

template <class V, template <class> class R, class MasterStream, class A, class B, DType D>
void update_plain(const Item& t, std::int64_t begin, std::int64_t end) {
    using G = typename GradientOf<D>::type;
    using StateA = typename If<R<V>::has_a, A>::type;
    using StateB = typename If<R<V>::has_b, B>::type;
    const Plain<R, MasterStream, G, StateA, StateB> loop{MasterStream::of(t), stream_of<G>(t.gradient),
                                                         stream_of<StateA>(t.state[0]), stream_of<StateB>(t.state[1])};
    for (std::int64_t s = first_segment(t, begin); s < t.segment_count && t.segments[s].start < end; ++s) {
        const Segment& segment = t.segments[s];
        const std::int64_t start = segment.start > begin ? segment.start : begin;
        loop.template range<V>(segment.c, start, segment.stop < end ? segment.stop : end);
    }
}

// ---- 8-bit moments: block by block --------------------------------------------------------------------------------
//
// A block is decoded, updated segment by segment, and encoded again with the new largest value as its scale. What lies
// in the block but in no segment keeps its value to the nearest code of that scale.

struct Block {
    float a[block_numel];
    float b[block_numel];
    std::uint32_t dither[block_numel];
};

inline float inverse_of(float largest) { return largest >= smallest_scale ? top_up / largest : 0.0f; }

template <class V, template <class> class R, class MasterStream, DType D> struct Coded {
    using G = typename GradientOf<D>::type;
    static constexpr bool has_a = R<V>::has_a, has_b = R<V>::has_b;
    MasterStream master;
    G gradient;
    SignedCode a;
    UnsignedCode b;
    float* scale_a;
    float* scale_b;

    template <class W>
    ZERO_OPTIM_INLINE void decode(Block& block, std::int64_t base, std::int64_t k, float unit_a, float unit_b) const {
        if constexpr (has_a) W::store(block.a + k, a.template load<W>(base + k, unit_a));
        if constexpr (has_b) W::store(block.b + k, b.template load<W>(base + k, unit_b));
    }

    template <class W>
    ZERO_OPTIM_INLINE void one(const R<W>& rule, const Coefficients& c, Block& block, std::int64_t base, std::int64_t k,
                               float unit_a, float unit_b) const {
        typename W::F p = master.template load<W>(base + k);
        const typename W::F g = W::mul(gradient.template load<W>(base + k), W::set(c.scale));
        typename W::F x = W::set(0.0f), y = W::set(0.0f);
        if constexpr (has_a) x = a.template load<W>(base + k, unit_a);
        if constexpr (has_b) y = b.template load<W>(base + k, unit_b);
        rule(p, g, x, y);
        if constexpr (has_a) W::store(block.a + k, x);
        if constexpr (has_b) W::store(block.b + k, y);
        master.template store<W>(base + k, p, c);
    }

    void update(const Coefficients& c, Block& block, std::int64_t base, std::int64_t k, std::int64_t stop, float unit_a,
                float unit_b) const {
        const R<V> rule(c);
        for (; k + V::width <= stop; k += V::width) one<V>(rule, c, block, base, k, unit_a, unit_b);
        const R<Scalar> last(c);
        for (; k < stop; ++k) one<Scalar>(last, c, block, base, k, unit_a, unit_b);
    }

    static ZERO_OPTIM_INLINE float largest(const float* x, std::int64_t count) {
        const typename V::I magnitude = V::seti(0x7fffffffu);
        typename V::F most = V::set(0.0f);
        std::int64_t k = 0;
        for (; k + V::width <= count; k += V::width) {
            most = V::max(V::from_bits(V::iand(V::bits(V::load(x + k)), magnitude)), most);
        }
        float result = V::reduce_max(most);
        for (; k < count; ++k) {
            result = Scalar::max(Scalar::from_bits(Scalar::bits(x[k]) & 0x7fffffffu), result);
        }
        return result;
    }

    template <class W>
    ZERO_OPTIM_INLINE void encode(const Block& block, std::int64_t base, std::int64_t k, float to_a,
                                  float to_b) const {
        const typename W::I dither = W::load_i32(block.dither + k);
        if constexpr (has_a) a.template store<W>(base + k, W::load(block.a + k), to_a, dither);
        if constexpr (has_b) {
            const typename W::I other = W::ixor(dither, W::seti(0xfffffu));
            b.template store<W>(base + k, W::load(block.b + k), to_b, other);
        }
    }

    void finish(const Block& block, std::int64_t base, std::int64_t count) const {
        float to_a = 0.0f, to_b = 0.0f;
        const std::int64_t index = base / block_numel;
        if constexpr (has_a) {
            const float most = largest(block.a, count);
            to_a = inverse_of(most);
            scale_a[index] = to_a == 0.0f ? 0.0f : most;
        }
        if constexpr (has_b) {
            const float most = largest(block.b, count);
            to_b = inverse_of(most);
            scale_b[index] = to_b == 0.0f ? 0.0f : most;
        }
        std::int64_t k = 0;
        for (; k + V::width <= count; k += V::width) encode<V>(block, base, k, to_a, to_b);
        for (; k < count; ++k) encode<Scalar>(block, base, k, to_a, to_b);
    }

    void ahead(std::int64_t base) const {
        for (std::int64_t k = 0; k < block_numel; k += group_numel) {
            master.ahead(base + k);
            gradient.ahead(base + k);
        }
        for (std::int64_t k = 0; k < block_numel; k += 64) {
            if constexpr (has_a) prefetch(a.p, base + k, prefetch_bytes / 2);
            if constexpr (has_b) prefetch(b.p, base + k, prefetch_bytes / 2);
        }
    }
};

inline void fill_dither(Block& block, std::int64_t k, std::int64_t stop, std::uint32_t key) {
    for (; k < stop; ++k) block.dither[k] = dither_of(std::uint32_t(k), key);
}

template <class V, template <class> class R, class MasterStream, DType D>
void update_coded(const Item& t, std::int64_t begin, std::int64_t end) {
    using Loop = Coded<V, R, MasterStream, D>;
    const Loop loop{MasterStream::of(t),
                    stream_of<typename Loop::G>(t.gradient),
                    stream_of<SignedCode>(t.state[0]),
                    stream_of<UnsignedCode>(t.state[1]),
                    t.scale[0],
                    t.scale[1]};
    Block block;
    std::int64_t dithered = -1;  // segment that the whole of block.dither is filled for
    std::int64_t s = first_segment(t, begin);
    for (std::int64_t base = begin; base < end; base += block_numel) {
        const std::int64_t count = end - base < block_numel ? end - base : block_numel;
        while (s < t.segment_count && t.segments[s].stop <= base) ++s;
        if (s == t.segment_count) return;
        if (t.segments[s].start >= base + count) continue;
        const float unit_a = Loop::has_a ? t.scale[0][base / block_numel] / top : 0.0f;
        const float unit_b = Loop::has_b ? t.scale[1][base / block_numel] / top : 0.0f;
        loop.ahead(base);
        if (t.segments[s].start <= base && t.segments[s].stop >= base + count) {
            if (dithered != s) fill_dither(block, 0, block_numel, t.segments[s].c.key);
            dithered = s;
            loop.update(t.segments[s].c, block, base, 0, count, unit_a, unit_b);
        } else {
            dithered = -1;
            for (std::int64_t k = 0; k < count; ++k) {
                loop.template decode<Scalar>(block, base, k, unit_a, unit_b);
                block.dither[k] = dither_nearest;
            }
            for (std::int64_t j = s; j < t.segment_count && t.segments[j].start < base + count; ++j) {
                const std::int64_t start = t.segments[j].start > base ? t.segments[j].start - base : 0;
                const std::int64_t stop = t.segments[j].stop < base + count ? t.segments[j].stop - base : count;
                fill_dither(block, start, stop, t.segments[j].c.key);
                loop.update(t.segments[j].c, block, base, start, stop, unit_a, unit_b);
            }
        }
        loop.finish(block, base, count);
    }
}
