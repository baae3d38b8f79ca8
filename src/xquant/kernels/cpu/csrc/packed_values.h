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

// The values of a task. `scores` holds the weights p, and `softmax` the sums [rows, width]; what lies behind the
// channels of a head is not used.
struct PackedValues : PackedOperand {
    const OnlineSoftmax softmax;
    const int start, width;  // the head's first channel in a row
    float* token_scale;  // [2, n] scales and zeros of one range of every token
    float* block_sums;   // [MAX_ROWS, width] of one block, where channels have a second scale

    static size_t bytes(const xq_attend& c) {
        return sizeof(float) * (2 * c.block + (size_t)MAX_ROWS * whole_vectors(c.head_size)) + 2 * 64;
    }

    PackedValues(const xq_attend& c, int g, const Scratch& scratch, OnlineSoftmax softmax, Workspace& workspace)
        : PackedOperand(c, c.value, VALUE_LIMIT, g, scratch), softmax(softmax), start(g * D), width(softmax.width) {
        token_scale = workspace.take<float>(2 * (size_t)n);
        block_sums = workspace.take<float>((size_t)MAX_ROWS * width);
    }

    // The tiles of a block hold the channels of all heads.
    uint64_t codes_at(HeadBlock at) const {
        return operand.codes[at.id] + (size_t)(at.head * D / 16) * tile_bytes(n, operand.bits);
    }
    const uint8_t* tile_of(const uint8_t* codes, int tile) const {
        return codes + (size_t)(tile - start / 16) * tile_bytes(n, operand.bits);
    }
    // How many tiles are added to the sums as they are, from channel c of the row on, up to `end`; 0: one of which only
    // a part is wanted. A tile may be at the border of two heads, or of ranges.
    int tiles_from(int c, int end) const {
        const int stop = end == start + D ? whole_vectors(end) : end;  // the last sums of a head have room behind them
        return c % 16 || c + 16 > stop ? 0 : c + 16 * TILES <= stop ? TILES : 1;
    }
    // Adds channels c to before `end` of a tile's sums, partial [count, 32] with zeros after each 16, to `sums`.
    void add_part(const float* partial, int c, int end, int count, float* sums) const {
        for (int i = 0; i < count; i++) {
            const float* from = partial + i * 32 + c % 16;
            float* to = sums + (size_t)i * width + c - start;
            if (end % 16 == 0 && c - start + 16 <= width)
                store_floats(to, load_floats(to) + load_floats(from));
            else
                for (int k = 0; k < end - c; k++) to[k] += from[k];
        }
    }

    // Rounds the weights of row i of `count`: p times `scale` (null: 1), none of which is above `top`. Its bias is the
    // sum of p times `zero` (null: 0).
    void quantize_weights(const float* p, const float* scale, const float* zero, float top, int i, int count) {
        const float most =
            operand.levels ? highest_int16_weight(VALUE_LIMIT) : highest_weight(n, (float)((1 << operand.bits) - 1));
        const float step = top / most;
        const Floats inverse = inverse_of(step);
        QuadWriter places(n, count);
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
                codes, n, weights, steps, bias, out, stride, ahead, nullptr);
        }
    }

    // Ranges per token [ranges, n], to `sums` [count, D]. Weights are rounded anew where the next range begins.
    void add_by_token(const uint8_t* codes, const Ranges& ranges, int r, int count, float* sums, ptrdiff_t ahead) {
        const Floats zero_scales = broadcast_float(operand.zero_scales);
        float *scale = token_scale, *zero = token_scale + n;
        int prepared = -1;
        for (int c = start; c < start + D;) {
            const int j = c / operand.group;
            // A range may end inside a head, and a head inside a range.
            const int end = std::min((j + 1) * operand.group, start + D);
            const int tiles = tiles_from(c, end);
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
            const uint8_t* here = tile_of(codes, c / 16);
            if (tiles) {
                add_tiles(here, tiles, count, sums + c - start, width, r ? 0 : ahead);
                c += 16 * tiles;
                continue;
            }
            alignas(64) float partial[MAX_ROWS * 32] = {};
            add_tiles(here, 1, count, partial, 32, r ? 0 : ahead);
            const int stop = std::min((c / 16 + 1) * 16, end);
            add_part(partial, c, stop, count, sums);
            c = stop;
        }
    }

    // The same where channels have a second scale.
    void add_by_token_and_channel(const uint8_t* codes, const Ranges& ranges, const uint16_t* second, int r, int count,
                                  ptrdiff_t ahead) {
        std::memset(block_sums, 0, sizeof(float) * count * width);
        add_by_token(codes, ranges, r, count, block_sums, ahead);
        float* sums = softmax.sums + (size_t)r * width;
        for (int c = 0; c < D; c += 16) {
            const Floats scale = load_fp16(second + c, D - c);
            for (int at = c; at < count * width; at += width)
                store_floats(sums + at, fma(load_floats(block_sums + at), scale, load_floats(sums + at)));
        }
    }

    // Ranges per channel, one a block.
    void add_by_channel(const uint8_t* codes, const Ranges& ranges, int r, int count, ptrdiff_t ahead) {
        float totals[MAX_ROWS];
        alignas(64) float partial[MAX_ROWS * 32];
        for (int i = 0; i < count; i++) {
            const float* p = scores + (size_t)(r + i) * n;
            Floats total = broadcast_float(0);
            for (int t = 0; t < n; t += 16) total = total + load_floats(p + t);
            totals[i] = sum(total);
            quantize_weights(p, nullptr, nullptr, softmax.largest_weight[r + i], i, count);
        }
        for (int c = start; c < start + D;) {
            const int tiles = std::max(tiles_from(c, start + D), 1), first = c / 16 * 16;
            std::memset(partial, 0, sizeof partial);
            add_tiles(tile_of(codes, c / 16), tiles, count, partial, 32, r ? 0 : ahead);
            const int end = std::min(first + 16 * tiles, start + D);
            for (int next; c < end; c = next) {
                next = std::min((c / 16 + 1) * 16, end);
                // With fewer than 16 channels, the others are added 0.
                const Floats scale = load_fp16(ranges.scale + c, next - c), zero = load_fp16(ranges.zero + c, next - c);
                for (int i = 0; i < count; i++) {
                    float* to = softmax.sums + (size_t)(r + i) * width + c - start;
                    const Floats found = load_floats(partial + i * 32 + c - first);
                    store_floats(to, load_floats(to) + fma(found, scale, zero * broadcast_float(totals[i])));
                }
            }
        }
    }

    void add_outliers(int64_t id) {
        each_outlier(id, [&](int t, int c, float residual) {
            const float* weight = scores + t;
            float* sum = softmax.sums + c;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++, weight += n, sum += width) *sum += *weight * residual;
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
                add_by_token(codes, ranges, r, count, softmax.sums + (size_t)r * width, ahead);
            else
                add_by_channel(codes, ranges, r, count, ahead);
        }
        if (operand.outlier_count) add_outliers(id);
    }
};

}  // namespace
