// The update loop over one item with fp32 or bf16 moments: every rule x master x gradient type. 8-bit ones have
// coded_body.hpp. Included in an anonymous namespace.

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
        const Plain self = *this;  // a local copy, which no store can alias
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
