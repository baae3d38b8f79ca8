// Scores of a few queries with one block of packed keys, score[t] = scaling * q . k_t. Keys are never written out.
//
// - Keys after RoPE, affine codes, ranges per channel: scales and zeros are folded into the query,
//       q . k_t = sum_c (q_c scale_c) code[t, c] + sum_c q_c zero_c,
//   so the first sum is an integer dot product with the codes themselves, and the second is one number a query.
// - All others: codes become int16 keys, a few tiles at a time, with one step for the two channels of a rotation, and
//   the query takes the steps. Keys before RoPE are rotated in the same go. A key at position p + r of a block that
//   starts at p is R(p) R(r) k, so q . R(p) R(r) k = (R(-p) q) . (R(r) k): the query is rotated once a block, and R(r)
//   is a small table for all blocks, heads and layers.
// - An outlier adds the product of the query and its residual, rotated alike.
//
// It equals q K^T over the keys that `CompressedLayer` decodes and transformers' sdpa reads, to a relative error below
// 1e-3 of the output.
#pragma once
#include "operand.h"
#include "packing.h"

namespace {

// Where the rope table has the angle of each channel of a head, for outliers. The same for all tasks of a call.
struct RopePlaces {
    struct Place {
        int32_t at;       // in the part of the table for a tile, at the tile's first token
        int32_t partner;  // the other channel that the rotation mixes with this one
        float sine;       // sign of its sine, over 32767, which is 1 in the table
    };
    Place* of = nullptr;  // [D]

    static size_t bytes(const xq_attend& c) { return sizeof(Place) * c.head_size + 64; }
    RopePlaces(const xq_attend& c, Workspace& workspace) {
        if (!c.key.outlier_count || !c.rope_table) return;
        const int D = c.head_size, half = D / 2, units = D / 32;
        of = workspace.take<Place>(D);
        for (int i = 0; i < D; i++) {
            const int j = i % half, e = j % 4, q = j / 4, place = q < 4 * units ? q % units * 4 + q / units : q;
            of[i] = {(place * 2 + e % 2) * 64 + e / 2, i < half ? i + half : i - half, (i < half ? 1 : -1) / 32767.0f};
        }
    }
};

// The keys of a task: one key/value head, and the rows that are multiplied with them.
struct PackedKeys : PackedOperand {
    const RopePlaces& rope_places;
    const Rows all;
    const int width;            // of a row of queries: D, and zeros up to whole vectors
    float* query;               // [rows, width] times `scaling`
    float* rotated_query;       // [rows, width] R(-p) query; without RoPE the query itself
    float* scaled_query;        // [MAX_ROWS, width] times scales, or times steps
    int16_t* query16;           // [rows, D] weights of int16 keys, by MAX_ROWS rows, and
    float* query_steps;         // [rows] their steps
    int32_t *scale16, *zero16;  // int16 pairs: [D / 2] by channel, or [ranges of the head, 16] by token
    float* pair_step;           // [width] the step of int16 keys; channels c and c + D / 2 have the same
    uint8_t* rest;              // [n / 16, quads, 64] the block's codes that are in no unit of a tile (tiles.h)

    static size_t rest_size(const xq_attend& c) {
        return rest_quads(c.head_size) ? (size_t)(c.block / 16 * rest_quads(c.head_size) + 8) * STRIP : 0;
    }
    static size_t bytes(const xq_attend& c, size_t rows) {
        const size_t D = c.head_size, width = whole_vectors(D);
        return 4 * (2 * rows * width + rows + MAX_ROWS * width + 2 * 16 * D + width + 16) + 2 * rows * D +
               rest_size(c) + 9 * 64;
    }

