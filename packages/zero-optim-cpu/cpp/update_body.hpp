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

// [Note: flight]  Square root and division take 22 of an AVX-512 vector's 25 cycles (Cascade Lake, fp32), on one unit. A
// processor looks some 200 instructions ahead, which is one group of four vectors: written one group after the other,
// that unit waits for loads and stores. So a group's update is divided out while the next one is loaded:
//
//   begin(0)   divide(0) begin(1) end(0)   divide(1) begin(2) end(1)   …   divide(n) end(n)
//
// begin: load, new moments, root; divide: the update; end: apply it to the parameter, store that.

// N vectors between `begin` and `end`.
template <class V, int N> struct Flight {
    typename V::F p[N], g[N], a[N], root[N];
};

template <int N, class V, class Rule>
ZERO_OPTIM_INLINE void divide(const Rule& rule, const Flight<V, N>& f, typename V::F (&update)[N]) {
    each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
        update[k.value] = rule.update(f.g[k.value], f.a[k.value], f.root[k.value]);
    });
}

// `body` has begin and end; [i, last) is a whole number of groups of N vectors.
template <int N, class V, class Rule, class Body>
ZERO_OPTIM_INLINE void fly(const Rule& rule, const Body& body, std::int64_t i, std::int64_t last) {
    if (i >= last) return;
    Flight<V, N> flight;
    typename V::F update[N], p[N];
    body.begin(i, flight);
    for (;;) {
        divide<N, V>(rule, flight, update);
        each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { p[k.value] = flight.p[k.value]; });
        const std::int64_t next = i + N * V::width;
        if (next >= last) break;
        body.begin(next, flight);
        rule.apply(p, update);
        body.end(i, p);
        i = next;
    }
    rule.apply(p, update);
    body.end(i, p);
}

// ---- fp32 and bf16 moments: one loop a segment -------------------------------------------------------------------

