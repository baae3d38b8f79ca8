// Attention over packed states X that keys and values are products of, without either being written out for the
// whole context. A block and head at a time, keys K = X W^T + b are rebuilt, rotated by RoPE and scored in the CPU's
// cache. Values are never rebuilt: p (X W) = (p X) W, so what is packed is summed, and torch multiplies the sum by W.
//
// K is an integer product of codes and int16 weights. With x[t, c] = code * scale + zero:
//
//     ranges per channel:  k[t, d] = sum_c (W[d, c] scale_c) code[t, c] + sum_c W[d, c] zero_c
//     ranges per token:    k[t, d] = sum over ranges j of (scale_tj sum_c W[d, c] code[t, c] + zero_tj sum_c W[d, c])
//
// with c in range j. The scores equal those of the keys that `methods.xquant.Rematerialized.keys` makes of decoded
// states, the sums those of the decoded states, to a relative error below 1e-3 of the output.
#pragma once
#include "packed_values.h"

namespace {

// Channels of a key that share unpacked codes: quads of weights of 8 channels fill a vector. kernels/cpu/rebuild.py
// lays the weights out so.
constexpr int BUILT_ROWS = 8;

// Columns of the table that have blocks of sequence b.
template <class Call>
int columns_of(const Call& call, int b, int n) {
    return call.limits ? std::min((call.limits[b] + n - 1) / n, call.columns) : call.columns;
}

template <int... B>
DotCodes pick_dot_rebuilt(int bits, std::integer_sequence<int, B...>) {
    static constexpr DotCodes all[] = {dot_codes<B + 1, BUILT_ROWS, TILES>...};
    return all[bits - 1];
}

// The keys of one block and head.
struct RebuiltKeys {
    const xq_rebuild_scores& call;
    const int D, n, C, K, ranges;  // K: channels that one product sums over, a range or all
    const DotCodes dot;
    float* keys;                // [D, n]
    int16_t* weights;           // [K / 4, BUILT_ROWS, 4] times scales of the block
    int16_t *scale16, *zero16;  // [C], in the order of weights

    static int summed(const xq_rebuild_scores& c) { return c.key.per_token ? c.key.group : c.channels; }
    static size_t bytes(const xq_rebuild_scores& c) {
        return 4 * ((size_t)c.head_size * c.block + c.channels * 2) + 2 * (size_t)BUILT_ROWS * summed(c) + 4 * 64;
    }