    PackedKeys(const xq_attend& c, int g, const Rows& all, const Scratch& scratch, const RopePlaces& rope_places,
               Workspace& workspace)
        : PackedOperand(c, c.key, 32767, g, scratch), rope_places(rope_places), all(all), width(whole_vectors(D)) {
        query = workspace.take<float>((size_t)rows * width);
        rotated_query = workspace.take<float>((size_t)rows * width);
        scaled_query = workspace.take<float>(MAX_ROWS * width);
        query16 = workspace.take<int16_t>((size_t)rows * D);
        query_steps = workspace.take<float>(rows);
        scale16 = workspace.take<int32_t>(16 * D);
        zero16 = workspace.take<int32_t>(16 * D);
        pair_step = workspace.take<float>(width + 16);
        rest = workspace.take<uint8_t>(rest_size(c));
        load_queries(c, c.turned_query ? c.turned_query : c.query, all, width, query);
        if (width > D) std::fill(rotated_query, rotated_query + (size_t)rows * width, 0.0f);
    }

    uint64_t codes_at(HeadBlock at) const {
        return operand.codes[at.id] + at.head * tiles_bytes(D, n, operand.bits);
    }

    const uint8_t* rest_of(int t) const { return rest + (size_t)t / 16 * rest_quads(D) * STRIP; }
    void unpack_rest(const uint8_t* codes, ptrdiff_t ahead) const {
        const int quads = rest_quads(D);
        if (!quads) return;
        codes += n / 16 * tile_bytes(D, operand.bits);
        for (size_t i = 0; i < rest_bytes(D, n, operand.bits); i += STRIP) prefetch(codes + i + ahead);
        pick_unpack_strip(operand.bits)(codes, n / 16 * quads, rest, STRIP, STRIP);
    }

    // Sets rotated_query to R(-p) q for the block in this column of the table, which starts at position p.
    void rotate_query(int column) {
        if (!call.rope_table) {
            rotated_query = query;
            return;
        }
        const int half = D / 2;
        for (int r = 0; r < rows; r++) {
            const float* cos = call.start_cos + all[r].b * call.start_batch + column * half;
            const float* sin = call.start_sin + all[r].b * call.start_batch + column * half;
            const float* q = query + (size_t)r * width;
            float* t = rotated_query + (size_t)r * width;
            for (int j = 0; j < half; j++) {
                t[j] = q[j] * cos[j] + q[j + half] * sin[j];
                t[j + half] = q[j + half] * cos[j] - q[j] * sin[j];
            }
        }
    }

    // Integer dot products with the codes of tokens `from` to `to - 1`, which have one range a channel.
    void score_codes(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero, int from, int to,
                     ptrdiff_t ahead) {
        const float* offset = operand.offset ? operand.offset + g * D : nullptr;
        const float most = highest_weight(D, (float)((1 << operand.bits) - 1));
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            Floats top[MAX_ROWS], constant[MAX_ROWS];
            for (int i = 0; i < count; i++) top[i] = constant[i] = broadcast_float(0);
            for (int c = 0; c < D; c += 16) {
                const Floats step = load_fp16(scale + c, D - c);
                Floats base = load_fp16(zero + c, D - c);
                if (offset) base = base + load_floats(offset + c, D - c);
                for (int i = 0; i < count; i++) {
                    const Floats x = load_floats(rotated_query + (size_t)(r + i) * width + c), scaled = x * step;
                    top[i] = maximum(top[i], absolute(scaled));
                    constant[i] = fma(x, base, constant[i]);
                    store_floats(scaled_query + i * width + c, scaled);
                }
            }
            for (int i = 0; i < count; i++) {
                bias[i] = sum(constant[i]);
                steps[i] = quantize_row(scaled_query + i * width, D, highest(top[i]), most, weights + i * 4, count);
            }
            const bool left = rest_quads(D) > 0;
            const DotCodes dot = left ? pick_dot_codes<TILES, true>(operand.bits, count)
                                      : pick_dot_codes<TILES>(operand.bits, count);
            for (int t = from; t < to; t += 16 * TILES)
                dot(codes + t / 16 * tile_bytes(D, operand.bits), D, weights, steps, bias, scores + (size_t)r * n + t,
                    n, r ? 0 : ahead, rest_of(t));
        }
    }

