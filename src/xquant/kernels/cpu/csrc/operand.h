// The packed keys or values of one key/value head, as attention reads them block by block: where codes
// and ranges are, outliers, and memory that keys and values share. An element is
//
//     code * scale + zero + offset (affine)   or   level[code] * scale + zero + offset (codebook),
//
// plus its residual if it is an outlier: what `quant.Affine.decode` and `quant.Codebook.decode` give. Where there is a
// second scale (`quant.Balanced`), all is times that of the token of a key, or of the channel of a value.
#pragma once
#include <algorithm>

#include "int16_tiles.h"
#include "rows.h"

namespace {

// The ranges of one block, fp16.
struct Ranges {
    const uint16_t *scale, *zero;
    Ranges(const xq_operand& operand, int64_t id)
        : scale(at_address<uint16_t>(operand.scale[operand.offline ? 0 : id])),
          zero(operand.zero ? at_address<uint16_t>(operand.zero[operand.offline ? 0 : id]) : nullptr) {}
};

// A block, and one of its key/value heads.
struct HeadBlock {
    int64_t id;
    int head;
};

// Memory that the keys and the values of a task use one after the other.
struct Scratch {
    int rows;
    float* scores;                        // [rows, n], then the weights of values
    int16_t* weights;                     // [MAX_ROWS, max(D, n)] of integer dot products
    float *steps, *bias;                  // [MAX_ROWS]
    Words* int16_tiles;                   // [TILES, max(D, n) / 2] decoded to int16
    int32_t *outlier_token, *outlier_at;  // of a block's outliers: the token of each, and which are of the head

    static size_t most(const xq_attend& c) { return std::max(c.head_size, c.block); }
    static size_t outlier_capacity(const xq_attend& c) {
        if (!c.key.outlier_count && !c.value.outlier_count) return 0;
        return (size_t)c.block * c.kv_heads * c.head_size + 32;
    }
    static size_t bytes(const xq_attend& c) { return bytes(c, rows_of_sequence(c)); }
    static size_t bytes(const xq_attend& c, size_t rows) {
        const size_t m = most(c);
        return 4 * (rows * c.block + 2 * MAX_ROWS + 2 * outlier_capacity(c)) + 2 * MAX_ROWS * m +
               sizeof(Words) * (TILES * m / 2) + 7 * 64;
    }

    Scratch(const xq_attend& c, Workspace& workspace) : Scratch(c, rows_of_sequence(c), workspace) {}
    Scratch(const xq_attend& c, int rows, Workspace& workspace) : rows(rows) {
        scores = workspace.take<float>((size_t)rows * c.block);
        weights = workspace.take<int16_t>(MAX_ROWS * most(c));
        steps = workspace.take<float>(MAX_ROWS);
        bias = workspace.take<float>(MAX_ROWS);
        int16_tiles = workspace.take<Words>(TILES * most(c) / 2);
        outlier_token = workspace.take<int32_t>(outlier_capacity(c));
        outlier_at = workspace.take<int32_t>(outlier_capacity(c));
    }
};

// What packed keys and packed values have in common.
struct PackedOperand : Scratch {
    const xq_attend& call;
    const xq_operand& operand;
    const int g;
    const int D, n;
    int16_t table16[16] = {};  // levels of a codebook times `most`

    PackedOperand(const xq_attend& c, const xq_operand& operand, float most, int g, const Scratch& scratch)
        : Scratch(scratch), call(c), operand(operand), g(g), D(c.head_size), n(c.block) {
        if (operand.levels)
            for (int i = 0; i < 1 << operand.bits; i++) table16[i] = (int16_t)std::lrintf(operand.levels[i] * most);
    }

    // Fetches the ranges of the next block into the CPU's cache. Its codes are fetched while those of a block are read.
    void prefetch_ranges(HeadBlock next) const {
        if (operand.offline) return;
        size_t from = (size_t)next.head * D, count = D, runs = 1, stride = 0;
        if (operand.per_token) {
            const int first = next.head * D / operand.group, last = (next.head * D + D - 1) / operand.group;
            from = (size_t)first * n, count = (size_t)(last - first + 1) * n;
        } else if (operand.group < n) {
            runs = n / operand.group, stride = (size_t)call.kv_heads * D;
        }
        for (const uint64_t* field : {operand.scale, operand.zero})
            for (size_t run = 0; field && run < runs; run++)
                for (size_t i = 0; i < count; i += 32)
                    prefetch(at_address<uint16_t>(field[next.id]) + from + run * stride + i);
    }

    // Calls found(token, channel of the head, residual) for the outliers of this head. It lists them first, without a
    // branch that depends on where they are.
    template <class Found>
    void each_outlier(int64_t id, Found found) const {
        const auto* residual = at_address<uint16_t>(operand.outlier_excess[id]);
        const auto* channel = at_address<uint16_t>(operand.outlier_channel[id]);
        const auto* count8 = at_address<uint8_t>(operand.outlier_count[id]);
        const auto* count16 = at_address<uint16_t>(operand.outlier_count[id]);
        int total = 0;
        for (int t = 0; t < n; t++) {
            const int count = operand.count_bytes == 1 ? count8[t] : count16[t];
            for (int i = 0; i < count; i += 16)  // the next token overwrites what is beyond `count`
                store(outlier_token + total + i, broadcast(t));
            total += count;
        }
        const int first = g * D, listed = list_between(channel, total, first, D, outlier_at);
        for (int i = 0; i < listed; i++) {
            const int at = outlier_at[i];
            found(outlier_token[at], channel[at] - first, fp16_to_float(residual[at]));
        }
    }
};

}  // namespace