    RebuiltKeys(const xq_rebuild_scores& c, Workspace& workspace)
        : call(c),
          D(c.head_size),
          n(c.block),
          C(c.channels),
          K(summed(c)),
          ranges(c.channels / K),
          dot(pick_dot_rebuilt(c.key.bits, std::make_integer_sequence<int, 8>())) {
        keys = workspace.take<float>((size_t)D * n);
        weights = workspace.take<int16_t>((size_t)BUILT_ROWS * K);
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

    // Ranges per channel: weights are multiplied by the scales anew for each block.
    void build_by_channel(const Ranges& found, const uint8_t* codes, int g) {
        const float most = highest_weight(C, (float)((1 << call.key.bits) - 1));
        const float step = quantize_ranges(found.scale, most, scale16),
                    base_step = quantize_ranges(found.zero, 32767, zero16);
        const Words ones = broadcast16(1);
        float steps[BUILT_ROWS], bias[BUILT_ROWS];
        for (int d = 0; d < D; d += BUILT_ROWS) {
            const int16_t* given = call.weights + (size_t)(g * D + d) * C;
            Words base = zero_words();
            for (int q = 0; q < C / 4; q++) {
                const Words weight = load(given + (size_t)q * BUILT_ROWS * 4);
                store(weights + (size_t)q * BUILT_ROWS * 4, multiply_q15(weight, broadcast_quad(scale16 + q * 4)));
                base = dot16(base, multiply_q15(weight, broadcast_quad(zero16 + q * 4)), ones);
            }
            alignas(64) int32_t halves[16];
            store(halves, base);
            for (int i = 0; i < BUILT_ROWS; i++) {
                const float row_scale = call.weight_scale[g * D + d + i] * 32768;
                steps[i] = row_scale * step;
                bias[i] = row_scale * base_step * (halves[2 * i] + halves[2 * i + 1]);
                if (call.bias) bias[i] += call.bias[g * D + d + i];
            }
            for (int t = 0; t < n; t += 16 * TILES) {
                for (int i = 0; i < BUILT_ROWS; i++) std::memset(keys + (size_t)(d + i) * n + t, 0, 64 * TILES);
                const uint8_t* tile = codes + t / 16 * tile_bytes(K, call.key.bits);
                // The codes are in the cache already: it is the weights of the next channels that are fetched.
                const size_t asked = (size_t)(t / 16) * tile_bytes(K, call.key.bits), row = (size_t)BUILT_ROWS * C * 2;
                const bool more = d + BUILT_ROWS < D && asked < row;
                dot(tile, K, weights, steps, bias, keys + (size_t)d * n + t, n,
                    more ? (const uint8_t*)given + row + asked - tile : 0);
            }
        }
    }

    // Ranges per token: one product for each range, which the lanes scale.
    void build_by_token(const Ranges& found, const uint8_t* codes, int g) {
        const float none[BUILT_ROWS] = {};
        const size_t all = (size_t)n * K * call.key.bits / 8;
        for (int d = 0; d < D; d += BUILT_ROWS) {
            const int first = g * D + d;
            for (int t = 0; t < n; t += 16 * TILES) {
                Floats sums[BUILT_ROWS][TILES];
                for (int i = 0; i < BUILT_ROWS; i++)
                    for (int k = 0; k < TILES; k++) sums[i][k] = broadcast_float(call.bias ? call.bias[first + i] : 0);
                for (int j = 0; j < ranges; j++) {
                    alignas(64) float partial[BUILT_ROWS * 16 * TILES] = {};
                    dot(codes + j * all + t / 16 * tile_bytes(K, call.key.bits), K,
                        call.weights + (size_t)first * C + (size_t)j * BUILT_ROWS * K, call.weight_scale + first, none,
                        partial, 16 * TILES, 0);
                    for (int k = 0; k < TILES; k++) {
                        const size_t at = (size_t)j * n + t + k * 16;
                        const Floats scale = load_fp16(found.scale + at), zero = load_fp16(found.zero + at);
                        for (int i = 0; i < BUILT_ROWS; i++) {
                            const Floats total = broadcast_float(call.weight_sums[(size_t)(first + i) * ranges + j]);
                            const Floats sum = fma(load_floats(partial + (i * TILES + k) * 16), scale, sums[i][k]);
                            sums[i][k] = fma(zero, total, sum);
                        }
                    }
                }
                for (int i = 0; i < BUILT_ROWS; i++)
                    for (int k = 0; k < TILES; k++) store_floats(keys + (size_t)(d + i) * n + t + k * 16, sums[i][k]);
            }
        }
    }

    // RoPE of channels c and c + rotary_pairs; cos and sin are [rotary_pairs, tokens], at the block's first token.
    void rotate(const float* cos, const float* sin, size_t tokens) {
        for (int c = 0; c < call.rotary_pairs; c++)
            for (int t = 0; t < n; t += 16) {
                float *a = keys + (size_t)c * n + t, *b = a + (size_t)call.rotary_pairs * n;
                const Floats x = load_floats(a), y = load_floats(b);
                const Floats u = load_floats(cos + c * tokens + t), v = load_floats(sin + c * tokens + t);
                store_floats(a, x * u - y * v);
                store_floats(b, fma(y, u, x * v));
            }
    }

    void score(const float* query, float* out, size_t tokens) const {
        for (int r = 0; r < call.rows; r++, query += D, out += tokens)
            for (int t = 0; t < n; t += 16 * TILES) {
                Floats sums[TILES];
                for (int k = 0; k < TILES; k++) sums[k] = broadcast_float(0);
                for (int d = 0; d < D; d++)
                    for (int k = 0; k < TILES; k++)
                        sums[k] =
                            fma(broadcast_float(query[d]), load_floats(keys + (size_t)d * n + t + k * 16), sums[k]);
                for (int k = 0; k < TILES; k++) store_floats(out + t + k * 16, sums[k]);
            }
    }

    void run(int b, int column, int g) {
        const size_t tokens = (size_t)call.columns * n, at = (size_t)column * n;
        const int64_t id = call.table[b * call.table_stride + column];
        const Ranges found(call.key, id);
        const auto* codes = at_address<uint8_t>(call.key.codes[id]);
        call.key.per_token ? build_by_token(found, codes, g) : build_by_channel(found, codes, g);
        const size_t angles = (size_t)b * call.rope_batch + at;
        rotate(call.cos + angles, call.sin + angles, call.rope_channel);
        const size_t head = (size_t)b * call.kv_heads + g;
        score(call.query + head * call.rows * D, call.scores + head * call.rows * tokens + at, tokens);
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

// xq_rebuild_sum: the values of an attention with one key/value head of all channels, whose weights are given.
inline int rebuild_sum(const xq_rebuild_sum& given) {
    xq_attend call = {};
    call.value = given.value;
    call.block = given.block;
    call.kv_heads = call.queries = 1;
    call.head_size = given.channels;
    call.group_heads = given.rows;
    const int threads = std::max(given.threads, 1), splits = std::min(threads, given.columns), n = given.block;
    const size_t state_size = OnlineSoftmax::floats(given.rows, given.channels), tokens = (size_t)given.columns * n;
    static thread_local Workspace shared;
    if (!shared.reserve(sizeof(float) * state_size * splits * given.batch)) return XQ_NO_MEMORY;
    float* states = shared.take<float>(state_size * splits * given.batch);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(Scratch::bytes(call) + PackedValues::bytes(call));
        failed += !ready;
#pragma omp for schedule(static) collapse(2)
        for (int b = 0; b < given.batch; b++)
            for (int split = 0; split < splits; split++) {
                if (!ready) continue;
                workspace.next = workspace.base;
                OnlineSoftmax softmax(states + ((size_t)b * splits + split) * state_size, given.rows, given.channels);
                softmax.clear();
                PackedValues values(call, b, 0, Scratch(call, workspace), softmax, workspace);
                const int64_t columns = columns_of(given, b, n);
                const int last = (int)((split + 1) * columns / splits);
                for (int j = (int)(split * columns / splits); j < last; j++) {
                    const int32_t* ids = given.table + b * given.table_stride;
                    for (int r = 0; r < given.rows; r++) {
                        const float* weights = given.weights + ((size_t)b * given.rows + r) * tokens + (size_t)j * n;
                        std::memcpy(values.scores + (size_t)r * n, weights, sizeof(float) * n);
                        softmax.largest_weight[r] = highest_of(weights, n);
                    }
                    values.add(ids[j], {ids[std::min(j + 1, last - 1)], 0});
                }
            }
    }
    if (failed) return XQ_NO_MEMORY;
    for (int b = 0; b < given.batch; b++)
        for (int r = 0; r < given.rows; r++) {
            float* out = given.out + ((size_t)b * given.rows + r) * given.channels;
            for (int split = 0; split < splits; split++) {
                const float* sums =
                    OnlineSoftmax(states + ((size_t)b * splits + split) * state_size, given.rows, given.channels).sums +
                    (size_t)r * given.channels;
                for (int c = 0; c < given.channels; c++) out[c] = split ? out[c] + sums[c] : sums[c];
            }
        }
    return XQ_DONE;
}

}  // namespace
