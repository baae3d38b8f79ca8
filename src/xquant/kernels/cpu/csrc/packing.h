// Packs codes of 1 to 8 bits into bytes, and unpacks them: `quant.pack.pack` and `unpack`, bit for bit.
//
// The unit is a strip, a matrix of codes [length][64] that is packed along its length, so that 64 codes are handled
// at a time. A tile of codes, [K / 4][16][4], is one strip; where codes are in rows, a strip is 64 channels of all
// tokens. A width is a sum of planes of 8, 4, 2 and 1 bits (docs/format.md): 3 bits are planes of 1 and 2 bits.
#pragma once
#include "elements.h"

namespace {

constexpr int STRIP = 64;

// Writes the planes of a strip: byte row i of a plane of w bits holds rows i + j * rows of the codes, j < 8 / w.
// `codes` has up to 7 rows of zeros from `length` on. A row of bytes is `width` wide, and rows are `stride` apart.
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

// The inverse of pack_strip. It writes up to 7 rows of `codes` past `length`.
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
