// The streams of an update, moved and not computed with: what the memory allows a kernel of that layout.
// Every value is stored as it was loaded, or-ed with a zero that the compiler does not know, so running it on a real
// buffer changes nothing. Included in an anonymous namespace.

template <class V, int Bytes> typename V::I load_raw(const char* p, std::int64_t i) {
    if constexpr (Bytes == 4) return V::load_i32(reinterpret_cast<const std::uint32_t*>(p) + i);
    else if constexpr (Bytes == 2) return V::load_u16(reinterpret_cast<const std::uint16_t*>(p) + i);
    else return V::load_u8(reinterpret_cast<const std::uint8_t*>(p) + i);
}

template <class V, int Bytes> void store_raw(char* p, std::int64_t i, typename V::I x) {
    if constexpr (Bytes == 4) V::store(reinterpret_cast<float*>(p) + i, V::from_bits(x));
    else if constexpr (Bytes == 2) V::store_u16(reinterpret_cast<std::uint16_t*>(p) + i, x);
    else V::store_u8(reinterpret_cast<std::uint8_t*>(p) + i, x);
}

template <class V, int Bytes> void touch(void* base, std::int64_t i, std::uint32_t zero) {
    if constexpr (Bytes > 0) {
        char* p = static_cast<char*>(base);
        prefetch(p, Bytes * i, Bytes == 4 ? prefetch_bytes_fp32 : prefetch_bytes);
        if (Bytes == 4) prefetch(p, Bytes * i + 64, prefetch_bytes_fp32);
        for (std::int64_t k = i; k < i + group_numel; k += V::width) {
            store_raw<V, Bytes>(p, k, V::ior(load_raw<V, Bytes>(p, k), V::seti(zero)));
        }
    }
}

template <class V, int Parameter, int Master, int A, int B, int Gradient>
void roofline(const Item& t, std::int64_t begin, std::int64_t end) {
    volatile std::uint32_t hidden = 0;
    const std::uint32_t zero = hidden;
    const char* gradient = static_cast<const char*>(t.gradient);
    typename V::I seen = V::seti(0u);
    for (std::int64_t i = begin; i + group_numel <= end; i += group_numel) {
        prefetch(gradient, Gradient * i, Gradient == 4 ? prefetch_bytes_fp32 : prefetch_bytes);
        if (Gradient == 4) prefetch(gradient, Gradient * i + 64, prefetch_bytes_fp32);
        for (std::int64_t k = i; k < i + group_numel; k += V::width) {
            seen = V::ior(seen, load_raw<V, Gradient>(gradient, k));
        }
        touch<V, Parameter>(t.parameter, i, zero);
        touch<V, Master>(t.master, i, zero);
        touch<V, A>(t.state[0], i, zero);
        touch<V, B>(t.state[1], i, zero);
    }
    volatile int sink = V::count(V::ieq(seen, V::seti(0u)));
    (void)sink;
}
