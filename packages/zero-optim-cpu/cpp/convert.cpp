#include "convert.hpp"

namespace zero_optim {
namespace {
#include "kernels.hpp"

template <class Stream> void put(const Stream& to, const float* values, std::int64_t i, std::int64_t end) {
    for (; i < end; ++i) to.template store<Scalar, 1>(i, {values[i]});
}
template <class Stream> void get(float* values, const Stream& from, std::int64_t i, std::int64_t end) {
    for (; i < end; ++i) values[i] = from.template load<Scalar>(i);
}

// To the nearest code, block by block.
template <bool Signed>
void put_codes(const Code<Signed>& to, float* scales, const float* values, std::int64_t begin, std::int64_t end) {
    for (std::int64_t base = begin; base < end; base += block_numel) {
        const std::int64_t stop = end - base < block_numel ? end : base + block_numel;
        std::uint16_t words[block_numel] = {};
        std::uint8_t codes[block_numel];
        for (std::int64_t i = base; i < stop; ++i) words[i - base] = word_of(values[i], dither_nearest);
        const float scale = scales[base / block_numel] = scale_of(largest_of<Scalar, Signed>(words), words);
        store_block<Scalar, Signed>(codes, words, scale);
        for (std::int64_t i = base; i < stop; ++i) to.p[i] = codes[i - base];
    }
}

template <bool Signed>
void get_codes(float* values, const Code<Signed>& from, const float* scales, std::int64_t i, std::int64_t end) {
    for (; i < end; ++i) values[i] = value_of(from.load(i, Code<Signed>::offset_of(scales[i / block_numel])));
}

}  // namespace

void encode_master(const float* values, const Item& item, Master master, std::int64_t i, std::int64_t end) {
    if (master == Master::full) {
        const Full full = Full::of(item);
        for (; i < end; ++i) full.store<Scalar, 1>(i, {values[i]}, Coefficients{});
    } else {
        const Split split = Split::of(item);
        for (; i < end; ++i) {
            const std::uint32_t b = Scalar::bits(values[i]);
            split.high[i] = std::uint16_t((b + 0x8000u) >> 16);
            split.low[i] = std::uint16_t(b);
        }
    }
}

void decode_master(float* values, const Item& item, Master master, std::int64_t i, std::int64_t end) {
    if (master == Master::full) get(values, Full::of(item), i, end);
    else get(values, Split::of(item), i, end);
}

void encode_moment(const float* values, const Item& item, int k, Moments moments, std::int64_t i, std::int64_t end) {
    if (moments == Moments::byte8) {
        if (k == 0) put_codes(stream_of<SignedCode>(item.state[0]), item.scale[0], values, i, end);
        else put_codes(stream_of<UnsignedCode>(item.state[1]), item.scale[1], values, i, end);
    } else if (moments == Moments::bf16 && k == 0) {
        put(stream_of<Bf16>(item.state[0]), values, i, end);
    } else {
        put(stream_of<F32>(item.state[k]), values, i, end);
    }
}

void decode_moment(float* values, const Item& item, int k, Moments moments, std::int64_t i, std::int64_t end) {
    if (moments == Moments::byte8) {
        if (k == 0) get_codes(values, stream_of<SignedCode>(item.state[0]), item.scale[0], i, end);
        else get_codes(values, stream_of<UnsignedCode>(item.state[1]), item.scale[1], i, end);
    } else if (moments == Moments::bf16 && k == 0) {
        get(values, stream_of<Bf16>(item.state[0]), i, end);
    } else {
        get(values, stream_of<F32>(item.state[k]), i, end);
    }
}

}  // namespace zero_optim
