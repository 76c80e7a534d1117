// Kernels for the benchmark that move the bytes of an Adam update without computing, to measure what memory allows.
// They are compiled with ZERO_OPTIM_ROOFLINE=ON only. They use the same parts, threads and prefetches as the update,
// and plain stores of whole vectors. They leave out the scales of 8-bit moments, which are 8 bytes in 256 elements.
// Every value is stored as it was loaded, or-ed with a zero that the compiler does not know, so running one on a real
// buffer changes nothing. Included in an anonymous namespace.

constexpr std::int64_t touched_numel = 64;  // at least one whole vector of every stream

template <class V, int Bytes> ZERO_OPTIM_INLINE void touch(void* base, std::int64_t i, std::uint32_t zero) {
    if constexpr (Bytes > 0) {
        char* p = static_cast<char*>(base) + Bytes * i;
        for (std::int64_t k = 0; k < touched_numel; k += group_numel) prefetch_group<Bytes>(base, i + k);
        for (std::int64_t k = 0; k < Bytes * touched_numel; k += 4 * V::width) {
            const typename V::I x = V::ior(V::load_i32(reinterpret_cast<const std::uint32_t*>(p + k)), V::seti(zero));
            V::store(reinterpret_cast<float*>(p + k), V::from_bits(x));
        }
    }
}

template <class V, int Bytes> ZERO_OPTIM_INLINE typename V::I look(const void* base, std::int64_t i) {
    const char* p = static_cast<const char*>(base) + Bytes * i;
    typename V::I seen = V::seti(0u);
    for (std::int64_t k = 0; k < touched_numel; k += group_numel) prefetch_group<Bytes>(base, i + k);
    for (std::int64_t k = 0; k < Bytes * touched_numel; k += 4 * V::width) {
        seen = V::ior(seen, V::load_i32(reinterpret_cast<const std::uint32_t*>(p + k)));
    }
    return seen;
}

// Bytes of an element of each stream; 0: there is none.
template <class V, int Parameter, int Master, int A, int B, int Gradient>
void roofline_of(const Item& t, std::int64_t begin, std::int64_t end) {
    volatile std::uint32_t hidden = 0;
    const std::uint32_t zero = hidden;
    const Item own = t;
    typename V::I seen = V::seti(0u);
    for (std::int64_t i = begin; i + touched_numel <= end; i += touched_numel) {
        seen = V::ior(seen, look<V, Gradient>(own.gradient, i));
        touch<V, Parameter>(own.parameter, i, zero);
        touch<V, Master>(own.master, i, zero);
        touch<V, A>(own.state[0], i, zero);
        touch<V, B>(own.state[1], i, zero);
    }
    volatile int sink = V::count(V::ieq(seen, V::seti(0u)));
    (void)sink;
}

template <class V, int M, int A, int B, int Gradient>
void roofline(const Item& t, std::int64_t begin, std::int64_t end) {
    if constexpr (M == int(Master::split)) roofline_of<V, 2, 2, A, B, Gradient>(t, begin, end);
    else if (t.parameter_dtype == DType::f32) roofline_of<V, 4, 0, A, B, Gradient>(t, begin, end);
    else roofline_of<V, 2, 4, A, B, Gradient>(t, begin, end);  // the parameter is written only; here it is read too
}

template <class V, int M, int Gradient> void fill_roofline_of(Table& t, DType gradient) {
    t.roofline[M][0][int(gradient)] = roofline<V, M, 4, 4, Gradient>;
    t.roofline[M][1][int(gradient)] = roofline<V, M, 2, 4, Gradient>;
    t.roofline[M][2][int(gradient)] = roofline<V, M, 1, 1, Gradient>;
}

template <class V, int M> void fill_roofline_master(Table& t) {
    fill_roofline_of<V, M, 4>(t, DType::f32);
    fill_roofline_of<V, M, 2>(t, DType::bf16);
    fill_roofline_of<V, M, 2>(t, DType::f16);
}

template <class V> void fill_roofline(Table& t) {
    fill_roofline_master<V, int(Master::full)>(t);
    fill_roofline_master<V, int(Master::split)>(t);
}