    // The highest int16 of a key. An affine scale times 2^bits must fit into an int16 too.
    float key_limit() const {
        return operand.levels ? KEY_LIMIT : std::min(KEY_LIMIT, 16383 * (1 - 1.0f / (1 << operand.bits)));
    }

    void raise_reach(Floats scale, Floats zero, Floats& reach) const {
        if (operand.levels) {  // levels are in [-1, 1]
            reach = maximum(reach, absolute(zero) + scale);
        } else {
            Floats end = fma(scale, broadcast_float((float)((1 << operand.bits) - 1)), zero);
            reach = maximum(reach, maximum(absolute(zero), absolute(end)));
        }
    }

    // Rounds scale and zero of every channel to int16. The two channels of a rotation share a step, or they could not
    // be added.
    void quantize_channel_ranges(const uint16_t* scale, const uint16_t* zero) {
        const float* offset = operand.offset ? operand.offset + g * D : nullptr;
        const float per_level = operand.levels ? 32768.0f / 32767 : (float)(1 << operand.bits);
        const int half = D / 2;
        const Floats limit = broadcast_float(key_limit()), level = broadcast_float(per_level);
        const QuadWriter low(D, 1), high(D, 1, 4);  // quads of half a head are 4 apart
        QuadWriter places[2][2] = {{low, low}, {high, high}};
        for (int c = 0; c < half; c += 16) {
            Floats reach = broadcast_float(1e-20f), s[2], z[2];
            for (int upper = 0; upper < 2; upper++) {
                s[upper] = load_fp16(scale + c + upper * half, half - c);
                z[upper] = load_fp16(zero + c + upper * half, half - c);
                if (offset) z[upper] = z[upper] + load_floats(offset + c + upper * half, half - c);
                raise_reach(s[upper], z[upper], reach);
            }
            const Floats unit = limit / reach;
            store_floats(pair_step + c, reach / limit);
            for (int upper = 0; upper < 2; upper++) {
                // It would be 2^15 where a range of 1 bit is symmetric.
                const Floats most = broadcast_float(32767);
                places[upper][0].store(to_nearest(minimum(s[upper] * unit * level, most)), (int16_t*)scale16, std::min(16, half - c));
                places[upper][1].store(to_nearest(z[upper] * unit), (int16_t*)zero16, std::min(16, half - c));
            }
        }
        std::memcpy(pair_step + half, pair_step, sizeof(float) * half);
    }

    // The same for ranges per token: one step for all channels of a block, then scales and zeros of the 16 tokens of a
    // tile, a vector for each range.
    float token_zero(const uint16_t* scale, const uint16_t* zero, int at) const {
        return zero ? fp16_to_float(zero[at]) : operand.zero_scales * fp16_to_float(scale[at]);
    }
    void set_token_step(const uint16_t* scale, const uint16_t* zero) {
        float reach = 1e-20f;
        for (int t = 0; t < n; t++)
            for (int j = g * D / operand.group; j <= (g * D + D - 1) / operand.group; j++) {
                float s = fp16_to_float(scale[j * n + t]), z = token_zero(scale, zero, j * n + t);
                float end = operand.levels ? std::fabs(z) + s : std::fabs(z + s * ((1 << operand.bits) - 1));
                // Not fmax, a loop of which GCC 12 cannot compile for AArch64.
                reach = std::max(std::max(reach, std::fabs(z)), end);
            }
        std::fill(pair_step, pair_step + D, reach / key_limit());
    }
    void quantize_token_ranges(const uint16_t* scale, const uint16_t* zero, int t) {
        const float per_level = operand.levels ? 32768.0f / 32767 : (float)(1 << operand.bits);
        const int first = g * D / operand.group, last = (g * D + D - 1) / operand.group;
        for (int j = first; j <= last; j++)
            for (int lane = 0; lane < 16; lane++) {
                float s = fp16_to_float(scale[j * n + t + lane]) / pair_step[0] * per_level;
                float z = token_zero(scale, zero, j * n + t + lane) / pair_step[0];
                uint32_t s16 = (uint16_t)(int16_t)std::lrintf(std::fmin(s, 32767.0f));
                uint32_t z16 = (uint16_t)(int16_t)std::lrintf(z);
                scale16[(j - first) * 16 + lane] = (int32_t)(s16 | s16 << 16);
                zero16[(j - first) * 16 + lane] = (int32_t)(z16 | z16 << 16);
            }
    }

