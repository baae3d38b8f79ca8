// Scores of a few queries with the keys of one block and head that are rebuilt BUILT_ROWS channels at a time (rebuild.h,
// ranked.h), with tokens as lanes. Channels come in the order of the pairs that RoPE turns: 0, P, 1, P + 1, ..., then
// those that it does not turn.
//
// Slow pairs turn little within a block, so few functions of a token's place r describe how all of them turn:
// cos(r w_j) = sum_k wave_k(r) cos_kj, and sin alike. Their part of a score is then sum_k wave_k(r) (v_k x_r), where
// v_k is a row of C channels that follows from the query, the block's first position and the weight W of keys. For a few
// queries these rows are fewer than the channels of the pairs: they are multiplied with the states x in place of W.
#pragma once
#include "tiles.h"
#include "workspace.h"

namespace {

// Channels of a key that are built at a time. kernels/cpu/rebuild.py lays the weights out so.
constexpr int BUILT_ROWS = 8;

// The highest weight of slow pairs, so that sums over a head leave as many bits for what they are multiplied with.
constexpr float SLOW_LIMIT = 8191;

struct TurnedScores {
    const xq_turning& turning;
    const int D, n, rows;     // rows of queries
    const int pairs, width;   // of slow pairs, filled up to whole vectors
    const int slow_rows;      // of slow pairs, filled up to BUILT_ROWS
    float* keys;              // [BUILT_ROWS, n] of the channels that are built now
    float* query;             // [rows, filled D] in the order of pairs, turned back by the block's start
    float* slow_query;        // [rows, 2, width] the first and the second channels of slow pairs of it
    float* turned;            // [2, width] of one wave
    int32_t* factors;         // [BUILT_ROWS, width] of slow pairs, two int16 each

    static int filled(int D) { return (D + BUILT_ROWS - 1) / BUILT_ROWS * BUILT_ROWS; }
    static int slow_pairs(const xq_turning& t, int D) { return std::max(D - t.built, 0) / 2; }
    static int slow_width(const xq_turning& t, int D) { return (slow_pairs(t, D) + 15) / 16 * 16; }
    static size_t bytes(const xq_turning& t, int D, int n, int rows) {
        const size_t width = slow_width(t, D);
        return 4 * (BUILT_ROWS * (n + width) + (size_t)rows * (filled(D) + 2 * width) + 2 * width) + 5 * 64;
    }
    TurnedScores(const xq_turning& t, int D, int n, int rows, Workspace& workspace)
        : turning(t),
          D(D),
          n(n),
          rows(rows),
          pairs(slow_pairs(t, D)),
          width(slow_width(t, D)),
          slow_rows(pairs ? (rows * t.waves + BUILT_ROWS - 1) / BUILT_ROWS * BUILT_ROWS : 0) {
        keys = workspace.take<float>((size_t)BUILT_ROWS * n);
        query = workspace.take<float>((size_t)rows * filled(D));
        slow_query = workspace.take<float>((size_t)rows * 2 * width);
        turned = workspace.take<float>(2 * (size_t)width);
        factors = workspace.take<int32_t>((size_t)BUILT_ROWS * width);
    }

    // Where cos and sin of a block's tokens begin, or of the places in a block.
    size_t angles(int b, int column) const {
        return turning.start_cos ? 0 : b * turning.rope_batch + (size_t)column * n;
    }

    // The query [rows, D] in the order of pairs, turned back by the angles of the block's start.
    void take_query(const float* from, int b, int column) {
        const size_t at = b * turning.start_batch + (size_t)column * turning.rotary_pairs;
        for (int r = 0; r < rows; r++, from += D) {
            float* to = query + (size_t)r * filled(D);
            std::memcpy(to, from, sizeof(float) * D);
            std::fill(to + D, to + filled(D), 0.0f);
            for (int j = 0; j < turning.rotary_pairs; j++) {
                const float x = from[j], y = from[j + turning.rotary_pairs];
                const float cos = turning.start_cos ? turning.start_cos[at + j] : 1;
                const float sin = turning.start_cos ? turning.start_sin[at + j] : 0;
                to[2 * j] = x * cos + y * sin;
                to[2 * j + 1] = y * cos - x * sin;
            }
            float *first = slow_query + (size_t)r * 2 * width, *second = first + width;
            std::fill_n(first, 2 * width, 0.0f);
            for (int j = 0; j < pairs; j++) {
                first[j] = to[turning.built + 2 * j];
                second[j] = to[turning.built + 2 * j + 1];
            }
        }
    }

