// Products with tiles whose codes become int16 first: keys before RoPE, which are turned, and levels of codebooks.
#pragma once
#include "tiles.h"

namespace {

// How a code becomes an int16: moved up until 15 bits are full (affine), or looked up in a table (codebook).
enum { SHIFTED, LOOKED_UP };

// Writes the codes of one tile as int16, Words [K / 2].
template <int BITS, int FORM>
void codes_to_int16(const uint8_t* codes, int k_size, Table table, Words* out, ptrdiff_t ahead) {
    const int units = k_size / 32;
    for (int r = 0; r < units; r++) {
        for (int line = 0; line < BITS; line++) prefetch(codes + (size_t)(r * BITS + line) * 64 + ahead);
        unroll<8>([&](auto k) {
            unroll<2>([&](auto odd) {
                Words code = unpack<BITS>(codes, units, r, k, odd);
                if constexpr (FORM == LOOKED_UP)
                    code = look_up(table, code);
                else
                    code = shift_left16<15 - BITS>(code);
                out[(r * 8 + k) * 2 + odd] = code;
            });
        });
    }
}

// The same of the rest in bytes, [quads][64].
inline void rest_to_int16(const uint8_t* codes, int quads, int bits, bool looked_up, Table table, Words* out) {
    for (int quad = 0; quad < quads; quad++)
        for (int odd = 0; odd < 2; odd++) {
            const Words code = rest_codes(codes, quad, odd);
            out[quad * 2 + odd] = looked_up ? look_up(table, code) : shift_left16_by(code, 15 - bits);
        }
}

// The highest int16 in keys, in keys after RoPE (a rotation can make them larger by the root of 2), and in values, for
// dot_int16 and dot_rotated. They sum 16 products in 32 bits before they go on in floats, so a bit more for one factor
// is a bit less for the other. At these limits the rounding errors of both are about equal.
constexpr float KEY_LIMIT = 13000, ROTATED_LIMIT = 18400, VALUE_LIMIT = 8191;
inline float highest_int16_weight(float limit) { return highest_weight(16, limit); }

// As dot_codes, with int16 that codes_to_int16 made, [T][K / 2], in place of codes.
template <int ROWS, int T>
void dot_int16(const Words* words, int k_size, const int16_t* weights, const float* steps, const float* bias,
               float* out, size_t out_stride) {
    for (int n = 0; n < ROWS; n++)
        for (int t = 0; t < T; t++) {
            float* to = out + n * out_stride + t * 16;
            store_floats(to, load_floats(to) + broadcast_float(bias[n]));
        }
    const int units = k_size / 32;
    for (int r = 0; r < units; r++, weights += 8 * ROWS * 4) {
        Words acc[ROWS][T];
        unroll<8>([&](auto k) {
            if (k % 4 == 0)
                for (int n = 0; n < ROWS; n++)
                    for (int t = 0; t < T; t++) acc[n][t] = zero_words();
            unroll<2>([&](auto odd) {
                Words word[T];
                for (int t = 0; t < T; t++) word[t] = words[(size_t)t * (k_size / 2) + (r * 8 + k) * 2 + odd];
                for (int n = 0; n < ROWS; n++) {
                    Words weight = broadcast(pair_at(weights, (k * ROWS + n) * 2 + odd));
                    for (int t = 0; t < T; t++) acc[n][t] = dot16(acc[n][t], word[t], weight);
                }
            });
            if (k % 4 == 3)
                for (int n = 0; n < ROWS; n++)
                    for (int t = 0; t < T; t++) add_scaled(out + n * out_stride + t * 16, acc[n][t], steps[n]);
        });
    }
    for (int quad = units * 8; quad < k_size / 4; quad += 2, weights += 2 * ROWS * 4) {
        Words acc[ROWS][T];
        for (int n = 0; n < ROWS; n++)
            for (int t = 0; t < T; t++) acc[n][t] = zero_words();
        unroll<4>([&](auto i) {
            Words word[T];
            for (int t = 0; t < T; t++) word[t] = words[(size_t)t * (k_size / 2) + quad * 2 + i];
            for (int n = 0; n < ROWS; n++) {
                const Words weight = broadcast(pair_at(weights, (i / 2 * ROWS + n) * 2 + i % 2));
                for (int t = 0; t < T; t++) acc[n][t] = dot16(acc[n][t], word[t], weight);
            }
        });
        for (int n = 0; n < ROWS; n++)
            for (int t = 0; t < T; t++) add_scaled(out + n * out_stride + t * 16, acc[n][t], steps[n]);
    }
}

// How codes become rotated keys: an int16 scale and zero of every channel, as pairs in the order of the quads, and the
// part of the rope table (xq_rope_table) for the positions of a tile, [K / 8][2][cos, sin][16][2].
struct KeyDecoding {
    const int32_t *scale, *zero;  // [K / 2]
    const int16_t* table;
};

// Decodes and rotates the codes of two channels that are half a head apart, of one tile.
inline __attribute__((always_inline)) void decode_pair(Words low, Words high, Words scale_a, Words scale_b,
                                                       Words zero_a, Words zero_b, const int16_t* rotation, Words& a,
                                                       Words& b) {
    low = add16(multiply_q15(low, scale_a), zero_a);
    high = add16(multiply_q15(high, scale_b), zero_b);
    const Words cos = load(rotation), sin = load(rotation + 32);
    a = sub16(multiply_q15(low, cos), multiply_q15(high, sin));
    b = add16(multiply_q15(high, cos), multiply_q15(low, sin));
}

// dot_int16 of keys before RoPE: decodes and rotates affine codes in registers, the two channels of a rotation at a
// time.
template <int BITS, int ROWS, int T>
void dot_rotated(const uint8_t* codes, int k_size, KeyDecoding decoding, const int16_t* weights, const float* steps,
                 float* out, size_t out_stride, ptrdiff_t ahead) {
    const int units = k_size / 32;
    const size_t tile = tile_bytes(k_size, BITS), table_size = (size_t)k_size * 16;
    const int16_t* table = decoding.table;
    for (int r = 0; r < units; r++, weights += 8 * ROWS * 4, table += 8 * 64) {
        for (int t = 0; t < T; t++)
            for (int line = 0; line < BITS; line++) prefetch(codes + t * tile + (size_t)(r * BITS + line) * 64 + ahead);
        const int32_t *scale = decoding.scale + r * 16, *zero = decoding.zero + r * 16;
        Words acc[ROWS][T];
        unroll<4>([&](auto k) {
            if (k % 2 == 0)
                for (int n = 0; n < ROWS; n++)
                    for (int t = 0; t < T; t++) acc[n][t] = zero_words();
            unroll<2>([&](auto odd) {
                constexpr int at = k * 2 + odd;
                const Words scale_a = broadcast(scale[at]), scale_b = broadcast(scale[at + 8]);
                const Words zero_a = broadcast(zero[at]), zero_b = broadcast(zero[at + 8]);
                Words a[T], b[T];
                for (int t = 0; t < T; t++) {
                    const Words low = shift_left16<15 - BITS>(unpack<BITS>(codes + t * tile, units, r, k, odd));
                    const Words high = shift_left16<15 - BITS>(unpack<BITS>(codes + t * tile, units, r, k + 4, odd));
                    decode_pair(low, high, scale_a, scale_b, zero_a, zero_b, table + t * table_size + at * 64, a[t],
                                b[t]);
                }
                for (int n = 0; n < ROWS; n++) {
                    const Words weight_a = broadcast(pair_at(weights, (k * ROWS + n) * 2 + odd));
                    const Words weight_b = broadcast(pair_at(weights, ((k + 4) * ROWS + n) * 2 + odd));
                    for (int t = 0; t < T; t++) acc[n][t] = dot16(dot16(acc[n][t], a[t], weight_a), b[t], weight_b);
                }
            });
            if (k % 2 == 1)
                for (int n = 0; n < ROWS; n++)
                    for (int t = 0; t < T; t++) add_scaled(out + n * out_stride + t * 16, acc[n][t], steps[n]);
        });
    }
}

// The same of the rest in bytes, [T][quads][64]. `decoding` and `weights`: those of its quads.
template <int ROWS, int T>
void dot_rotated_rest(const uint8_t* codes, int k_size, int bits, KeyDecoding decoding, const int16_t* weights,
                      const float* steps, float* out, size_t out_stride) {
    const int quads = rest_quads(k_size);
    const size_t table_size = (size_t)k_size * 16;
    for (int quad = 0; quad < quads; quad += 2, weights += 2 * ROWS * 4) {
        Words acc[ROWS][T];
        for (int n = 0; n < ROWS; n++)
            for (int t = 0; t < T; t++) acc[n][t] = zero_words();
        unroll<2>([&](auto odd) {
            const int32_t *scale = decoding.scale + quad * 2 + odd, *zero = decoding.zero + quad * 2 + odd;
            Words a[T], b[T];
            for (int t = 0; t < T; t++) {
                const Words low = shift_left16_by(rest_codes(codes, t * quads + quad, odd), 15 - bits);
                const Words high = shift_left16_by(rest_codes(codes, t * quads + quad + 1, odd), 15 - bits);
                decode_pair(low, high, broadcast(scale[0]), broadcast(scale[2]), broadcast(zero[0]), broadcast(zero[2]),
                            decoding.table + t * table_size + (quad + odd) * 64, a[t], b[t]);
            }
            for (int n = 0; n < ROWS; n++) {
                const Words weight_a = broadcast(pair_at(weights, n * 2 + odd));
                const Words weight_b = broadcast(pair_at(weights, (ROWS + n) * 2 + odd));
                for (int t = 0; t < T; t++) acc[n][t] = dot16(dot16(acc[n][t], a[t], weight_a), b[t], weight_b);
            }
        });
        for (int n = 0; n < ROWS; n++)
            for (int t = 0; t < T; t++) add_scaled(out + n * out_stride + t * 16, acc[n][t], steps[n]);
    }
}

// As those of dot_codes, these choose an instance by width and number of rows.
using DotRotated = void (*)(const uint8_t*, int, KeyDecoding, const int16_t*, const float*, float*, size_t, ptrdiff_t);
using DotInt16 = void (*)(const Words*, int, const int16_t*, const float*, const float*, float*, size_t);
using DotRotatedRest = void (*)(const uint8_t*, int, int, KeyDecoding, const int16_t*, const float*, float*, size_t);
using CodesToInt16 = void (*)(const uint8_t*, int, Table, Words*, ptrdiff_t);

template <int... N>
DotRotated pick_dot_rotated(int bits, int rows, std::integer_sequence<int, N...>) {
    static constexpr DotRotated all[] = {dot_rotated<N / MAX_ROWS + 1, N % MAX_ROWS + 1, TILES>...};
    return all[(bits - 1) * MAX_ROWS + rows - 1];
}
inline DotRotated pick_dot_rotated(int bits, int rows) {
    return pick_dot_rotated(bits, rows, std::make_integer_sequence<int, 8 * MAX_ROWS>());
}
template <int T, int... N>
DotInt16 pick_dot_int16(int rows, std::integer_sequence<int, N...>) {
    static constexpr DotInt16 all[] = {dot_int16<N + 1, T>...};
    return all[rows - 1];
}
template <int T>
DotInt16 pick_dot_int16(int rows) {
    return pick_dot_int16<T>(rows, std::make_integer_sequence<int, MAX_ROWS>());
}
template <int... N>
DotRotatedRest pick_dot_rotated_rest(int rows, std::integer_sequence<int, N...>) {
    static constexpr DotRotatedRest all[] = {dot_rotated_rest<N + 1, TILES>...};
    return all[rows - 1];
}
inline DotRotatedRest pick_dot_rotated_rest(int rows) {
    return pick_dot_rotated_rest(rows, std::make_integer_sequence<int, MAX_ROWS>());
}
template <int... B>
CodesToInt16 pick_shifted(int bits, std::integer_sequence<int, B...>) {
    static constexpr CodesToInt16 all[] = {codes_to_int16<B + 1, SHIFTED>...};
    return all[bits - 1];
}
template <int... B>
CodesToInt16 pick_looked_up(int bits, std::integer_sequence<int, B...>) {
    static constexpr CodesToInt16 all[] = {codes_to_int16<B + 1, LOOKED_UP>...};
    return all[bits - 1];
}
// A table has 16 entries, so codes that are looked up have at most 4 bits.
inline CodesToInt16 pick_codes_to_int16(int bits, bool looked_up) {
    return looked_up ? pick_looked_up(bits, std::make_integer_sequence<int, 4>())
                     : pick_shifted(bits, std::make_integer_sequence<int, 8>());
}

}  // namespace
