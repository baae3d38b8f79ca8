// Blocks [n, C] between rows of floats and packed codes: what sealing and decoding share.
//
// Codes are packed in strips, matrices [length][64] packed along their length. Where codes are in tiles a
// strip is a tile, [K / 4][16][4]; in rows it is 64 channels of all tokens.
#pragma once
#include "elements.h"

namespace {

constexpr float FP16_MAX = 65504;
constexpr int STRIP = 64;

template <int DTYPE>
inline Floats load_as(const void* p, int64_t i) {
    if constexpr (DTYPE == XQ_FLOAT32) return load_floats((const float*)p + i);
    if constexpr (DTYPE == XQ_BFLOAT16) return load_bf16((const uint16_t*)p + i);
    if constexpr (DTYPE == XQ_FLOAT16) return load_fp16((const uint16_t*)p + i);
}
// The first repeated, where there are fewer than 16.
template <int DTYPE>
inline Floats load_as(const void* p, int64_t i, int count) {
    if (count >= 16) return load_as<DTYPE>(p, i);
    alignas(64) float x[16];
    for (int j = 0; j < 16; j++) x[j] = load_element(p, DTYPE, i + (j < count ? j : 0));
    return load_floats(x);
}
template <int DTYPE>
inline void store_as(void* p, int64_t i, Floats a, int count) {
    if (count >= 16) {
        if constexpr (DTYPE == XQ_FLOAT32) store_floats((float*)p + i, a);
        if constexpr (DTYPE == XQ_BFLOAT16) store_bf16((uint16_t*)p + i, a);
        if constexpr (DTYPE == XQ_FLOAT16) store_fp16((uint16_t*)p + i, a);
        return;
    }
    alignas(64) float x[16];
    store_floats(x, a);
    for (int j = 0; j < count; j++) store_element(p, DTYPE, i + j, x[j]);
}

// NaN stays: both instructions give their second operand where one is NaN.
inline Floats clamp_to_fp16(Floats x) {
    return minimum(broadcast_float(FP16_MAX), maximum(broadcast_float(-FP16_MAX), x));
}

// Codes of a strip to its planes: row i of a plane of w bits holds rows i + j * rows, j < 8 / w. Rows from
// `length` on, up to 7, are zeros. `width` bytes of a row are written, and rows are `stride` apart.
template <int BITS, int SHIFT = 0>
void pack_strip(const uint8_t* codes, int length, uint8_t* out, ptrdiff_t stride, int width) {
    constexpr int WIDTH = lowest_plane(BITS);
    const int rows = (length * WIDTH + 7) / 8;
    const Words mask = broadcast16((int16_t)(((1 << WIDTH) - 1) * 0x0101));
    for (int i = 0; i < rows; i++, out += stride) {
        Words byte = zero_words();
        unroll<8 / WIDTH>([&](auto j) {
            const Words code = load(codes + (size_t)(i + j * rows) * STRIP);
            byte = byte | shift_left16<j * WIDTH>(shift_right16<SHIFT>(code) & mask);
        });
        if (width == STRIP) {
            store(out, byte);
        } else {
            uint8_t bytes[STRIP];
            store(bytes, byte);
            std::memcpy(out, bytes, width);
        }
    }
    if constexpr (BITS > WIDTH) pack_strip<BITS - WIDTH, SHIFT + WIDTH>(codes, length, out, stride, width);
}

// The inverse; up to 7 rows from `length` on are written too.
template <int BITS, int SHIFT = 0>
void unpack_strip(const uint8_t* packed, int length, uint8_t* codes, ptrdiff_t stride, int width) {
    constexpr int WIDTH = lowest_plane(BITS);
    const int rows = (length * WIDTH + 7) / 8;
    const Words mask = broadcast16((int16_t)(((1 << WIDTH) - 1) * 0x0101));
    for (int i = 0; i < rows; i++, packed += stride) {
        Words byte;
        if (width == STRIP) {
            byte = load(packed);
        } else {
            uint8_t bytes[STRIP] = {};
            std::memcpy(bytes, packed, width);
            byte = load(bytes);
        }
        unroll<8 / WIDTH>([&](auto j) {
            uint8_t* at = codes + (size_t)(i + j * rows) * STRIP;
            Words code = shift_left16<SHIFT>(shift_right16<j * WIDTH>(byte) & mask);
            if (SHIFT > 0) code = code | load(at);
            store(at, code);
        });
    }
    if constexpr (BITS > WIDTH) unpack_strip<BITS - WIDTH, SHIFT + WIDTH>(packed, length, codes, stride, width);
}

using PackStrip = void (*)(const uint8_t*, int, uint8_t*, ptrdiff_t, int);
template <int... B>
PackStrip pick_pack_strip(int bits, std::integer_sequence<int, B...>) {
    static constexpr PackStrip all[] = {pack_strip<B + 1>...};
    return all[bits - 1];
}
template <int... B>
PackStrip pick_unpack_strip(int bits, std::integer_sequence<int, B...>) {
    static constexpr PackStrip all[] = {unpack_strip<B + 1>...};
    return all[bits - 1];
}
inline PackStrip pick_pack_strip(int bits) { return pick_pack_strip(bits, std::make_integer_sequence<int, 8>()); }
inline PackStrip pick_unpack_strip(int bits) { return pick_unpack_strip(bits, std::make_integer_sequence<int, 8>()); }

}  // namespace
