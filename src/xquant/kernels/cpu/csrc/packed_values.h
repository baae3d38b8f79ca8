// Adds the weighted values of one packed block to the sums of an online softmax: o[c] += sum_t p_t v[t, c].
//
//     ranges per token:    sum_t (p_t scale_t) code[t, c] + sum_t p_t zero_t
//     ranges per channel:  scale_c sum_t p_t code[t, c] + zero_c sum_t p_t
//
// The sums over codes are integer dot products with weights that are rounded to int16, p_t scale_t or p_t; the others
// are one number a range or a query. An outlier adds p_t times its residual. It equals p V over the values that
// `CompressedLayer` decodes, to a relative error below 1e-3 of the output.
#pragma once
#include "online_softmax.h"
#include "operand.h"

namespace {

// The values of a task. `scores` holds the weights p, and `softmax` the sums.
struct PackedValues : PackedOperand {
    const OnlineSoftmax softmax;
    float* token_scale;  // [2, n] scales and zeros of one range of every token
    float* block_sums;   // [MAX_ROWS, D] of one block, where channels have a second scale

    static size_t bytes(const xq_attend& c) {
        return sizeof(float) * (2 * c.block + (size_t)MAX_ROWS * c.head_size) + 2 * 64;
    }

    PackedValues(const xq_attend& c, int g, const Scratch& scratch, OnlineSoftmax softmax, Workspace& workspace)
        : PackedOperand(c, c.value, VALUE_LIMIT, g, scratch), softmax(softmax) {
        token_scale = workspace.take<float>(2 * (size_t)n);
        block_sums = workspace.take<float>((size_t)MAX_ROWS * D);
    }

    // Rounds the weights of row i of `count`: p times `scale` (null: 1), none of which is above `top`. Its bias is the
    // sum of p times `zero` (null: 0).
    void quantize_weights(const float* p, const float* scale, const float* zero, float top, int i, int count) {
        const float most =
            operand.levels ? highest_int16_weight(VALUE_LIMIT) : highest_weight(n, (float)((1 << operand.bits) - 1));
        const float step = top / most;
        const Floats inverse = inverse_of(step);
        QuadWriter places{n / 32, count};
        Floats constant = broadcast_float(0);
        for (int t = 0; t < n; t += 16) {
            const Floats weight = load_floats(p + t);
            if (zero) constant = fma(weight, load_floats(zero + t), constant);
            const Floats scaled = scale ? weight * load_floats(scale + t) : weight;
            places.store(to_nearest(scaled * inverse), weights + i * 4);
        }
        bias[i] = zero ? sum(constant) : 0;
        steps[i] = operand.levels ? step / VALUE_LIMIT : step;
    }

    // Adds weighted codes of `tiles` tiles of channels, and the bias, to `out`.
    void add_tiles(const uint8_t* codes, int tiles, int count, float* out, size_t stride, ptrdiff_t ahead) {
        if (operand.levels) {
            const CodesToInt16 to_int16 = pick_codes_to_int16(operand.bits, true);
            const Table table = load_table(table16);
            for (int k = 0; k < tiles; k++)
                to_int16(codes + k * tile_bytes(n, operand.bits), n, table, int16_tiles + (size_t)k * (n / 2), ahead);
            (tiles == 1 ? pick_dot_int16<1>(count) : pick_dot_int16<TILES>(count))(int16_tiles, n, weights, steps, bias,
                                                                                   out, stride);
        } else {
            (tiles == 1 ? pick_dot_codes<1>(operand.bits, count) : pick_dot_codes<TILES>(operand.bits, count))(
                codes, n, weights, steps, bias, out, stride, ahead);
        }
    }

