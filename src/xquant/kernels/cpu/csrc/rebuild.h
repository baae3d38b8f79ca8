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
// For slow pairs (turning.h), rows that are made for a block are multiplied with the codes in place of W.
//
// The scores equal those of the keys that `methods.xquant.Rematerialized.keys` makes of decoded states, the sums those
// of the decoded states, to a relative error below 1e-3 of the output.
#pragma once
#include "rebuild_sum.h"
#include "turning.h"

namespace {

// Channels of rows that are made for a block, filled up to what is made at a time. kernels/cpu/rebuild.py fills the
// weights of slow pairs up to as many.
inline int made_channels(int channels) { return (channels + 31) / 32 * 32; }

template <bool REST, int... B>
DotCodes pick_dot_rebuilt(int bits, std::integer_sequence<int, B...>) {
    static constexpr DotCodes all[] = {dot_codes<B + 1, BUILT_ROWS, TILES, REST>...};
    return all[bits - 1];
}
inline DotCodes pick_dot_rebuilt(int bits, bool rest) {
    const auto widths = std::make_integer_sequence<int, 8>();
    return rest ? pick_dot_rebuilt<true>(bits, widths) : pick_dot_rebuilt<false>(bits, widths);
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
    const DotCodes dot;
    TurnedScores turned;
    const size_t rest_size;     // of `rest`, of one range
    float* slow;                // [BUILT_ROWS, made C] the rows of slow pairs
    float* totals;              // [BUILT_ROWS, ranges] of their weights
    int16_t* weights;           // [C / 4, BUILT_ROWS, 4] of rows that are made for a block
    int16_t *scale16, *zero16;  // [C], in the order of weights
    uint8_t* rest;              // [ranges, n / 16, quads, 64] the codes that are in no unit of a tile (tiles.h)

    static int summed(const xq_rebuild_scores& c) { return c.key.per_token ? c.key.group : c.channels; }
    static size_t rest_of_range(const xq_rebuild_scores& c) {
        const int quads = rest_quads(summed(c));
        return quads ? (size_t)(c.block / 16 * quads + 8) * STRIP : 0;
    }
    static size_t bytes(const xq_rebuild_scores& c) {
        const size_t rows = BUILT_ROWS, C = c.channels, ranges = C / summed(c);
        return TurnedScores::bytes(c.turning, c.head_size, c.block, c.rows) + 4 * rows * (made_channels(C) + ranges) +
               2 * (rows + 2) * C + ranges * rest_of_range(c) + 6 * 64;
    }

    RebuiltKeys(const xq_rebuild_scores& c, Workspace& workspace)
        : call(c),
          D(c.head_size),
          n(c.block),
          C(c.channels),
          K(summed(c)),
          ranges(c.channels / K),
          dot(pick_dot_rebuilt(c.key.bits, rest_quads(K) > 0)),
          turned(c.turning, c.head_size, c.block, c.rows, workspace),
          rest_size(rest_of_range(c)) {
        slow = workspace.take<float>((size_t)BUILT_ROWS * made_channels(C));
        totals = workspace.take<float>((size_t)BUILT_ROWS * ranges);
        weights = workspace.take<int16_t>((size_t)BUILT_ROWS * C);
        scale16 = workspace.take<int16_t>(C);
        zero16 = workspace.take<int16_t>(C);
        rest = workspace.take<uint8_t>(ranges * rest_size);
    }

    // Of one range of tokens, or of all channels.
    size_t range_bytes() const { return tiles_bytes(K, n, call.key.bits); }

    void unpack_rest(const uint8_t* codes) const {
        for (int j = 0; rest_size && j < ranges; j++)
            pick_unpack_strip(call.key.bits)(codes + j * range_bytes() + n / 16 * tile_bytes(K, call.key.bits),
                                             n / 16 * rest_quads(K), rest + j * rest_size, STRIP, STRIP);
    }
    // Of the tiles of range j from token t on.
    const uint8_t* rest_of(int j, int t) const { return rest + j * rest_size + (size_t)t / 16 * rest_quads(K) * STRIP; }

    // Rounds scales or zeros [C] of a block, times the weights' channel scales, to int16 up to `most`, in the order of
    // the weights. Returns the step.
    float quantize_ranges(const uint16_t* x, float most, int16_t* out) const {
        Floats top = broadcast_float(0);
        for (int c = 0; c < C; c += 16)
            top = maximum(top, absolute(load_fp16(x + c, C - c) * load_floats(call.channel_scale + c, C - c)));
        const float step = highest(top) / most;
        const Floats inverse = inverse_of(step);
        QuadWriter places(C, 1);
        each_vector(C, [&](int c, int count) {
            const Floats scaled = load_fp16(x + c, count) * load_floats(call.channel_scale + c, count);
            places.store(to_nearest(scaled * inverse), out, count);
        });
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

    // Rows of slow pairs from `start` on, as weights for the codes of the block.
    void make_slow(const Ranges& found, int g, int start, RowWeights& row) {
        const int pairs = turned.pairs, width = turned.width;
        const size_t head = (size_t)g * 2 * width;
        float steps[BUILT_ROWS];
        for (int i = 0; i < BUILT_ROWS; i++)
            steps[i] = turned.take_factors(start + i, i, call.slow_scale + head, call.slow_bias + head, row.bias[i]);
        const int made = made_channels(C);
        const int16_t* given = call.slow_weights + (size_t)g * pairs * made * 2;
        Floats top[BUILT_ROWS], base[BUILT_ROWS];
        for (int i = 0; i < BUILT_ROWS; i++) top[i] = base[i] = broadcast_float(0);
        for (int c = 0; c < C; c += 16 * TILES) {
            Words acc[BUILT_ROWS][TILES];
            for (int i = 0; i < BUILT_ROWS; i++)
                for (int k = 0; k < TILES; k++) acc[i][k] = zero_words();
            for (int j = 0; j < pairs; j++) {
                Words weight[TILES];
                for (int k = 0; k < TILES; k++) weight[k] = load(given + ((size_t)j * made + c + k * 16) * 2);
                unroll<BUILT_ROWS>([&](auto i) {
                    const Words factor = broadcast(turned.factors[(size_t)i * width + j]);
                    for (int k = 0; k < TILES; k++) acc[i][k] = dot16(acc[i][k], weight[k], factor);
                });
            }
            for (int k = 0; k < TILES; k++) {
                const int at = c + k * 16;
                Floats scale = load_floats(call.channel_scale + at, C - at), zero = broadcast_float(0);
                if (!call.key.per_token) {
                    zero = scale * load_fp16(found.zero + at, C - at);
                    scale = scale * load_fp16(found.scale + at, C - at);
                }
                for (int i = 0; i < BUILT_ROWS; i++) {
                    const Floats x = to_floats(acc[i][k]), scaled = x * scale;
                    base[i] = fma(x, zero, base[i]);
                    top[i] = maximum(top[i], absolute(scaled));
                    store_floats(slow + (size_t)i * made + at, scaled);
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
                QuadWriter places(K, BUILT_ROWS);
                int16_t* to = weights + (size_t)j * BUILT_ROWS * K + i * 4;
                each_vector(K, [&](int c, int count) {
                    const Floats x = load_floats(slow + (size_t)i * made + j * K + c, count);
                    total = total + x;
                    places.store(to_nearest(x * inverse), to, count);
                });
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
            std::memset(turned.keys, 0, sizeof(float) * BUILT_ROWS * n);
            for (int t = 0; t < n; t += 16 * TILES) {
                const uint8_t* here = codes + t / 16 * tile;
                // The codes are in the cache already: it is the weights of the next rows that are fetched.
                const bool more = row.next && t / 16 * tile < BUILT_ROWS * (size_t)C * 2;
                dot(here, K, row.weights, row.steps, row.bias, turned.keys + t, n,
                    more ? row.next + t / 16 * tile - here : 0, rest_of(0, t));
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
                dot(codes + j * range_bytes() + t / 16 * tile, K, row.weights + (size_t)j * BUILT_ROWS * K, row.steps,
                    none, partial, 16 * TILES, 0, rest_of(j, t));
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
                for (int k = 0; k < TILES; k++) store_floats(turned.keys + (size_t)i * n + t + k * 16, sums[i][k]);
        }
    }

    void run(int b, int column, int g) {
        const size_t tokens = (size_t)call.columns * n, at = (size_t)column * n;
        const int64_t id = call.table[b * call.table_stride + column];
        const Ranges found(call.key, id);
        const auto* codes = at_address<uint8_t>(call.key.codes[id]);
        const size_t head = (size_t)b * call.kv_heads + g;
        float* out = call.scores + head * call.rows * tokens + at;
        for (int r = 0; r < call.rows; r++) std::fill_n(out + r * tokens, n, 0.0f);
        turned.take_query(call.query + head * call.rows * D, b, column);
        unpack_rest(codes);
        float step = 0, base_step = 0;
        if (!call.key.per_token) {
            step = quantize_ranges(found.scale, most(), scale16);
            base_step = quantize_ranges(found.zero, 32767, zero16);
        }
        RowWeights row = {};
        for (int d = 0; d < call.turning.built; d += BUILT_ROWS) {
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
            row.next = d + BUILT_ROWS < call.turning.built ? (const uint8_t*)next : nullptr;
            multiply(found, codes, row);
            turned.score_built(d, turned.angles(b, column), 0, n, out, tokens);
        }
        for (int first = 0; first < turned.slow_rows; first += BUILT_ROWS) {
            make_slow(found, g, first, row);
            multiply(found, codes, row);
            turned.score_slow(first, 0, n, out, tokens);
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