    // Makes int16 keys of the int16 codes [D / 2] of one tile, in place; with ROTATE, keys R(r) k.
    template <bool PER_TOKEN, bool ROTATE>
    void decode_keys(Words* tile, int tile_index) {
        const int units = D / 32, group = operand.group, first = g * D / group;
        const int16_t* table = ROTATE ? call.rope_table + (size_t)tile_index * D * 16 : nullptr;
        // Of quad `quad` of the first half of a head, whose words begin at a, and that half a head further, at b.
        auto decode = [&](int quad, int a, int b) {
            for (int odd = 0; odd < 2; odd++, a++, b++) {
                Words scale_a, scale_b, zero_a, zero_b;
                if (PER_TOKEN) {
                    const int ga = (g * D + quad * 4) / group - first;
                    const int gb = (g * D + D / 2 + quad * 4) / group - first;
                    scale_a = load(scale16 + ga * 16), zero_a = load(zero16 + ga * 16);
                    scale_b = load(scale16 + gb * 16), zero_b = load(zero16 + gb * 16);
                } else {
                    scale_a = broadcast(scale16[a]), zero_a = broadcast(zero16[a]);
                    scale_b = broadcast(scale16[b]), zero_b = broadcast(zero16[b]);
                }
                if (ROTATE) {
                    decode_pair(tile[a], tile[b], scale_a, scale_b, zero_a, zero_b, table, tile[a], tile[b]);
                    table += 64;
                } else {
                    tile[a] = add16(multiply_q15(tile[a], scale_a), zero_a);
                    tile[b] = add16(multiply_q15(tile[b], scale_b), zero_b);
                }
            }
        };
        for (int r = 0; r < units; r++)
            for (int k = 0; k < 4; k++) decode(r + k * units, r * 16 + k * 2, r * 16 + k * 2 + 8);
        for (int quad = 4 * units, a = 16 * units; quad < D / 8; quad++, a += 4) decode(quad, a, a + 2);
    }

