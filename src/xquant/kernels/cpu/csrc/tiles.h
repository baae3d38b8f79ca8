// Integer dot products with tiles of packed codes, which are unpacked in registers: for 16 lanes,
// out[lane] += bias + step * sum over K of code[lane, k] * weight[k].
//
// A tile holds K codes for each of 16 lanes: for keys the lanes are tokens and K is the head size, for values the
// lanes are channels and K the tokens of the block. So both halves of attention are this one product, and no
// code moves to another lane. Weights are floats that were rounded to int16, with one step a row.
//
// In memory a tile is [K / 4][16][4], packed in planes along K / 4 (docs/format.md, `quant.pack.Tile`). In registers
// the four codes of a quad are two Words: elements 0 and 2, then 1 and 3. Quads are taken in the order in which they
// come out of the planes: with U = K / 32 units, quad r + k U is number 8 r + k. Weights are kept in that order.
#pragma once
#include <algorithm>
#include <cmath>
#include <utility>

namespace {

template <int... I, class F>
inline __attribute__((always_inline)) void unroll_each(std::integer_sequence<int, I...>, F f) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
inline __attribute__((always_inline)) void unroll(F f) {
    unroll_each(std::make_integer_sequence<int, N>(), f);
}

constexpr int lowest_plane(int bits) { return bits & 8 ? 8 : bits & 4 ? 4 : bits & 2 ? 2 : 1; }

// Codes of quad r + k * units: of its elements 0 and 2, or with `odd` 1 and 3. `units` = K / 32.
template <int BITS>
inline __attribute__((always_inline)) Words unpack(const uint8_t* codes, int units, int r, int k, int odd) {
    constexpr int WIDTH = lowest_plane(BITS), REST = BITS - WIDTH;
    Words row = load(codes + (size_t)(r + k % WIDTH * units) * 64);
    Words code;
    auto field = [&](auto shift) {
        constexpr int SHIFT = decltype(shift)::value;
        Words moved = SHIFT == 0 ? row : shift_right16<SHIFT>(row);
        return SHIFT + WIDTH == 16 ? moved : moved & broadcast16((1 << WIDTH) - 1);
    };
    // After unrolling the compiler knows all arguments, and one case remains.
    switch (k / WIDTH * WIDTH + odd * 8) {
        case 0: code = field(std::integral_constant<int, 0>()); break;
        case 1: code = field(std::integral_constant<int, 1>()); break;
        case 2: code = field(std::integral_constant<int, 2>()); break;
        case 3: code = field(std::integral_constant<int, 3>()); break;
        case 4: code = field(std::integral_constant<int, 4>()); break;
        case 5: code = field(std::integral_constant<int, 5>()); break;
        case 6: code = field(std::integral_constant<int, 6>()); break;
        case 7: code = field(std::integral_constant<int, 7>()); break;
        case 8: code = field(std::integral_constant<int, 8>()); break;
        case 9: code = field(std::integral_constant<int, 9>()); break;
        case 10: code = field(std::integral_constant<int, 10>()); break;
        case 11: code = field(std::integral_constant<int, 11>()); break;
        case 12: code = field(std::integral_constant<int, 12>()); break;
        case 13: code = field(std::integral_constant<int, 13>()); break;
        case 14: code = field(std::integral_constant<int, 14>()); break;
        default: code = field(std::integral_constant<int, 15>()); break;
    }
    if constexpr (REST > 0)
        code = code | shift_left16<WIDTH>(unpack<REST>(codes + (size_t)units * WIDTH * 64, units, r, k, odd));
    return code;
}

inline size_t tile_bytes(int k, int bits) { return (size_t)k * bits * 2; }

// Writes x [K], 16 elements at a time, into one row of the weights [K / 4][rows][4] of a dot product, in the order
// of the quads.
struct QuadWriter {
    const int units, rows;
    int r = 0, k = 0;
    // `out`: where the weights of the row begin.
    void store(Words a, int16_t* out) {
        alignas(32) int64_t quads[4];
        store_paired16((int16_t*)quads, a);
        if (units == 4) {
            for (int i = 0; i < 4; i++) std::memcpy(out + (size_t)(i * 8 + k) * rows * 4, quads + i, 8);
            k++;
            return;
        }
        for (int i = 0; i < 4; i++) {
            std::memcpy(out + (size_t)(r * 8 + k) * rows * 4, quads + i, 8);
            if (++r == units) r = 0, k++;
        }
    }
};

// The highest int16 weight with which sums of `count` products stay within 32 bits; `bound` is the other factor's
// highest value.
inline float highest_weight(int count, float bound) {
    return std::min(32767.0f, 2147483647.0f * 0.99f / (bound * count));
}

// What a float is multiplied by to count it in steps. With a step below 1e-30 all is 0.
inline Floats inverse_of(float step) { return broadcast_float(step > 1e-30f ? 1 / step : 0); }

// Rounds x [K] to the weights of one row, up to `most`. `top` is the highest absolute value of x. Returns the step.
inline float quantize_row(const float* x, int k_size, float top, float most, int16_t* out, int rows) {
    const float step = top / most;
    const Floats inverse = inverse_of(step);
    QuadWriter places{k_size / 32, rows};
    for (int i = 0; i < k_size; i += 16) places.store(to_nearest(load_floats(x + i) * inverse), out);
    return step;
}

inline int32_t pair_at(const int16_t* x, int i) {
    int32_t pair;
    std::memcpy(&pair, x + 2 * (size_t)i, 4);
    return pair;
}

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

inline void add_scaled(float* out, Words sum, float step) {
    store_floats(out, fma(to_floats(sum), broadcast_float(step), load_floats(out)));
}

// Adds bias[row] + steps[row] * (sum over K of code * weight[row]) to out[row][lane], for T tiles that follow each
// other. `ahead`: the distance to the codes that are needed next, which are fetched into the CPU's cache.
template <int BITS, int ROWS, int T>
void dot_codes(const uint8_t* codes, int k_size, const int16_t* weights, const float* steps, const float* bias,
               float* out, size_t out_stride, ptrdiff_t ahead) {
    const int units = k_size / 32;
    const size_t tile = tile_bytes(k_size, BITS);
    Words acc[ROWS][T];
    for (int n = 0; n < ROWS; n++)
        for (int t = 0; t < T; t++) acc[n][t] = zero_words();
    for (int r = 0; r < units; r++, weights += 8 * ROWS * 4) {
        for (int t = 0; t < T; t++)
            for (int line = 0; line < BITS; line++) prefetch(codes + t * tile + (size_t)(r * BITS + line) * 64 + ahead);
        unroll<8>([&](auto k) {
            unroll<2>([&](auto odd) {
                Words code[T];
                for (int t = 0; t < T; t++) code[t] = unpack<BITS>(codes + t * tile, units, r, k, odd);
                for (int n = 0; n < ROWS; n++) {
                    Words weight = broadcast(pair_at(weights, (k * ROWS + n) * 2 + odd));
                    for (int t = 0; t < T; t++) acc[n][t] = dot16(acc[n][t], code[t], weight);
                }
            });
        });
    }
    for (int n = 0; n < ROWS; n++)
        for (int t = 0; t < T; t++) {
            float* to = out + n * out_stride + t * 16;
            store_floats(to, load_floats(to) + broadcast_float(bias[n]));
            add_scaled(to, acc[n][t], steps[n]);
        }
}

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
}