    // What the channels of slow pairs are multiplied with for row `row` of all query rows and waves, as factors i:
    // int16 in units of `unit` [2, width], null: 1. `bias` becomes the part of `base` [2, width], which is added to keys.
    // Returns the step of factors.
    float take_factors(int row, int i, const float* unit, const float* base, float& bias) {
        if (row >= rows * turning.waves) {
            std::fill_n(factors + (size_t)i * width, width, 0);
            return bias = 0;
        }
        const int r = row / turning.waves, k = row % turning.waves;
        const float *first = slow_query + (size_t)r * 2 * width, *second = first + width;
        const float *cos = turning.wave_cos + (size_t)k * width, *sin = turning.wave_sin + (size_t)k * width;
        Floats top = broadcast_float(0), based = top;
        for (int j = 0; j < width; j += 16) {
            const Floats x = load_floats(first + j), y = load_floats(second + j);
            const Floats u = load_floats(cos + j), v = load_floats(sin + j);
            Floats a = fma(x, u, y * v), b = y * u - x * v;
            based = fma(a, load_floats(base + j), fma(b, load_floats(base + width + j), based));
            if (unit) {
                a = a * load_floats(unit + j);
                b = b * load_floats(unit + width + j);
            }
            top = maximum(top, maximum(absolute(a), absolute(b)));
            store_floats(turned + j, a);
            store_floats(turned + width + j, b);
        }
        bias = sum(based);
        const float step = highest(top) / highest_weight(2 * pairs, SLOW_LIMIT);
        const Floats inverse = inverse_of(step);
        for (int j = 0; j < width; j += 16) {
            const Words a = to_nearest(load_floats(turned + j) * inverse);
            const Words b = to_nearest(load_floats(turned + width + j) * inverse);
            store(factors + (size_t)i * width + j, (a & broadcast(65535)) | shift_left32<16>(b));
        }
        return step;
    }

    // The square of the norm of what take_factors made last, before it was rounded.
    float square() const {
        Floats found = broadcast_float(0);
        for (int j = 0; j < 2 * width; j += 16) found = fma(load_floats(turned + j), load_floats(turned + j), found);
        return sum(found);
    }

    // Rotates the keys of channels d to d + BUILT_ROWS - 1, of the tokens from `first` to before `last`, and adds their
    // part of the scores [rows, stride]. `at`: see `angles`.
    void score_built(int d, size_t at, int first, int last, float* scores, size_t stride) const {
        for (int t = first; t < last; t += 16) {
            Floats key[BUILT_ROWS];
            for (int i = 0; i < BUILT_ROWS; i++) key[i] = load_floats(keys + (size_t)i * n + t);
            for (int i = 0; i < BUILT_ROWS && (d + i) / 2 < turning.rotary_pairs; i += 2) {
                const size_t angle = at + (d + i) / 2 * turning.rope_channel + t;
                const Floats x = key[i], y = key[i + 1];
                const Floats u = load_floats(turning.cos + angle), v = load_floats(turning.sin + angle);
                key[i] = x * u - y * v;
                key[i + 1] = fma(y, u, x * v);
            }
            for (int r = 0; r < rows; r++) {
                const float* q = query + (size_t)r * filled(D) + d;
                float* score = scores + r * stride + t;
                Floats even = load_floats(score), odd = broadcast_float(0);
                for (int i = 0; i < BUILT_ROWS; i += 2) {
                    even = fma(broadcast_float(q[i]), key[i], even);
                    odd = fma(broadcast_float(q[i + 1]), key[i + 1], odd);
                }
                store_floats(score, even + odd);
            }
        }
    }

    // The same of the rows of slow pairs from `row` on, where products with the rows are what `keys` holds.
    void score_slow(int row, int first, int last, float* scores, size_t stride) const {
        const int count = std::min(BUILT_ROWS, rows * turning.waves - row);
        for (int i = 0; i < count; i++) {
            float* score = scores + (row + i) / turning.waves * stride;
            const float *wave = turning.wave + (size_t)((row + i) % turning.waves) * n, *found = keys + (size_t)i * n;
            for (int t = first; t < last; t += 16) {
                const Floats before = load_floats(score + t);
                store_floats(score + t, fma(load_floats(wave + t), load_floats(found + t), before));
            }
        }
    }
};

}  // namespace
