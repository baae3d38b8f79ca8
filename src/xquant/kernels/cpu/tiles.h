// Tiles of codes: unpacking, and integer dot products with them. Included once for each instruction set.
//
// A tile holds, for 16 lanes, K codes to be summed over: for keys the lanes are tokens and K is the head
// size, for values the lanes are channels and K the tokens of the block. In memory it is [K / 4][16][4],
// packed in planes along K / 4 (docs/format.md). In registers a quad of codes of every lane is two Words:
// elements 0 and 2, then 1 and 3. A vector to be dotted with is kept in the same order.
#pragma once
#include <cmath>
#include <utility>

namespace {

template <int... I, class F>
inline __attribute__((always_inline)) void each(std::integer_sequence<int, I...>, F f) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, class F>
inline __attribute__((always_inline)) void repeat(F f) {
    each(std::make_integer_sequence<int, N>(), f);
}

constexpr int lowest_plane(int bits) { return bits & 8 ? 8 : bits & 4 ? 4 : bits & 2 ? 2 : 1; }

// Words of element pair `odd` of quad r + k * units. `units` = K / 32.
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
    // All arguments are known after unrolling: one case remains.
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

// The code of one lane and one of its K elements.
inline int code_at(const uint8_t* tile, int k, int bits, int lane, int element) {
    int quad = element / 4, shift = 0, code = 0;
    for (int width = 8; width; width /= 2) {
        if (!(bits & width)) continue;
        int rows = k / 32 * width;
        int byte = tile[(size_t)(quad % rows) * 64 + lane * 4 + element % 4];
        code |= (byte >> quad / rows * width & ((1 << width) - 1)) << shift;
        tile += (size_t)rows * 64;
        shift += width;
    }
    return code;
}

// x [count] as int16 in the order of the tiles, with a step for every `chunk` elements, so that no sum of
// a chunk against values up to `bound` overflows 32 bits.
inline void to_int16(const float* x, int count, int chunk, float bound, int16_t* out, float* steps) {
    for (int c = 0; c < count; c += chunk) {
        Floats top = broadcast_float(0), total = top;
        for (int i = c; i < c + chunk; i += 16) {
            Floats a = absolute(load_floats(x + i));
            top = maximum(top, a);
            total = total + a;
        }
        float step = std::fmax(highest(top) / 32767.0f, sum(total) * (bound * 1.01f / 2147483648.0f));
        Floats inverse = broadcast_float(step > 1e-30f ? 1 / step : 0);
        for (int i = c; i < c + chunk; i += 16)
            store_paired16(out + i, to_nearest(load_floats(x + i) * inverse));
        steps[c / chunk] = step;
    }
}

inline int32_t pair_at(const int16_t* x, int i) {
    int32_t pair;
    std::memcpy(&pair, x + 2 * (size_t)i, 4);
    return pair;
}

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

// out[row][lane] = steps[row] * sum over K of codes * weights[row], for T tiles that follow each other.
// `ahead`: distance to the codes that are wanted next.
template <int BITS, int ROWS, int T>
void dot_codes(const uint8_t* codes, int k_size, const int16_t* weights, const float* steps, float* out,
               size_t out_stride, ptrdiff_t ahead) {
    const int units = k_size / 32;
    const size_t tile = tile_bytes(k_size, BITS);
    Words acc[ROWS][T];
    for (int n = 0; n < ROWS; n++)
        for (int t = 0; t < T; t++) acc[n][t] = zero_words();
    for (int r = 0; r < units; r++) {
        for (int t = 0; t < T; t++)
            for (int line = 0; line < BITS; line++)
                prefetch(codes + t * tile + (size_t)(r * BITS + line) * 64 + ahead);
        repeat<8>([&](auto k) {
            repeat<2>([&](auto odd) {
                const int at = (r + k * units) * 2 + odd;
                Words code[T];
                for (int t = 0; t < T; t++) code[t] = unpack<BITS>(codes + t * tile, units, r, k, odd);
                for (int n = 0; n < ROWS; n++) {
                    Words weight = broadcast(pair_at(weights + (size_t)n * k_size, at));
                    for (int t = 0; t < T; t++) acc[n][t] = dot16(acc[n][t], code[t], weight);
                }
            });
        });
    }
    for (int n = 0; n < ROWS; n++)
        for (int t = 0; t < T; t++)
            store_floats(out + n * out_stride + t * 16, to_floats(acc[n][t]) * broadcast_float(steps[n]));
}

// What a code becomes: itself moved up to 15 bits, or an entry of a table.
enum { SHIFTED, LOOKED_UP };

// Codes of one tile as int16, Words [K / 2].
template <int BITS, int FORM>
void expand(const uint8_t* codes, int k_size, Table table, Words* out, ptrdiff_t ahead) {
    const int units = k_size / 32;
    for (int r = 0; r < units; r++) {
        for (int line = 0; line < BITS; line++) prefetch(codes + (size_t)(r * BITS + line) * 64 + ahead);
        repeat<8>([&](auto k) {
            repeat<2>([&](auto odd) {
                Words code = unpack<BITS>(codes, units, r, k, odd);
                if constexpr (FORM == LOOKED_UP)
                    code = look_up(table, code);
                else
                    code = shift_left16<15 - BITS>(code);
                out[(r + k * units) * 2 + odd] = code;
            });
        });
    }
}

// As dot_codes with int16 in place of codes, [T][K / 2], and a step for every 32 elements.
template <int ROWS, int T>
void dot_words(const Words* words, int k_size, const int16_t* weights, const float* steps, float* out,
               size_t out_stride) {
    const int chunks = k_size / 32;
    Floats total[ROWS][T];
    for (int n = 0; n < ROWS; n++)
        for (int t = 0; t < T; t++) total[n][t] = broadcast_float(0);
    for (int c = 0; c < chunks; c++) {
        Words acc[ROWS][T];
        for (int n = 0; n < ROWS; n++)
            for (int t = 0; t < T; t++) acc[n][t] = zero_words();
        for (int i = c * 16; i < c * 16 + 16; i++) {
            Words word[T];
            for (int t = 0; t < T; t++) word[t] = words[(size_t)t * (k_size / 2) + i];
            for (int n = 0; n < ROWS; n++) {
                Words weight = broadcast(pair_at(weights + (size_t)n * k_size, i));
                for (int t = 0; t < T; t++) acc[n][t] = dot16(acc[n][t], word[t], weight);
            }
        }
        for (int n = 0; n < ROWS; n++) {
            Floats step = broadcast_float(steps[n * chunks + c]);
            for (int t = 0; t < T; t++) total[n][t] = fma(to_floats(acc[n][t]), step, total[n][t]);
        }
    }
    for (int n = 0; n < ROWS; n++)
        for (int t = 0; t < T; t++) store_floats(out + n * out_stride + t * 16, total[n][t]);
}

using DotCodes = void (*)(const uint8_t*, int, const int16_t*, const float*, float*, size_t, ptrdiff_t);
using DotWords = void (*)(const Words*, int, const int16_t*, const float*, float*, size_t);
using Expand = void (*)(const uint8_t*, int, Table, Words*, ptrdiff_t);

template <int BITS, int T, int... N>
DotCodes pick_rows(int rows, std::integer_sequence<int, N...>) {
    DotCodes all[] = {dot_codes<BITS, N + 1, T>...};
    return all[rows - 1];
}
template <int T, int... B>
DotCodes pick_dot_codes(int bits, int rows, std::integer_sequence<int, B...>) {
    DotCodes all[] = {pick_rows<B + 1, T>(rows, std::make_integer_sequence<int, MAX_ROWS>())...};
    return all[bits - 1];
}
template <int T>
DotCodes pick_dot_codes(int bits, int rows) {
    return pick_dot_codes<T>(bits, rows, std::make_integer_sequence<int, 8>());
}
template <int T, int... N>
DotWords pick_dot_words(int rows, std::integer_sequence<int, N...>) {
    DotWords all[] = {dot_words<N + 1, T>...};
    return all[rows - 1];
}
template <int T>
DotWords pick_dot_words(int rows) {
    return pick_dot_words<T>(rows, std::make_integer_sequence<int, MAX_ROWS>());
}
template <int... B>
Expand pick_shifted(int bits, std::integer_sequence<int, B...>) {
    Expand all[] = {expand<B + 1, SHIFTED>...};
    return all[bits - 1];
}
template <int... B>
Expand pick_looked_up(int bits, std::integer_sequence<int, B...>) {
    Expand all[] = {expand<B + 1, LOOKED_UP>...};
    return all[bits - 1];
}
// Tables have 16 entries: codes that are looked up have at most 4 bits.
inline Expand pick_expand(int bits, bool looked_up) {
    return looked_up ? pick_looked_up(bits, std::make_integer_sequence<int, 4>())
                     : pick_shifted(bits, std::make_integer_sequence<int, 8>());
}

}  // namespace
