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
//
// Where K is another multiple of 8, a tile has units of the first 16 U channels of both halves of K. The rest, up to 24
// channels, is packed by itself for all tiles of a block, so that no bits are lost, and unpacked to bytes once a block.
// Its quads are in turns of the first and of the second half, so that the channels of a rotation are near each other.
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

// Of a packed tile that sums over K, without its rest.
inline size_t tile_bytes(int k, int bits) { return (size_t)(k / 32 * 32) * bits * 2; }
inline int rest_quads(int k) { return k % 32 / 4; }
// Of the packed rest of the `tokens / 16` tiles of a block.
inline size_t rest_bytes(int k, int tokens, int bits) {
    size_t rows = 0;
    for (int plane = 8; plane; plane /= 2)
        rows += (bits & plane) ? (tokens / 16 * rest_quads(k) * plane + 7) / 8 : 0;
    return rows * 64;
}
// Of a block of a head whose tiles have `tokens` lanes.
inline size_t tiles_bytes(int k, int tokens, int bits) {
    return tokens / 16 * tile_bytes(k, bits) + rest_bytes(k, tokens, bits);
}

// Calls found(i, count) for the vectors of a row of K channels, of which the first `count` are wanted: those of units have
// all 16, and one of each half has the rest.
template <class Found>
inline __attribute__((always_inline)) void each_vector(int k_size, Found found) {
    const int half = k_size / 2;
    for (int upper = 0; upper < 2; upper++)
        for (int c = 0; c < half; c += 16) found(upper * half + c, std::min(16, half - c));
}

// Writes x [K], a vector of `each_vector` at a time, into one row of the weights [K / 4][rows][4] of a dot product, in
// the order of the quads.
struct QuadWriter {
    const int units, rows;
    int r = 0, k = 0, upper = 0;
    QuadWriter(int k_size, int rows, int first = 0) : units(k_size / 32), rows(rows), k(first), upper(first / 4) {}
    // `out`: where the weights of the row begin. The first `count` of the elements.
    void store(Words a, int16_t* out, int count = 16) {
        alignas(32) int64_t quads[4];
        store_paired16((int16_t*)quads, a);
        if (count < 16) {
            for (int i = 0; i * 4 < count; i++)
                std::memcpy(out + (size_t)(units * 8 + 2 * i + upper) * rows * 4, quads + i, 8);
            upper = 1;
            return;
        }
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

// Rounds x [K] to the weights of one row, up to `most`. `top` is the highest absolute value of x, behind which 16
// more floats can be read. Returns the step.
inline float quantize_row(const float* x, int k_size, float top, float most, int16_t* out, int rows) {
    const float step = top / most;
    const Floats inverse = inverse_of(step);
    QuadWriter places(k_size, rows);
    each_vector(k_size, [&](int i, int count) {
        places.store(to_nearest(load_floats(x + i) * inverse), out, count);
    });
    return step;
}

inline int32_t pair_at(const int16_t* x, int i) {
    int32_t pair;
    std::memcpy(&pair, x + 2 * (size_t)i, 4);
    return pair;
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

inline void add_scaled(float* out, Words sum, float step) {
    store_floats(out, fma(to_floats(sum), broadcast_float(step), load_floats(out)));
}

// The codes of a rest's quad in bytes: of its elements 0 and 2, or with `odd` 1 and 3.
inline Words rest_codes(const uint8_t* codes, int quad, int odd) {
    const Words both = load(codes + (size_t)quad * 64);
    return odd ? shift_right16<8>(both) : both & broadcast16(255);
}

// Adds bias[row] + steps[row] * (sum over K of code * weight[row]) to out[row][lane], for T tiles that follow each
// other. `ahead`: the distance to the codes that are needed next, which are fetched into the CPU's cache. `rest`: with
// REST, what is left of the tiles, in bytes [T][quads][64].
template <int BITS, int ROWS, int T, bool REST = false>
void dot_codes(const uint8_t* codes, int k_size, const int16_t* weights, const float* steps, const float* bias,
               float* out, size_t out_stride, ptrdiff_t ahead, const uint8_t* rest) {
    const int units = k_size / 32;
    const size_t tile = tile_bytes(k_size, BITS);
    // A tile alone has two sums for a row, as a product waits for the sum that it is added to.
    constexpr int SUMS = T < TILES ? 2 : 1;
    Words acc[SUMS][ROWS][T];
    for (auto& of_rows : acc)
        for (int n = 0; n < ROWS; n++)
            for (int t = 0; t < T; t++) of_rows[n][t] = zero_words();
    for (int r = 0; r < units; r++, weights += 8 * ROWS * 4) {
        for (int t = 0; t < T; t++)
            for (int line = 0; line < BITS; line++) prefetch(codes + t * tile + (size_t)(r * BITS + line) * 64 + ahead);
        unroll<8>([&](auto k) {
            unroll<2>([&](auto odd) {
                auto& sums = acc[odd % SUMS];
                Words code[T];
                for (int t = 0; t < T; t++) code[t] = unpack<BITS>(codes + t * tile, units, r, k, odd);
                for (int n = 0; n < ROWS; n++) {
                    Words weight = broadcast(pair_at(weights, (k * ROWS + n) * 2 + odd));
                    for (int t = 0; t < T; t++) sums[n][t] = dot16(sums[n][t], code[t], weight);
                }
            });
        });
    }
    const int quads = REST ? rest_quads(k_size) : 0;
#pragma GCC unroll 1
    for (int quad = 0; quad < quads; quad++, weights += ROWS * 4)
        unroll<2>([&](auto odd) {
            auto& sums = acc[odd % SUMS];
            Words code[T];
            for (int t = 0; t < T; t++) code[t] = rest_codes(rest, t * quads + quad, odd);
            for (int n = 0; n < ROWS; n++) {
                const Words weight = broadcast(pair_at(weights, n * 2 + odd));
                for (int t = 0; t < T; t++) sums[n][t] = dot16(sums[n][t], code[t], weight);
            }
        });
    for (int n = 0; n < ROWS; n++)
        for (int t = 0; t < T; t++) {
            float* to = out + n * out_stride + t * 16;
            store_floats(to, load_floats(to) + broadcast_float(bias[n]));
            for (auto& of_rows : acc) add_scaled(to, of_rows[n][t], steps[n]);
        }
}

using DotCodes = void (*)(const uint8_t*, int, const int16_t*, const float*, const float*, float*, size_t, ptrdiff_t,
                          const uint8_t*);

// These choose an instance by width and number of rows. Entry N is for N / MAX_ROWS + 1 bits, N % MAX_ROWS + 1 rows.
template <int T, bool REST, int... N>
DotCodes pick_dot_codes(int bits, int rows, std::integer_sequence<int, N...>) {
    static constexpr DotCodes all[] = {dot_codes<N / MAX_ROWS + 1, N % MAX_ROWS + 1, T, REST>...};
    return all[(bits - 1) * MAX_ROWS + rows - 1];
}
template <int T, bool REST = false>
DotCodes pick_dot_codes(int bits, int rows) {
    return pick_dot_codes<T, REST>(bits, rows, std::make_integer_sequence<int, 8 * MAX_ROWS>());
}

}  // namespace