    // Rounds the queries times the steps of int16 keys to weights.
    void quantize_queries() {
        const float most = highest_int16_weight(ROTATED_LIMIT);
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            for (int i = r; i < r + count; i++) {
                const float* q = rotated_query + (size_t)i * width;
                Floats top = broadcast_float(0);
                for (int c = 0; c < D; c += 16) {
                    Floats x = load_floats(q + c) * load_floats(pair_step + c, D - c);
                    top = maximum(top, absolute(x));
                    store_floats(scaled_query + c, x);
                }
                int16_t* to = query16 + (size_t)r * D + (i - r) * 4;
                query_steps[i] = quantize_row(scaled_query, D, highest(top), most, to, count);
            }
        }
    }

    // Dot products with int16 keys of tokens `from` to `to - 1`, a few tiles at a time. A few rows have keys made in
    // registers, more rows once for all of them.
    void score_int16(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero, int from, int to,
                     ptrdiff_t ahead) {
        if (operand.per_token)
            set_token_step(scale, zero);
        else
            quantize_channel_ranges(scale, zero);
        quantize_queries();
        if (rows <= MAX_ROWS && !operand.per_token && !operand.levels && call.rope_table) {
            const DotRotated dot = pick_dot_rotated(operand.bits, rows);
            for (int t = from; t < to; t += 16 * TILES)
                dot(codes + t / 16 * tile_bytes(D, operand.bits), D,
                    {scale16, zero16, call.rope_table + (size_t)(t / 16) * D * 16}, query16, query_steps, scores + t, n,
                    ahead);
            if (const int quads = rest_quads(D)) {
                const int done = D / 32 * 32;
                for (int t = from; t < to; t += 16 * TILES)
                    pick_dot_rotated_rest(rows)(
                        rest_of(t), D, operand.bits,
                        {scale16 + done / 2, zero16 + done / 2, call.rope_table + ((size_t)(t / 16) * D + done) * 16},
                        query16 + (size_t)done * rows, query_steps, scores + t, n);
            }
            return;
        }
        Table table = load_table(table16);
        const CodesToInt16 to_int16 = pick_codes_to_int16(operand.bits, operand.levels != nullptr);
        const float none[MAX_ROWS] = {};
        for (int t = from; t < to; t += 16 * TILES) {
            for (int k = 0; k < TILES; k++) {
                Words* tile = int16_tiles + (size_t)k * (D / 2);
                const int index = t / 16 + k;
                to_int16(codes + index * tile_bytes(D, operand.bits), D, table, tile, ahead);
                rest_to_int16(rest_of(index * 16), rest_quads(D), operand.bits, operand.levels, table, tile + D / 32 * 16);
                if (operand.per_token) {
                    quantize_token_ranges(scale, zero, index * 16);
                    call.rope_table ? decode_keys<true, true>(tile, index) : decode_keys<true, false>(tile, index);
                } else {
                    call.rope_table ? decode_keys<false, true>(tile, index) : decode_keys<false, false>(tile, index);
                }
            }
            for (int r = 0; r < rows; r += MAX_ROWS)
                pick_dot_int16<TILES>(std::min(rows - r, MAX_ROWS))(int16_tiles, D, query16 + (size_t)r * D,
                                                                    query_steps + r, none, scores + (size_t)r * n + t,
                                                                    n);
        }
    }

    void score_outliers(int64_t id) {
        each_outlier(id, [&](int t, int c, float residual) {
            const float *here = rotated_query + c, *there = here;
            float cos = residual, sin = 0;
            if (call.rope_table) {
                const RopePlaces::Place place = rope_places.of[c];
                const int16_t* pair = call.rope_table + (size_t)(t / 16) * D * 16 + place.at + t % 16 * 2;
                there = rotated_query + place.partner;
                cos = residual * (1 / 32767.0f) * pair[0];
                sin = residual * place.sine * pair[32];
            }
            float* score = scores + t;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++, here += width, there += width, score += n) *score += *here * cos + *there * sin;
        });
    }

    // Writes `scores` [rows, n] of a block. `next`: the one whose codes are fetched into the CPU's cache meanwhile.
    void score(int64_t id, HeadBlock next) {
        const Ranges ranges(operand, id);
        const auto* codes = at_address<uint8_t>(codes_at({id, g}));
        const ptrdiff_t ahead = (ptrdiff_t)(codes_at(next) - codes_at({id, g}));
        std::memset(scores, 0, sizeof(float) * (size_t)rows * n);
        unpack_rest(codes, ahead);
        const int channels = call.kv_heads * D;
        const bool fold = !operand.per_token && !operand.levels && !call.rope_table;
        if (operand.per_token) {
            score_int16(codes, ranges.scale, ranges.zero, 0, n, ahead);
        } else {
            const int group = operand.offline ? n : operand.group;
            for (int from = 0, i = 0; from < n; from += group, i++) {
                const uint16_t* scale = ranges.scale + (size_t)i * channels + g * D;
                const uint16_t* zero = ranges.zero + (size_t)i * channels + g * D;
                const int to = std::min(from + group, n);
                fold ? score_codes(codes, scale, zero, from, to, ahead)
                     : score_int16(codes, scale, zero, from, to, ahead);
            }
        }
        if (operand.outlier_count) score_outliers(id);
        if (!operand.second) return;
        const auto* second = at_address<uint16_t>(operand.second[id]) + g * n;
        for (int t = 0; t < n; t += 16) {
            const Floats scale = load_fp16(second + t);
            for (int r = 0; r < rows; r++) {
                float* score = scores + (size_t)r * n + t;
                store_floats(score, load_floats(score) * scale);
            }
        }
    }
};

}  // namespace