// How codes become rotated keys: an int16 scale and zero of every channel, as pairs in the order of the quads, and the
// part of the rope table (xq_rope_table) for the positions of a tile, [K / 8][2][cos, sin][16][2].
struct KeyDecoding {
    const int32_t *scale, *zero;  // [K / 2]
    const int16_t* table;
};

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
                    Words low = shift_left16<15 - BITS>(unpack<BITS>(codes + t * tile, units, r, k, odd));
                    Words high = shift_left16<15 - BITS>(unpack<BITS>(codes + t * tile, units, r, k + 4, odd));
                    low = add16(multiply_q15(low, scale_a), zero_a);
                    high = add16(multiply_q15(high, scale_b), zero_b);
                    const int16_t* rotation = table + t * table_size + at * 64;
                    const Words cos = load(rotation), sin = load(rotation + 32);
                    a[t] = sub16(multiply_q15(low, cos), multiply_q15(high, sin));
                    b[t] = add16(multiply_q15(high, cos), multiply_q15(low, sin));
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

using DotCodes = void (*)(const uint8_t*, int, const int16_t*, const float*, const float*, float*, size_t, ptrdiff_t);
using DotRotated = void (*)(const uint8_t*, int, KeyDecoding, const int16_t*, const float*, float*, size_t, ptrdiff_t);
using DotInt16 = void (*)(const Words*, int, const int16_t*, const float*, const float*, float*, size_t);
using CodesToInt16 = void (*)(const uint8_t*, int, Table, Words*, ptrdiff_t);

// These choose an instance by width and number of rows. Entry N is for N / MAX_ROWS + 1 bits, N % MAX_ROWS + 1 rows.
template <int T, int... N>
DotCodes pick_dot_codes(int bits, int rows, std::integer_sequence<int, N...>) {
    static constexpr DotCodes all[] = {dot_codes<N / MAX_ROWS + 1, N % MAX_ROWS + 1, T>...};
    return all[(bits - 1) * MAX_ROWS + rows - 1];
}
template <int T>
DotCodes pick_dot_codes(int bits, int rows) {
    return pick_dot_codes<T>(bits, rows, std::make_integer_sequence<int, 8 * MAX_ROWS>());
}
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
