// Attention over packed states X that keys and values are products of, without either being written out for the
// whole context. A block and head at a time, keys K = X W^T + b are rebuilt, rotated by RoPE and scored in the CPU's
// cache. Values are never rebuilt: p (X W) = (p X) W, so what is packed is summed, and torch multiplies the sum by W.
//
// K is an integer product of codes and int16 weights. With x[t, c] = code * scale + zero:
//
//     ranges per channel:  k[t, d] = sum_c (W[d, c] scale_c) code[t, c] + sum_c W[d, c] zero_c
//     ranges per token:    k[t, d] = sum over ranges j of (scale_tj sum_c W[d, c] code[t, c] + zero_tj sum_c W[d, c])
//
// with c in range j. Rows d come in the order of the pairs that RoPE turns: 0, P, 1, P + 1, ..., then those that it
// does not turn.
//
// Slow pairs turn little within a block, so few functions of a token's place r describe how all of them turn:
// cos(r w_j) = sum_k wave_k(r) cos_kj, and sin alike. Their part of a score is then sum_k wave_k(r) (v_k x_r), where
// v_k is a row of C channels that follows from the query, the block's first position and W. For a few queries these
// rows are fewer than the channels of the pairs: they are multiplied with the codes in place of W.
//
// The scores equal those of the keys that `methods.xquant.Rematerialized.keys` makes of decoded states, the sums those
// of the decoded states, to a relative error below 1e-3 of the output.
#pragma once
#include "rebuild_sum.h"

namespace {

// Channels of a key that share unpacked codes: quads of weights of 8 channels fill a vector. kernels/cpu/rebuild.py
// lays the weights out so.
constexpr int BUILT_ROWS = 8;

// The highest weight of slow pairs, so that sums over a head leave as many bits for what they are multiplied with.
constexpr float SLOW_LIMIT = 8191;

template <int... B>
DotCodes pick_dot_rebuilt(int bits, std::integer_sequence<int, B...>) {
    static constexpr DotCodes all[] = {dot_codes<B + 1, BUILT_ROWS, TILES>...};
    return all[bits - 1];
}

// The weights of BUILT_ROWS rows as they meet the codes of a block, and what turns sums into rows.
struct RowWeights {
    const int16_t* weights;
    float steps[BUILT_ROWS], bias[BUILT_ROWS];
    const float* totals;  // [BUILT_ROWS, ranges] of the weights over each range of a token
    const uint8_t* next;  // weights that are wanted next; null: none
};

// The scores of one block and head.
struct RebuiltKeys {
    const xq_rebuild_scores& call;
    const int D, n, C, K, ranges;  // K: channels that one product sums over, a range or all
    const int pairs, width;        // of slow pairs, filled up to whole vectors
    const int slow_rows;           // of slow pairs, filled up to BUILT_ROWS
    const DotCodes dot;
    float* keys;                // [BUILT_ROWS, n]
    float* query;               // [rows, D] in the order of rows, turned back by the block's start
    float* slow_query;          // [rows, 2, width] the first and the second channels of slow pairs of it
    float *turned, *slow;       // [2, width] of one wave; [BUILT_ROWS, C] the rows of slow pairs
    float* totals;              // [BUILT_ROWS, ranges] of their weights
    int32_t* factors;           // [BUILT_ROWS, width] of slow pairs, two int16 each
    int16_t* weights;           // [C / 4, BUILT_ROWS, 4] of rows that are made for a block
    int16_t *scale16, *zero16;  // [C], in the order of weights

    static int summed(const xq_rebuild_scores& c) { return c.key.per_token ? c.key.group : c.channels; }
    static int slow_pairs(const xq_rebuild_scores& c) { return (c.head_size - c.built) / 2; }
    static int slow_width(const xq_rebuild_scores& c) { return (slow_pairs(c) + 15) / 16 * 16; }
    static size_t bytes(const xq_rebuild_scores& c) {
        const size_t rows = BUILT_ROWS, C = c.channels, queries = c.rows, width = slow_width(c);
        return 4 * (rows * (c.block + width + C + C / summed(c)) + queries * (c.head_size + 2 * width) + 2 * width) +
               2 * (rows + 2) * C + 10 * 64;
    }