template <template <class> class R, class MasterStream, class G, class A, class B> struct Plain {
    MasterStream master;
    G gradient;
    A a;
    B b;

    ZERO_OPTIM_INLINE void ahead(std::int64_t i, std::int64_t numel) const {
        for (std::int64_t k = i; k < i + numel; k += group_numel) {
            master.ahead(k);
            gradient.ahead(k);
            a.ahead(k);
            b.ahead(k);
        }
    }

    template <class V, int N> struct Body {
        const Plain& of;
        const R<V>& rule;
        const Coefficients& c;

        ZERO_OPTIM_INLINE void begin(std::int64_t i, Flight<V, N>& f) const {
            if constexpr (N * V::width >= group_numel) of.ahead(i, N * V::width);
            typename V::F y[N];
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
                const std::int64_t at = i + k.value * V::width;
                f.p[k.value] = of.master.template load<V>(at);
                f.g[k.value] = V::mul(of.gradient.template load<V>(at), V::set(c.scale));
                f.a[k.value] = of.a.template load<V>(at);
                y[k.value] = of.b.template load<V>(at);
            });
            rule.moments(f.p, f.g, f.a, y);
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { f.root[k.value] = rule.root(y[k.value]); });
            of.a.template store<V>(i, f.a);
            of.b.template store<V>(i, y);
        }
        ZERO_OPTIM_INLINE void end(std::int64_t i, const typename V::F (&p)[N]) const {
            of.master.template store<V>(i, p, c);
        }
    };

    // Whole groups of N vectors of [i, end); where they stop.
    template <class V, int N> std::int64_t groups(const Coefficients& c, std::int64_t i, std::int64_t end) const {
        const std::int64_t last = i + (end - i) / (N * V::width) * (N * V::width);
        const Plain self = *this;  // what no store can be thought to change
        const Coefficients own = c;
        const R<V> rule(own);
        fly<N, V>(rule, Body<V, N>{self, rule, own}, i, last);
        return last;
    }

    template <class V> void range(const Coefficients& c, std::int64_t i, std::int64_t end) const {
        i = groups<V, V::phased>(c, i, end);
        if constexpr (V::phased > 1) i = groups<V, 1>(c, i, end);
        groups<Scalar, 1>(c, i, end);
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

// ---- 8-bit moments: strips of blocks -------------------------------------------------------------------------------
//
// Whole blocks of one segment are taken four at a time: decoded and updated, their new moments left in the first-level
// cache, then encoded with each block's new largest value as its scale. A block that segments cover in part goes alone;
// what lies in no segment keeps its value to the nearest code of the new scale.

constexpr std::int64_t strip_blocks = 4, strip_numel = strip_blocks * block_numel;

struct Strip {
    alignas(64) float a[strip_numel];
    alignas(64) float b[strip_numel];
    alignas(64) std::uint32_t shift_a[block_numel];  // dithers less the codes' origins
    alignas(64) std::uint32_t shift_b[block_numel];
    float unit_a[strip_blocks], unit_b[strip_blocks];

    void set_dither(std::int64_t k, std::uint32_t dither) {
        shift_a[k] = dither - SignedCode::origin;
        shift_b[k] = (dither ^ 0xfffffu) - UnsignedCode::origin;
    }
    void fill_dither(std::int64_t k, std::int64_t stop, std::uint32_t key) {
        for (; k < stop; ++k) set_dither(k, dither_of(std::uint32_t(k), key));
    }
};

inline float inverse_of(float largest) { return largest >= smallest_scale ? top_up / largest : 0.0f; }

// Of `count` magnitudes; NaN is left out.
template <class V> ZERO_OPTIM_INLINE float largest_of(const float* x, std::int64_t count) {
    typename V::F most[4];
    each<4>([&](auto n) ZERO_OPTIM_INLINE_LAMBDA { most[n.value] = V::set(0.0f); });
    std::int64_t k = 0;
    for (; k + 4 * V::width <= count; k += 4 * V::width) {
        each<4>([&](auto n) ZERO_OPTIM_INLINE_LAMBDA {
            most[n.value] = V::max_magnitude(V::load(x + k + n.value * V::width), most[n.value]);
        });
    }
    float result = V::reduce_max(V::max(V::max(most[0], most[1]), V::max(most[2], most[3])));
    for (; k < count; ++k) result = Scalar::max_magnitude(x[k], result);
    return result;
}

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

    // Offsets count from the strip's first element, `base`; new moments go to the strip, all else to memory.
    template <class W, int N> struct Body {
        const Coded& of;
        const R<W>& rule;
        const Coefficients& c;
        Strip& strip;
        std::int64_t base;

        ZERO_OPTIM_INLINE void begin(std::int64_t i, Flight<W, N>& f) const {
            if constexpr (N * W::width >= group_numel) of.ahead(base + i, N * W::width);
            const typename W::F unit_a = W::set(strip.unit_a[i / block_numel]);
            const typename W::F unit_b = W::set(strip.unit_b[i / block_numel]);
            typename W::F y[N];
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA {
                const std::int64_t at = base + i + k.value * W::width;
                f.p[k.value] = of.master.template load<W>(at);
                f.g[k.value] = W::mul(of.gradient.template load<W>(at), W::set(c.scale));
                f.a[k.value] = y[k.value] = W::set(0.0f);
                if constexpr (has_a) f.a[k.value] = of.a.template load<W>(at, unit_a);
                if constexpr (has_b) y[k.value] = of.b.template load<W>(at, unit_b);
            });
            rule.moments(f.p, f.g, f.a, y);
            each<N>([&](auto k) ZERO_OPTIM_INLINE_LAMBDA { f.root[k.value] = rule.root(y[k.value]); });
            if constexpr (has_a) F32{strip.a}.template store<W>(i, f.a);
            if constexpr (has_b) F32{strip.b}.template store<W>(i, y);
        }
        ZERO_OPTIM_INLINE void end(std::int64_t i, const typename W::F (&p)[N]) const {
            of.master.template store<W>(base + i, p, c);
        }
    };

    ZERO_OPTIM_INLINE void ahead(std::int64_t i, std::int64_t numel) const {
        for (std::int64_t k = i; k < i + numel; k += group_numel) {
            master.ahead(k);
            gradient.ahead(k);
        }
        if constexpr (has_a) prefetch_group<1>(a.p, i);
        if constexpr (has_b) prefetch_group<1>(b.p, i);
    }

    // Elements [k, stop) of the strip.
    void update(const Coefficients& c, Strip& strip, std::int64_t base, std::int64_t k, std::int64_t stop) const {
        const std::int64_t last = k + (stop - k) / together * together;
        const Coded self = *this;  // what no store can be thought to change
        const Coefficients own = c;
        const R<V> rule(own);
        fly<V::phased, V>(rule, Body<V, V::phased>{self, rule, own, strip, base}, k, last);
        const R<Scalar> scalar_rule(own);
        fly<1, Scalar>(scalar_rule, Body<Scalar, 1>{self, scalar_rule, own, strip, base}, last, stop);
    }

    template <class W, int N, class Code>
    ZERO_OPTIM_INLINE void encode(const Code& code, const float* from, const std::uint32_t* shifts, std::int64_t base,
                                  std::int64_t k, float inverse) const {
        typename W::F x[N];
        typename W::I shift[N];
        each<N>([&](auto n) ZERO_OPTIM_INLINE_LAMBDA {
            x[n.value] = W::load(from + k + n.value * W::width);
            shift[n.value] = W::load_i32(shifts + k + n.value * W::width);
        });
        code.template store<W>(base + k, x, inverse, shift);
    }

    // What to multiply the block's values by; its scale goes to memory.
    ZERO_OPTIM_INLINE static float rescale(float* scales, const float* from, std::int64_t base, std::int64_t count) {
        const float largest = largest_of<V>(from, count), inverse = inverse_of(largest);
        scales[base / block_numel] = inverse == 0.0f ? 0.0f : largest;
        return inverse;
    }

    template <class Code>
    ZERO_OPTIM_INLINE void encode_block(const Code& code, const float* from, const std::uint32_t* shifts,
                                        std::int64_t base, std::int64_t count, float inverse) const {
        std::int64_t k = 0;
        for (; k + together <= count; k += together) encode<V, V::phased>(code, from, shifts, base, k, inverse);
        for (; k < count; ++k) encode<Scalar, 1>(code, from, shifts, base, k, inverse);
    }

    // All scales before all codes: they are long chains of few instructions, which overlap.
    void finish(const Strip& strip, std::int64_t base, std::int64_t count) const {
        const Coded self = *this;
        float to_a[strip_blocks], to_b[strip_blocks];
        for (std::int64_t k = 0; k < count; k += block_numel) {
            const std::int64_t numel = count - k < block_numel ? count - k : block_numel;
            if constexpr (has_a) to_a[k / block_numel] = rescale(self.scale_a, strip.a + k, base + k, numel);
            if constexpr (has_b) to_b[k / block_numel] = rescale(self.scale_b, strip.b + k, base + k, numel);
        }
        for (std::int64_t k = 0; k < count; k += block_numel) {
            const std::int64_t at = base + k, numel = count - k < block_numel ? count - k : block_numel;
            const std::int64_t n = k / block_numel;
            if constexpr (has_a) self.encode_block(self.a, strip.a + k, strip.shift_a, at, numel, to_a[n]);
            if constexpr (has_b) self.encode_block(self.b, strip.b + k, strip.shift_b, at, numel, to_b[n]);
        }
    }

    void read_units(Strip& strip, std::int64_t base, std::int64_t count) const {
        for (std::int64_t k = 0; k * block_numel < count; ++k) {
            strip.unit_a[k] = has_a ? scale_a[base / block_numel + k] / top : 0.0f;
            strip.unit_b[k] = has_b ? scale_b[base / block_numel + k] / top : 0.0f;
        }
    }

    // A block that the segments from `s` on cover in part.
    void update_parts(const Item& t, std::int64_t s, Strip& strip, std::int64_t base, std::int64_t count) const {
        for (std::int64_t k = 0; k < count; ++k) {
            if constexpr (has_a) strip.a[k] = a.template load<Scalar>(base + k, strip.unit_a[0]);
            if constexpr (has_b) strip.b[k] = b.template load<Scalar>(base + k, strip.unit_b[0]);
            strip.set_dither(k, dither_nearest);
        }
        for (; s < t.segment_count && t.segments[s].start < base + count; ++s) {
            const std::int64_t start = t.segments[s].start > base ? t.segments[s].start - base : 0;
            const std::int64_t stop = t.segments[s].stop < base + count ? t.segments[s].stop - base : count;
            strip.fill_dither(start, stop, t.segments[s].c.key);
            update(t.segments[s].c, strip, base, start, stop);
        }
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
    Strip strip;
    std::int64_t dithered = -1;  // segment that all of the strip's dithers are of
    std::int64_t s = first_segment(t, begin), count;
    for (std::int64_t base = begin; base < end; base += count) {
        count = end - base < block_numel ? end - base : block_numel;
        while (s < t.segment_count && t.segments[s].stop <= base) ++s;
        if (s == t.segment_count) return;
        const Segment& segment = t.segments[s];
        if (segment.start >= base + count) continue;
        if (segment.start > base || segment.stop < base + count) {
            loop.read_units(strip, base, count);
            loop.update_parts(t, s, strip, base, count);
            dithered = -1;
        } else {
            const std::int64_t room = (segment.stop < end ? segment.stop : end) - base;
            if (room >= block_numel) count = room < strip_numel ? room / block_numel * block_numel : strip_numel;
            if (dithered != s) strip.fill_dither(0, block_numel, segment.c.key);
            dithered = s;
            loop.read_units(strip, base, count);
            loop.update(segment.c, strip, base, 0, count);
        }
        loop.finish(strip, base, count);
    }
}