    // Ranges per token [ranges, n], to `sums` [count, D]. Weights are rounded anew where the next range begins.
    void add_by_token(const uint8_t* codes, const Ranges& ranges, int r, int count, float* sums, ptrdiff_t ahead) {
        const Floats zero_scales = broadcast_float(operand.zero_scales);
        float *scale = token_scale, *zero = token_scale + n;
        int prepared = -1;
        for (int c = 0; c < D;) {
            const int j = (g * D + c) / operand.group;
            // A range may end inside a head, and a head inside a range.
            const int end = c + 16 * TILES;
            const int tiles = end <= D && (g * D + end - 1) / operand.group == j ? TILES : 1;
            if (j != prepared) {
                prepared = j;
                Floats high = broadcast_float(0);
                for (int t = 0; t < n; t += 16) {
                    Floats s = load_fp16(ranges.scale + (size_t)j * n + t);
                    high = maximum(high, absolute(s));
                    store_floats(scale + t, s);
                    store_floats(zero + t, ranges.zero ? load_fp16(ranges.zero + (size_t)j * n + t) : s * zero_scales);
                }
                const float highest_scale = highest(high);
                for (int i = 0; i < count; i++)
                    quantize_weights(scores + (size_t)(r + i) * n, scale, zero,
                                     softmax.largest_weight[r + i] * highest_scale, i, count);
            }
            add_tiles(codes + c / 16 * tile_bytes(n, operand.bits), tiles, count, sums + c, D, r ? 0 : ahead);
            c += 16 * tiles;
        }
    }

    // The same where channels have a second scale.
    void add_by_token_and_channel(const uint8_t* codes, const Ranges& ranges, const uint16_t* second, int r, int count,
                                  ptrdiff_t ahead) {
        std::memset(block_sums, 0, sizeof(float) * count * D);
        add_by_token(codes, ranges, r, count, block_sums, ahead);
        float* sums = softmax.sums + (size_t)r * D;
        for (int c = 0; c < D; c += 16) {
            const Floats scale = load_fp16(second + c);
            for (int at = c; at < count * D; at += D)
                store_floats(sums + at, fma(load_floats(block_sums + at), scale, load_floats(sums + at)));
        }
    }

    // Ranges per channel, one a block.
    void add_by_channel(const uint8_t* codes, const Ranges& ranges, int r, int count, ptrdiff_t ahead) {
        float totals[MAX_ROWS];
        alignas(64) float partial[MAX_ROWS * 16 * TILES];
        for (int i = 0; i < count; i++) {
            const float* p = scores + (size_t)(r + i) * n;
            Floats total = broadcast_float(0);
            for (int t = 0; t < n; t += 16) total = total + load_floats(p + t);
            totals[i] = sum(total);
            quantize_weights(p, nullptr, nullptr, softmax.largest_weight[r + i], i, count);
        }
        for (int c = 0; c < D; c += 16 * TILES) {
            std::memset(partial, 0, sizeof partial);
            add_tiles(codes + c / 16 * tile_bytes(n, operand.bits), TILES, count, partial, 16 * TILES, r ? 0 : ahead);
            for (int i = 0; i < count; i++)
                for (int k = 0; k < TILES; k++) {
                    float* to = softmax.sums + (size_t)(r + i) * D + c + k * 16;
                    Floats scale = load_fp16(ranges.scale + g * D + c + k * 16);
                    Floats zero = load_fp16(ranges.zero + g * D + c + k * 16);
                    Floats added =
                        fma(load_floats(partial + (i * TILES + k) * 16), scale, zero * broadcast_float(totals[i]));
                    store_floats(to, load_floats(to) + added);
                }
        }
    }

    void add_outliers(int64_t id) {
        each_outlier(id, [&](int t, int c, float residual) {
            const float* weight = scores + t;
            float* sum = softmax.sums + c;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++, weight += n, sum += D) *sum += *weight * residual;
        });
    }

    void add(int64_t id, HeadBlock next) {
        const Ranges ranges(operand, id);
        const auto* codes = at_address<uint8_t>(codes_at({id, g}));
        const ptrdiff_t ahead = (ptrdiff_t)(codes_at(next) - codes_at({id, g}));
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            if (operand.second)
                add_by_token_and_channel(codes, ranges, at_address<uint16_t>(operand.second[id]) + g * D, r, count,
                                         ahead);
            else if (operand.per_token)
                add_by_token(codes, ranges, r, count, softmax.sums + (size_t)r * D, ahead);
            else
                add_by_channel(codes, ranges, r, count, ahead);
        }
        if (operand.outlier_count) add_outliers(id);
    }
};

}  // namespace