    RebuiltKeys(const xq_rebuild_scores& c, Workspace& workspace)
        : call(c),
          D(c.head_size),
          n(c.block),
          C(c.channels),
          K(summed(c)),
          ranges(c.channels / K),
          pairs(slow_pairs(c)),
          width(slow_width(c)),
          slow_rows(pairs ? (c.rows * c.waves + BUILT_ROWS - 1) / BUILT_ROWS * BUILT_ROWS : 0),
          dot(pick_dot_rebuilt(c.key.bits, std::make_integer_sequence<int, 8>())) {
        keys = workspace.take<float>((size_t)BUILT_ROWS * n);
        query = workspace.take<float>((size_t)c.rows * D);
        slow_query = workspace.take<float>((size_t)c.rows * 2 * width);
        turned = workspace.take<float>(2 * (size_t)width);
        slow = workspace.take<float>((size_t)BUILT_ROWS * C);
        totals = workspace.take<float>((size_t)BUILT_ROWS * ranges);
        factors = workspace.take<int32_t>((size_t)BUILT_ROWS * width);
        weights = workspace.take<int16_t>((size_t)BUILT_ROWS * C);
        scale16 = workspace.take<int16_t>(C);
        zero16 = workspace.take<int16_t>(C);
    }

    // Rounds scales or zeros [C] of a block, times the weights' channel scales, to int16 up to `most`, in the order of
    // the weights. Returns the step.
    float quantize_ranges(const uint16_t* x, float most, int16_t* out) const {
        Floats top = broadcast_float(0);
        for (int c = 0; c < C; c += 16)
            top = maximum(top, absolute(load_fp16(x + c) * load_floats(call.channel_scale + c)));
        const float step = highest(top) / most;
        const Floats inverse = inverse_of(step);
        QuadWriter places{C / 32, 1};
        for (int c = 0; c < C; c += 16)
            places.store(to_nearest(load_fp16(x + c) * load_floats(call.channel_scale + c) * inverse), out);
        return step;
    }

    float most() const { return highest_weight(K, (float)((1 << call.key.bits) - 1)); }

    // Rows from `first` on of the weight of keys, times the scales of the block.
    void scale_weights(int first, float step, float base_step, RowWeights& row) {
        const Words ones = broadcast16(1);
        const int16_t* given = call.weights + (size_t)first * C;
        Words base = zero_words();
        for (int q = 0; q < C / 4; q++) {
            const Words weight = load(given + (size_t)q * BUILT_ROWS * 4);
            store(weights + (size_t)q * BUILT_ROWS * 4, multiply_q15(weight, broadcast_quad(scale16 + q * 4)));
            base = dot16(base, multiply_q15(weight, broadcast_quad(zero16 + q * 4)), ones);
        }
        alignas(64) int32_t halves[16];
        store(halves, base);
        row.weights = weights;
        for (int i = 0; i < BUILT_ROWS; i++) {
            const float row_scale = call.weight_scale[first + i] * 32768;
            row.steps[i] = row_scale * step;
            row.bias[i] = row_scale * base_step * (halves[2 * i] + halves[2 * i + 1]);
            if (call.bias) row.bias[i] += call.bias[first + i];
        }
    }

