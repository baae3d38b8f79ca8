// Products of many rows with a matrix, for prefill.h: C [rows, columns] (+)= A [rows, K] * B [K, columns] in fp32.
//
// Both are in lanes of 32 bits. Of `Singles` a lane is a float; of `Pairs` it is two bf16, which a CPU with AVX-512
// BF16 multiplies in one instruction. A row of A has its lanes in order. B is in panels of `PANEL` vectors; a line of a
// panel has the lanes of one or two rows of B, column by column.
#pragma once
#include <algorithm>
#include <type_traits>

#include "elements.h"

namespace {

constexpr int ROWS_AT_ONCE = 6;
constexpr int PANEL_COLUMNS = 16 * PANEL;

struct Singles {
    static constexpr int STEP = 1;  // numbers of a lane
    static Floats dot(Floats sum, const uint32_t* a, Words b) {
        float number;
        std::memcpy(&number, a, 4);
        return fma(broadcast_float(number), as_floats(b), sum);
    }
    // 16 lanes of a row of states, from channel c on; behind `count` channels are zeros.
    template <int DTYPE>
    static void lanes(const void* row, int64_t at, int count, uint32_t* to) {
        if (count >= 16) return store(to, as_words(load_as<DTYPE>(row, at)));
        for (int i = 0; i < 16; i++) {
            const float x = i < count ? load_element(row, DTYPE, at + i) : 0;
            std::memcpy(to + i, &x, 4);
        }
    }
    // A line of 16 columns, of one row.
    template <int DTYPE>
    static void line(const void* of, const int64_t* rows, int count, uint32_t* to) {
        if (rows[0] < 0) return store(to, zero_words());
        lanes<DTYPE>(of, rows[0], count, to);
    }
    // Weights [columns] as lanes; they may be in the same memory.
    static void weights(const float* from, int columns, uint32_t* to) {
        if ((const void*)from != (const void*)to) std::memcpy(to, from, sizeof(float) * columns);
    }
};

#ifdef XQ_BF16_PAIRS
struct Pairs {
    static constexpr int STEP = 2;
    static Floats dot(Floats sum, const uint32_t* a, Words b) { return dot_bf16(sum, a, b); }
    template <int DTYPE>
    static void lanes(const void* row, int64_t at, int count, uint32_t* to) {
        const uint16_t* p = (const uint16_t*)row + at;
        if (count >= 32) return store(to, load(p));
        uint16_t x[32] = {};
        if (count > 0) std::memcpy(x, p, 2 * count);
        store(to, load(x));
    }
    template <int DTYPE>
    static void line(const void* of, const int64_t* rows, int count, uint32_t* to) {
        Words each[2];
        for (int i = 0; i < 2; i++) {
            alignas(32) uint16_t x[16] = {};
            const uint16_t* p = (const uint16_t*)of + rows[i];
            if (rows[i] < 0 || count < 16) {
                if (rows[i] >= 0) std::memcpy(x, p, 2 * count);
                p = x;
            }
            each[i] = as_words(load_bf16(p));
        }
        store(to, shift_right32<16>(each[0]) | each[1]);
    }
    static void weights(const float* from, int columns, uint32_t* to) {
        for (int i = 0; i < columns; i += 32)
            store(to + i / 2, to_bf16(load_floats(from + i), load_floats(from + i + 16)));
    }
};
#endif

// `ROWS_AT_ONCE` rows with a panel of N vectors. C is A * B * `factor`, or, where this is 0, gets A * B added.
template <class Numbers, int N>
inline void multiply_panel(const uint32_t* a, size_t a_stride, const uint32_t* b, int lines, float factor, float* c,
                           size_t c_stride) {
    Floats sums[ROWS_AT_ONCE][N];
    for (int r = 0; r < ROWS_AT_ONCE; r++)
        for (int i = 0; i < N; i++) sums[r][i] = factor ? broadcast_float(0) : load_floats(c + r * c_stride + 16 * i);
    for (int line = 0; line < lines; line++, b += 16 * N) {
        Words columns[N];
        for (int i = 0; i < N; i++) columns[i] = load(b + 16 * i);
        for (int r = 0; r < ROWS_AT_ONCE; r++)
            for (int i = 0; i < N; i++) sums[r][i] = Numbers::dot(sums[r][i], a + r * a_stride + line, columns[i]);
    }
    const Floats times = broadcast_float(factor ? factor : 1);
    for (int r = 0; r < ROWS_AT_ONCE; r++)
        for (int i = 0; i < N; i++) store_floats(c + r * c_stride + 16 * i, sums[r][i] * times);
}

// The same with all panels: `columns` is a multiple of 16, `rows` one of `ROWS_AT_ONCE`.
template <class Numbers>
inline void multiply(const uint32_t* a, size_t a_stride, int rows, const uint32_t* b, size_t panel_stride, int lines,
                     float factor, float* c, int columns, size_t c_stride) {
    for (int from = 0; from < columns; from += PANEL_COLUMNS, b += panel_stride)
        for (int r = 0; r < rows; r += ROWS_AT_ONCE) {
            const uint32_t* row = a + r * a_stride;
            float* to = c + r * c_stride + from;
            const auto with = [&](auto vectors) {
                constexpr int N = decltype(vectors)::value;
                if constexpr (N <= PANEL) multiply_panel<Numbers, N>(row, a_stride, b, lines, factor, to, c_stride);
            };
            switch (std::min(PANEL, (columns - from) / 16)) {
                case 1: with(std::integral_constant<int, 1>()); break;
                case 2: with(std::integral_constant<int, 2>()); break;
                case 3: with(std::integral_constant<int, 3>()); break;
                default: with(std::integral_constant<int, PANEL>());
            }
        }
}

}  // namespace
