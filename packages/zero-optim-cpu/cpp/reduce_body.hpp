// Accumulate, squared norm, non-finite count. Included in an anonymous namespace.

template <class V, DType D> void accumulate(float* into, const void* values, std::int64_t i, std::int64_t end) {
    using G = typename GradientOf<D>::type;
    const G from = stream_of<G>(values);
    for (; i + group_numel <= end; i += group_numel) {
        F32{into}.ahead(i);
        from.ahead(i);
        for (std::int64_t k = i; k < i + group_numel; k += V::width) {
            V::store(into + k, V::add(V::load(into + k), from.template load<V>(k)));
        }
    }
    for (; i < end; ++i) into[i] = Scalar::add(into[i], from.template load<Scalar>(i));
}

// The sixteen lanes of a sum of squares for the scalar unit; the wider ones have theirs beside their vectors.
struct ScalarSquares {
    double lane[16] = {};
    template <int First> void add(float x) { lane[First] += double(x) * double(x); }
    void store(double* out) const {
        for (int k = 0; k < 16; ++k) out[k] = lane[k];
    }
};
template <class V> struct SquaresOf { using type = typename V::Squares; };
template <> struct SquaresOf<Scalar> { using type = ScalarSquares; };

template <class V, class G, int First, class Sum> void add_squares(Sum& sum, const G& from, std::int64_t i) {
    if constexpr (First < 16) {
        sum.template add<First>(from.template load<V>(i + First));
        add_squares<V, G, First + V::width>(sum, from, i);
    }
}

// Element i goes to lane i % 16; the lanes are added in pairs 8, 4, 2, 1 apart. A square of a float is exact in double.
template <class V, DType D> double norm_squared(const void* values, std::int64_t begin, std::int64_t end) {
    using G = typename GradientOf<D>::type;
    const G from = stream_of<G>(values);
    typename SquaresOf<V>::type sum;
    std::int64_t i = begin;
    for (; i + group_numel <= end; i += group_numel) {
        from.ahead(i);
        add_squares<V, G, 0>(sum, from, i);
        add_squares<V, G, 0>(sum, from, i + 16);
    }
    double lane[16];
    sum.store(lane);
    for (std::int64_t k = i; k < end; ++k) {
        const double x = double(from.template load<Scalar>(k));
        lane[(k - i) % 16] += x * x;
    }
    for (int apart = 8; apart > 0; apart /= 2) {
        for (int k = 0; k < apart; ++k) lane[k] += lane[k + apart];
    }
    return lane[0];
}

template <class V, DType D> std::int64_t count_nonfinite(const void* values, std::int64_t i, std::int64_t end) {
    using G = typename GradientOf<D>::type;
    const G from = stream_of<G>(values);
    const typename V::I exponent = V::seti(0x7f800000u);
    std::int64_t count = 0;
    for (; i + V::width <= end; i += V::width) {
        count += V::count(V::ieq(V::iand(V::bits(from.template load<V>(i)), exponent), exponent));
    }
    for (; i < end; ++i) count += (Scalar::bits(from.template load<Scalar>(i)) & 0x7f800000u) == 0x7f800000u;
    return count;
}