    // The query in the order of rows, turned back by the angles of the block's start.
    void take_query(const float* from, int b, int column) {
        const size_t at = b * call.start_batch + (size_t)column * call.rotary_pairs;
        for (int r = 0; r < call.rows; r++, from += D) {
            float* to = query + (size_t)r * D;
            std::memcpy(to, from, sizeof(float) * D);
            for (int j = 0; j < call.rotary_pairs; j++) {
                const float x = from[j], y = from[j + call.rotary_pairs];
                const float cos = call.start_cos ? call.start_cos[at + j] : 1;
                const float sin = call.start_cos ? call.start_sin[at + j] : 0;
                to[2 * j] = x * cos + y * sin;
                to[2 * j + 1] = y * cos - x * sin;
            }
            float *first = slow_query + (size_t)r * 2 * width, *second = first + width;
            std::fill_n(first, 2 * width, 0.0f);
            for (int j = 0; j < pairs; j++) {
                first[j] = to[call.built + 2 * j];
                second[j] = to[call.built + 2 * j + 1];
            }
        }
    }

    // The factors of slow pairs for row i of a group, query row r and wave k, as int16. Returns the step.
    float take_factors(int g, int i, int r, int k, float& bias) {
        const float *first = slow_query + (size_t)r * 2 * width, *second = first + width;
        const float *cos = call.wave_cos + (size_t)k * width, *sin = call.wave_sin + (size_t)k * width;
        const float* unit = call.slow_scale + (size_t)g * 2 * width;
        const float* base = call.slow_bias + (size_t)g * 2 * width;
        Floats top = broadcast_float(0), based = top;
        for (int j = 0; j < width; j += 16) {
            const Floats x = load_floats(first + j), y = load_floats(second + j);
            const Floats u = load_floats(cos + j), v = load_floats(sin + j);
            const Floats a = fma(x, u, y * v), b = y * u - x * v;
            based = fma(a, load_floats(base + j), fma(b, load_floats(base + width + j), based));
            const Floats a_scaled = a * load_floats(unit + j), b_scaled = b * load_floats(unit + width + j);
            top = maximum(top, maximum(absolute(a_scaled), absolute(b_scaled)));
            store_floats(turned + j, a_scaled);
            store_floats(turned + width + j, b_scaled);
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

    // Rows of slow pairs from `start` on, as weights for the codes of the block.
    void make_slow(const Ranges& found, int g, int start, RowWeights& row) {
        float steps[BUILT_ROWS];
        for (int i = 0; i < BUILT_ROWS; i++) {
            const int r = (start + i) / call.waves, k = (start + i) % call.waves;
            steps[i] = row.bias[i] = 0;
            if (r < call.rows)
                steps[i] = take_factors(g, i, r, k, row.bias[i]);
            else
                std::fill_n(factors + (size_t)i * width, width, 0);
        }
        const int16_t* given = call.slow_weights + (size_t)g * pairs * C * 2;
        Floats top[BUILT_ROWS], base[BUILT_ROWS];
        for (int i = 0; i < BUILT_ROWS; i++) top[i] = base[i] = broadcast_float(0);
        for (int c = 0; c < C; c += 16 * TILES) {
            Words acc[BUILT_ROWS][TILES];
            for (int i = 0; i < BUILT_ROWS; i++)
                for (int k = 0; k < TILES; k++) acc[i][k] = zero_words();
            for (int j = 0; j < pairs; j++) {
                Words weight[TILES];
                for (int k = 0; k < TILES; k++) weight[k] = load(given + ((size_t)j * C + c + k * 16) * 2);
                unroll<BUILT_ROWS>([&](auto i) {
                    const Words factor = broadcast(factors[(size_t)i * width + j]);
                    for (int k = 0; k < TILES; k++) acc[i][k] = dot16(acc[i][k], weight[k], factor);
                });
            }
            for (int k = 0; k < TILES; k++) {
                const int at = c + k * 16;
                Floats scale = load_floats(call.channel_scale + at), zero = broadcast_float(0);
                if (!call.key.per_token) {
                    zero = scale * load_fp16(found.zero + at);
                    scale = scale * load_fp16(found.scale + at);
                }
                for (int i = 0; i < BUILT_ROWS; i++) {
                    const Floats x = to_floats(acc[i][k]), scaled = x * scale;
                    base[i] = fma(x, zero, base[i]);
                    top[i] = maximum(top[i], absolute(scaled));
                    store_floats(slow + (size_t)i * C + at, scaled);
                }
            }
        }
        for (int i = 0; i < BUILT_ROWS; i++) {
            // `steps` is of the factors, the step of `slow` of the weights that are made of them.
            const float step = highest(top[i]) / most();
            const Floats inverse = inverse_of(step);
            row.steps[i] = step * steps[i];
            row.bias[i] += sum(base[i]) * steps[i];
            for (int j = 0; j < ranges; j++) {
                Floats total = broadcast_float(0);
                QuadWriter places{K / 32, BUILT_ROWS};
                int16_t* to = weights + (size_t)j * BUILT_ROWS * K + i * 4;
                for (int c = j * K; c < (j + 1) * K; c += 16) {
                    const Floats x = load_floats(slow + (size_t)i * C + c);
                    total = total + x;
                    places.store(to_nearest(x * inverse), to);
                }
                totals[i * ranges + j] = sum(total) * steps[i];
            }
        }
        row.weights = weights;
        row.totals = totals;
        row.next = nullptr;
    }

    // Multiplies BUILT_ROWS rows with the codes of the block.
    void multiply(const Ranges& found, const uint8_t* codes, const RowWeights& row) {
        const size_t tile = tile_bytes(K, call.key.bits);
        if (!call.key.per_token) {
            std::memset(keys, 0, sizeof(float) * BUILT_ROWS * n);
            for (int t = 0; t < n; t += 16 * TILES) {
                const uint8_t* here = codes + t / 16 * tile;
                // The codes are in the cache already: it is the weights of the next rows that are fetched.
                const bool more = row.next && t / 16 * tile < BUILT_ROWS * (size_t)C * 2;
                dot(here, K, row.weights, row.steps, row.bias, keys + t, n,
                    more ? row.next + t / 16 * tile - here : 0);
            }
            return;
        }
        const float none[BUILT_ROWS] = {};
        for (int t = 0; t < n; t += 16 * TILES) {
            Floats sums[BUILT_ROWS][TILES];
            for (int i = 0; i < BUILT_ROWS; i++)
                for (int k = 0; k < TILES; k++) sums[i][k] = broadcast_float(row.bias[i]);
            for (int j = 0; j < ranges; j++) {
                alignas(64) float partial[BUILT_ROWS * 16 * TILES] = {};
                dot(codes + (size_t)j * (n / 16) * tile + t / 16 * tile, K, row.weights + (size_t)j * BUILT_ROWS * K,
                    row.steps, none, partial, 16 * TILES, 0);
                for (int k = 0; k < TILES; k++) {
                    const size_t at = (size_t)j * n + t + k * 16;
                    const Floats scale = load_fp16(found.scale + at), zero = load_fp16(found.zero + at);
                    for (int i = 0; i < BUILT_ROWS; i++) {
                        const Floats total = broadcast_float(row.totals[i * ranges + j]);
                        const Floats sum = fma(load_floats(partial + (i * TILES + k) * 16), scale, sums[i][k]);
                        sums[i][k] = fma(zero, total, sum);
                    }
                }
            }
            for (int i = 0; i < BUILT_ROWS; i++)
                for (int k = 0; k < TILES; k++) store_floats(keys + (size_t)i * n + t + k * 16, sums[i][k]);
        }
    }

    // Rotates the keys of rows d to d + BUILT_ROWS - 1 and adds their part of the scores. cos and sin: of the block's
    // tokens, or of places in a block.
    void score_built(int d, const float* cos, const float* sin, float* out, size_t tokens) const {
        for (int t = 0; t < n; t += 16) {
            Floats key[BUILT_ROWS];
            for (int i = 0; i < BUILT_ROWS; i++) key[i] = load_floats(keys + (size_t)i * n + t);
            for (int i = 0; i < BUILT_ROWS && (d + i) / 2 < call.rotary_pairs; i += 2) {
                const size_t at = (d + i) / 2 * call.rope_channel + t;
                const Floats x = key[i], y = key[i + 1], u = load_floats(cos + at), v = load_floats(sin + at);
                key[i] = x * u - y * v;
                key[i + 1] = fma(y, u, x * v);
            }
            for (int r = 0; r < call.rows; r++) {
                const float* q = query + (size_t)r * D + d;
                float* score = out + r * tokens + t;
                Floats even = d ? load_floats(score) : broadcast_float(0), odd = broadcast_float(0);
                for (int i = 0; i < BUILT_ROWS; i += 2) {
                    even = fma(broadcast_float(q[i]), key[i], even);
                    odd = fma(broadcast_float(q[i + 1]), key[i + 1], odd);
                }
                store_floats(score, even + odd);
            }
        }
    }

    void score_slow(int first, float* out, size_t tokens) const {
        const int count = std::min(BUILT_ROWS, call.rows * call.waves - first);
        for (int i = 0; i < count; i++) {
            float* score = out + (first + i) / call.waves * tokens;
            const float* wave = call.wave + (size_t)((first + i) % call.waves) * n;
            for (int t = 0; t < n; t += 16) {
                const Floats added = fma(load_floats(wave + t), load_floats(keys + (size_t)i * n + t), load_floats(score + t));
                store_floats(score + t, added);
            }
        }
    }

    void run(int b, int column, int g) {
        const size_t tokens = (size_t)call.columns * n, at = (size_t)column * n;
        const int64_t id = call.table[b * call.table_stride + column];
        const Ranges found(call.key, id);
        const auto* codes = at_address<uint8_t>(call.key.codes[id]);
        const size_t angles = call.start_cos ? 0 : b * call.rope_batch + at, head = (size_t)b * call.kv_heads + g;
        float* out = call.scores + head * call.rows * tokens + at;
        take_query(call.query + head * call.rows * D, b, column);
        float step = 0, base_step = 0;
        if (!call.key.per_token) {
            step = quantize_ranges(found.scale, most(), scale16);
            base_step = quantize_ranges(found.zero, 32767, zero16);
        }
        RowWeights row = {};
        for (int d = 0; d < call.built; d += BUILT_ROWS) {
            const int first = g * D + d;
            if (call.key.per_token) {
                row.weights = call.weights + (size_t)first * C;
                row.totals = call.weight_sums + (size_t)first * ranges;
                for (int i = 0; i < BUILT_ROWS; i++) {
                    row.steps[i] = call.weight_scale[first + i];
                    row.bias[i] = call.bias ? call.bias[first + i] : 0;
                }
            } else {
                scale_weights(first, step, base_step, row);
            }
            const int16_t* next = call.weights + (size_t)(first + BUILT_ROWS) * C;
            row.next = d + BUILT_ROWS < call.built ? (const uint8_t*)next : nullptr;
            multiply(found, codes, row);
            score_built(d, call.cos + angles, call.sin + angles, out, tokens);
        }
        if (!call.built)
            for (int r = 0; r < call.rows; r++) std::fill_n(out + r * tokens, n, 0.0f);
        for (int first = 0; first < slow_rows; first += BUILT_ROWS) {
            make_slow(found, g, first, row);
            multiply(found, codes, row);
            score_slow(first, out, tokens);
        }
    }
};

// xq_rebuild_scores.
inline int rebuild_scores(const xq_rebuild_scores& call) {
    int failed = 0;
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(RebuiltKeys::bytes(call));
        failed += !ready;
#pragma omp for schedule(dynamic) collapse(3)
        for (int b = 0; b < call.batch; b++)
            for (int column = 0; column < call.columns; column++)
                for (int g = 0; g < call.kv_heads; g++) {
                    if (!ready || column >= columns_of(call, b, call.block)) continue;
                    workspace.next = workspace.base;
                    RebuiltKeys(call, workspace).run(b, column, g);
                }
    }
    return failed ? XQ_NO_MEMORY : XQ_DONE;
}

}  // namespace
