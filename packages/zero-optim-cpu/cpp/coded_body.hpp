// The update loop over one item with 8-bit moments: every rule x master x gradient type. Included in an anonymous
// namespace, after update_body.hpp.
//
// A block's new moments wait as words in the first-level cache until its last one is known, which gives the scale.
// They are encoded when the next block begins: between that block's divisions, so that the divider is never idle.
// Blocks that segments cover in part are updated one at a time; elements outside of all segments keep their values, in
// the new scale.

struct Block {
    alignas(64) std::uint16_t a[block_numel], b[block_numel];                // words of the new moments
    alignas(64) std::uint32_t dither_a[block_numel], dither_b[block_numel];  // by `Coded::place`
    alignas(64) std::uint8_t short_a[block_numel], short_b[block_numel];     // codes of a block that is not whole
};

template <class V, template <class> class R, class MasterStream, DType D> struct Coded {
    using G = typename GradientOf<D>::type;
    static constexpr bool has_a = R<V>::has_a, has_b = R<V>::has_b;
    static constexpr std::int64_t together = V::phased * V::width;
    MasterStream master;
    G gradient;
    SignedCode a;
    UnsignedCode b;
    float* scale_a;
    float* scale_b;

    // Where the dither of a block's element lies: pairs are read one after the other.
    static std::int64_t place(std::int64_t k) {
        const std::int64_t w = V::width;
        return w == 1 ? k : k / (2 * w) * (2 * w) + k % 2 * w + k % (2 * w) / 2;
    }
    static void set_dither(Block& block, std::int64_t k, std::uint32_t dither) {
        block.dither_a[place(k)] = dither;
        block.dither_b[place(k)] = dither ^ 0xfffffu;
    }
    static void fill_dither(Block& block, std::int64_t k, std::int64_t stop, std::uint32_t key) {
        for (; k < stop; ++k) set_dither(block, k, dither_of(k, key));
    }

    ZERO_OPTIM_INLINE void ahead(std::int64_t i, std::int64_t numel) const {
        for (std::int64_t k = i; k < i + numel; k += group_numel) {
            master.ahead(k);
            gradient.ahead(k);
        }
        if constexpr (has_a) prefetch_group<1>(a.p, i);
        if constexpr (has_b) prefetch_group<1>(b.p, i);
    }

    std::uint32_t offset_a(std::int64_t i) const {
        return has_a ? SignedCode::offset_of(scale_a[i / block_numel]) : 0u;
    }
    std::uint32_t offset_b(std::int64_t i) const {
        return has_b ? UnsignedCode::offset_of(scale_b[i / block_numel]) : 0u;
    }

    // Codes and scales of the block at i, all of whose words are there.
    ZERO_OPTIM_INLINE void finish(Block& block, std::int64_t i) const { finish(block, i, a.p + i, b.p + i); }
    ZERO_OPTIM_INLINE void finish(Block& block, std::int64_t i, std::uint8_t* codes_a, std::uint8_t* codes_b) const {
        const std::uint32_t most_a = has_a ? largest_of<V, true>(block.a) : 0u;
        const std::uint32_t most_b = has_b ? largest_of<V, false>(block.b) : 0u;
        if constexpr (has_a) {
            const float scale = scale_a[i / block_numel] = scale_of(most_a, block.a);
            store_block<V, true>(codes_a, block.a, scale);
        }
        if constexpr (has_b) {
            const float scale = scale_b[i / block_numel] = scale_of(most_b, block.b);
            store_block<V, false>(codes_b, block.b, scale);
        }
    }

    // Pairs of vectors from `base`, the first element of a block. Whole: all elements of whole blocks are gone
    // through, and each block but the last is finished.
    template <int N, bool Whole> struct Body {
        const Coded& of;
        const R<V>& rule;
        const Coefficients& c;
        Block& block;
        std::int64_t base;
        mutable typename V::I offset_a, offset_b;

        ZERO_OPTIM_INLINE void enter(std::int64_t i) const {
            if constexpr (has_a) offset_a = V::set_words(of.offset_a(base + i));
            if constexpr (has_b) offset_b = V::set_words(of.offset_b(base + i));
        }
        ZERO_OPTIM_INLINE void begin(std::int64_t i, Flight<V, N>& f) const {
            const std::int64_t slot = i % block_numel;
            if (Whole && slot == 0) {
                if (i > 0) of.finish(block, base + i - block_numel);
                enter(i);
            }
            if constexpr (N * V::width >= group_numel) of.ahead(base + i, N * V::width);
            typename V::F y[N];
            each<N / 2>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
                constexpr int n = 2 * k.value;
                const std::int64_t at = base + i + n * V::width;
                load_pair(V{}, of.master, at, f.p[n], f.p[n + 1]);
                load_pair(V{}, of.gradient, at, f.g[n], f.g[n + 1]);
                f.a[n] = f.a[n + 1] = y[n] = y[n + 1] = V::set(0.0f);
                if constexpr (has_a) floats_of<V>(of.a.template load_vector<V>(at, offset_a), f.a[n], f.a[n + 1]);
                if constexpr (has_b) floats_of<V>(of.b.template load_vector<V>(at, offset_b), y[n], y[n + 1]);
            });
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { f.g[k.value] = V::mul(f.g[k.value], V::set(c.scale)); });
            rule.moments(f.p, f.g, f.a, y);
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { f.root[k.value] = rule.root(y[k.value]); });
            if constexpr (has_a) keep(block.a, block.dither_a, slot, f.a);
            if constexpr (has_b) keep(block.b, block.dither_b, slot, y);
        }
        ZERO_OPTIM_INLINE static void keep(std::uint16_t* words, const std::uint32_t* dithers, std::int64_t slot,
                                           const typename V::F (&x)[N]) {
            each<N / 2>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
                constexpr int n = 2 * k.value;
                const std::uint32_t* dither = dithers + slot + n * V::width;
                V::store_words(words + slot + n * V::width,
                               V::high_halves(V::iadd(V::bits(x[n]), V::load_i32(dither)),
                                              V::iadd(V::bits(x[n + 1]), V::load_i32(dither + V::width))));
            });
        }
        ZERO_OPTIM_INLINE void end(std::int64_t i, const typename V::F (&p)[N]) const {
            store_pairs(V{}, of.master, base + i, p, c);
        }
    };

    // The same, element by element, within a block.
    struct Single {
        const Coded& of;
        const R<Scalar>& rule;
        const Coefficients& c;
        Block& block;
        std::int64_t base;
        std::uint32_t offset_a, offset_b;

        void begin(std::int64_t k, Flight<Scalar, 1>& f) const {
            const std::int64_t i = base + k;
            float y[1] = {0.0f};
            f.p[0] = of.master.template load<Scalar>(i);
            f.g[0] = of.gradient.template load<Scalar>(i) * c.scale;
            f.a[0] = has_a ? value_of(of.a.load(i, offset_a)) : 0.0f;
            if (has_b) y[0] = value_of(of.b.load(i, offset_b));
            rule.moments(f.p, f.g, f.a, y);
            f.root[0] = rule.root(y[0]);
            if (has_a) block.a[k] = word_of(f.a[0], block.dither_a[place(k)]);
            if (has_b) block.b[k] = word_of(y[0], block.dither_b[place(k)]);
        }
        void end(std::int64_t k, const float (&p)[1]) const { of.master.template store<Scalar>(base + k, p, c); }
    };

    // Elements [k, stop) of the block at `base`, into its words.
    void update_in_block(const Coefficients& c, Block& block, std::int64_t base, std::int64_t k,
                         std::int64_t stop) const {
        const R<Scalar> scalar_rule(c);
        const Single single{*this, scalar_rule, c, block, base, offset_a(base), offset_b(base)};
        if constexpr (V::width > 1) {
            const std::int64_t first = (k + together - 1) / together * together;
            if (first + together <= stop) {
                const std::int64_t last = stop / together * together;
                fly<1, Scalar>(scalar_rule, single, k, first);
                const R<V> rule(c);
                const Body<V::phased, false> body{*this, rule, c, block, base, V::seti(0u), V::seti(0u)};
                body.enter(0);
                fly<V::phased, V>(rule, body, first, last);
                k = last;
            }
        }
        fly<1, Scalar>(scalar_rule, single, k, stop);
    }

    // Whole blocks of one segment.
    void update_blocks(const Coefficients& c, Block& block, std::int64_t base, std::int64_t numel) const {
        const Coded self = *this;  // a local copy, which no store can alias
        const Coefficients own = c;
        if constexpr (V::width > 1) {
            const R<V> rule(own);
            const Body<V::phased, true> body{self, rule, own, block, base, V::seti(0u), V::seti(0u)};
            fly<V::phased, V>(rule, body, 0, numel);
            self.finish(block, base + numel - block_numel);
        } else {
            for (std::int64_t k = 0; k < numel; k += block_numel) {
                self.update_in_block(own, block, base + k, 0, block_numel);
                self.finish(block, base + k);
            }
        }
    }

    // A block that the segments from `s` on cover in part, or that is short.
    void update_parts(const Item& t, std::int64_t s, Block& block, std::int64_t base, std::int64_t count) const {
        const std::uint32_t of_a = offset_a(base), of_b = offset_b(base);
        for (std::int64_t k = 0; k < block_numel; ++k) {
            block.a[k] = has_a && k < count ? word_of(value_of(a.load(base + k, of_a)), dither_nearest) : 0;
            block.b[k] = has_b && k < count ? word_of(value_of(b.load(base + k, of_b)), dither_nearest) : 0;
        }
        for (; s < t.segment_count && t.segments[s].start < base + count; ++s) {
            const std::int64_t start = t.segments[s].start > base ? t.segments[s].start - base : 0;
            const std::int64_t stop = t.segments[s].stop < base + count ? t.segments[s].stop - base : count;
            fill_dither(block, start, stop, t.segments[s].c.key);
            update_in_block(t.segments[s].c, block, base, start, stop);
        }
        if (count == block_numel) {
            finish(block, base);
            return;
        }
        finish(block, base, block.short_a, block.short_b);  // memory behind the codes is not ours
        if (has_a) __builtin_memcpy(a.p + base, block.short_a, std::size_t(count));
        if (has_b) __builtin_memcpy(b.p + base, block.short_b, std::size_t(count));
    }
};

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
    std::int64_t s = first_segment(t, begin), count;
    for (std::int64_t base = begin; base < end; base += count) {
        count = end - base < block_numel ? end - base : block_numel;
        while (s < t.segment_count && t.segments[s].stop <= base) ++s;
        if (s == t.segment_count) return;
        const Segment& segment = t.segments[s];
        if (segment.start >= base + count) continue;
        if (segment.start > base || segment.stop < base + block_numel || count < block_numel) {
            loop.update_parts(t, s, block, base, count);
        } else {
            count = ((segment.stop < end ? segment.stop : end) - base) / block_numel * block_numel;
            loop.fill_dither(block, 0, block_numel, segment.c.key);
            loop.update_blocks(segment.c, block, base, count);
        }
    }
}
