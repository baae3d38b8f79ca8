// Attention of a few queries over packed keys and values, which are never materialized.
// Included once for each instruction set.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "elements.h"
#include "softmax.h"

namespace {

// Memory of one thread for one call, 64-byte aligned.
struct Arena {
    uint8_t *base = nullptr, *next = nullptr;
    explicit Arena(size_t size) {
        base = next = (uint8_t*)std::aligned_alloc(64, (size + 4095) / 4096 * 4096);
        if (!base) throw std::bad_alloc();
    }
    ~Arena() { std::free(base); }
    Arena(const Arena&) = delete;
    template <class T>
    T* take(size_t count) {
        T* p = (T*)next;
        next += (count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

// Ranges of one block: element (token, channel) decodes to code * scale + zero (+ offset).
struct Ranges {
    const uint16_t *scale, *zero;
    Ranges(const xq_side& side, int64_t id)
        : scale(at_address<uint16_t>(side.scale[side.fixed ? 0 : id])),
          zero(at_address<uint16_t>(side.zero[side.fixed ? 0 : id])) {}
};

inline float level_of(const xq_side& side, int code) { return side.levels ? side.levels[code] : (float)code; }

// The task of one thread: some blocks of one sequence and key/value head.
struct Task {
    const xq_attend& call;
    const int b, g;
    const int D, n, rows, per, channels;
    float* query;        // [rows, D] as given
    float* turned;       // [rows, D] turned back to the start of a block
    float* scores;       // [rows, n]
    int16_t* weights;    // [MAX_ROWS, max(D, n)]
    float* steps;        // [MAX_ROWS, max(D, n) / 16]
    float* bias;         // [rows]
    float* folded;       // [max(D, n)]
    Words* words;        // [TILES, max(D, n) / 2]
    int32_t *scale16, *zero16;  // [D / 2], or [ranges of a token, 16]
    float* pair_scale;   // [D / 2]
    int16_t table16[16];
    Running running;

    static size_t most(const xq_attend& c) { return std::max(c.head_size, c.block); }
    static size_t bytes(const xq_attend& c) {
        size_t rows = c.group_heads * c.queries, D = c.head_size, m = most(c);
        return 4 * (3 * rows * D + rows * c.block + MAX_ROWS * m + rows * 3 + m + 4 * D + 64 * D) +
               2 * MAX_ROWS * m + 64 * TILES * m / 2 + 32 * 64;
    }

    Task(const xq_attend& c, int b, int g, Arena& arena, Running running)
        : call(c), b(b), g(g), D(c.head_size), n(c.block), rows(c.group_heads * c.queries),
          per(c.group_heads), channels(c.kv_heads * c.head_size), running(running) {
        query = arena.take<float>((size_t)rows * D);
        turned = arena.take<float>((size_t)rows * D);
        scores = arena.take<float>((size_t)rows * n);
        weights = arena.take<int16_t>(MAX_ROWS * most(c));
        steps = arena.take<float>(MAX_ROWS * most(c) / 16);
        bias = arena.take<float>(rows);
        folded = arena.take<float>(most(c));
        words = arena.take<Words>(TILES * most(c) / 2);
        scale16 = arena.take<int32_t>(16 * D);
        zero16 = arena.take<int32_t>(16 * D);
        pair_scale = arena.take<float>(D / 2);
        for (int h = 0; h < per; h++)
            for (int q = 0; q < c.queries; q++)
                get_row(c.query, c.dtype, b * c.query_batch + (g * per + h) * c.query_head + q * c.query_token,
                        D, query + (size_t)(h * c.queries + q) * D);
    }

    // -- keys ------------------------------------------------------------------------------------

    // R(-p) q: what a key turned by r positions is to be dotted with, for a block that starts at p.
    void turn_back(int column) {
        if (!call.turn) {
            turned = query;
            return;
        }
        const int half = D / 2;
        const float* cos = call.start_cos + ((size_t)b * call.columns + column) * half;
        const float* sin = call.start_sin + ((size_t)b * call.columns + column) * half;
        for (int r = 0; r < rows; r++) {
            const float* q = query + (size_t)r * D;
            float* t = turned + (size_t)r * D;
            for (int j = 0; j < half; j++) {
                t[j] = q[j] * cos[j] + q[j + half] * sin[j];
                t[j + half] = q[j + half] * cos[j] - q[j] * sin[j];
            }
        }
    }

    // Scale folded into the query: integer dot products on the codes themselves.
    void score_folded(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero, int from, int to,
                      ptrdiff_t ahead) {
        const xq_side& key = call.key;
        const float* offset = key.offset ? key.offset + g * D : nullptr;
        const float most_code = (float)((1 << key.bits) - 1);
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            for (int i = 0; i < count; i++) {
                const float* q = turned + (size_t)(r + i) * D;
                Floats constant = broadcast_float(0);
                for (int c = 0; c < D; c += 16) {
                    Floats x = load_floats(q + c), z = load_halves(zero + c);
                    if (offset) z = z + load_floats(offset + c);
                    store_floats(folded + c, x * load_halves(scale + c));
                    constant = fma(x, z, constant);
                }
                to_int16(folded, D, D, most_code, weights + (size_t)i * D, steps + i);
                bias[r + i] = sum(constant);
            }
            const DotCodes dot = pick_dot_codes<TILES>(key.bits, count);
            for (int t = from; t < to; t += 16 * TILES)
                dot(codes + t / 16 * tile_bytes(D, key.bits), D, weights, steps, scores + (size_t)r * n + t, n,
                    r ? 0 : ahead);
            for (int i = 0; i < count; i++)
                for (int t = from; t < to; t += 16) {
                    float* s = scores + (size_t)(r + i) * n + t;
                    store_floats(s, load_floats(s) + broadcast_float(bias[r + i]));
                }
        }
    }

    float limit16() const {
        // |key| in int16: sums of two must fit after turning, and so must a scale times 2^bits.
        return call.key.levels ? 15360.0f : 15360.0f * (1 - 1.0f / (1 << call.key.bits));
    }

    static void largest(const xq_side& key, Floats scale, Floats zero, Floats& reach) {
        if (key.levels) {  // levels are in [-1, 1]
            reach = maximum(reach, absolute(zero) + scale);
        } else {
            Floats end = fma(scale, broadcast_float((float)((1 << key.bits) - 1)), zero);
            reach = maximum(reach, maximum(absolute(zero), absolute(end)));
        }
    }

    // int16 scale and zero of every channel; the two channels of a rotation share a unit.
    void fix_channels(const uint16_t* scale, const uint16_t* zero) {
        const xq_side& key = call.key;
        const float* offset = key.offset ? key.offset + g * D : nullptr;
        const float per_level = key.levels ? 32768.0f / 32767 : (float)(1 << key.bits);
        const int half = D / 2;
        alignas(64) float unit[16];
        for (int c = 0; c < half; c += 16) {
            Floats reach = broadcast_float(1e-20f), s[2], z[2];
            for (int part = 0; part < 2; part++) {
                s[part] = load_halves(scale + c + part * half);
                z[part] = load_halves(zero + c + part * half);
                if (offset) z[part] = z[part] + load_floats(offset + c + part * half);
                largest(key, s[part], z[part], reach);
            }
            store_floats(pair_scale + c, reach * broadcast_float(1 / limit16()));
            for (int i = 0; i < 16; i++) unit[i] = limit16() / std::fmax(pair_scale[c + i] * limit16(), 1e-20f);
            for (int part = 0; part < 2; part++) {
                Floats u = load_floats(unit);
                int at = (c + part * half) / 2;
                Floats s16 = minimum(s[part] * u * broadcast_float(per_level), broadcast_float(32767));
                store_paired16((int16_t*)(scale16 + at), to_nearest(s16));
                store_paired16((int16_t*)(zero16 + at), to_nearest(z[part] * u));
            }
        }
    }

    // The same for ranges per token: one unit, vectors over the 16 tokens of a tile for each range.
    void unit_of_tokens(const uint16_t* scale, const uint16_t* zero, int groups) {
        const xq_side& key = call.key;
        float reach = 1e-20f;
        for (int t = 0; t < n; t++)
            for (int j = g * D / key.group; j <= (g * D + D - 1) / key.group; j++) {
                float s = half_to_float(scale[t * groups + j]), z = half_to_float(zero[t * groups + j]);
                float end = key.levels ? std::fabs(z) + s : std::fabs(z + s * ((1 << key.bits) - 1));
                reach = std::fmax(reach, std::fmax(std::fabs(z), end));
            }
        for (int j = 0; j < D / 2; j++) pair_scale[j] = reach / limit16();
    }
    void fix_tokens(const uint16_t* scale, const uint16_t* zero, int groups, int t) {
        const xq_side& key = call.key;
        const float per_level = key.levels ? 32768.0f / 32767 : (float)(1 << key.bits);
        const int first = g * D / key.group, last = (g * D + D - 1) / key.group;
        for (int j = first; j <= last; j++)
            for (int lane = 0; lane < 16; lane++) {
                float s = half_to_float(scale[(t + lane) * groups + j]) / pair_scale[0] * per_level;
                float z = half_to_float(zero[(t + lane) * groups + j]) / pair_scale[0];
                uint32_t s16 = (uint16_t)(int16_t)std::lrintf(std::fmin(s, 32767.0f));
                uint32_t z16 = (uint16_t)(int16_t)std::lrintf(z);
                scale16[(j - first) * 16 + lane] = (int32_t)(s16 | s16 << 16);
                zero16[(j - first) * 16 + lane] = (int32_t)(z16 | z16 << 16);
            }
    }

    // Levels [D / 2] of one tile to keys, turned by 0, 1, ... positions where the call asks for it.
    template <bool PER_TOKEN, bool TURN>
    void to_keys(Words* tile, int tile_index) {
        const int quads = D / 8;  // of half a head
        const int group = call.key.group, first = g * D / group;
        const int16_t* table = TURN ? call.turn + (size_t)tile_index * quads * 2 * 2 * 32 : nullptr;
        for (int q = 0; q < quads; q++)
            for (int odd = 0; odd < 2; odd++) {
                const int a = q * 2 + odd, b = a + quads * 2;
                Words scale_a, scale_b, zero_a, zero_b;
                if (PER_TOKEN) {
                    const int ga = (g * D + q * 4) / group - first, gb = (g * D + D / 2 + q * 4) / group - first;
                    scale_a = load(scale16 + ga * 16), zero_a = load(zero16 + ga * 16);
                    scale_b = load(scale16 + gb * 16), zero_b = load(zero16 + gb * 16);
                } else {
                    scale_a = broadcast(scale16[a]), zero_a = broadcast(zero16[a]);
                    scale_b = broadcast(scale16[b]), zero_b = broadcast(zero16[b]);
                }
                Words low = add16(scale16_of(tile[a], scale_a), zero_a);
                Words high = add16(scale16_of(tile[b], scale_b), zero_b);
                if (TURN) {
                    Words cos = load(table + (size_t)a * 64), sin = load(table + (size_t)a * 64 + 32);
                    tile[a] = sub16(::scale16(low, cos), ::scale16(high, sin));
                    tile[b] = add16(::scale16(high, cos), ::scale16(low, sin));
                } else {
                    tile[a] = low;
                    tile[b] = high;
                }
            }
    }
    static Words scale16_of(Words a, Words b) { return ::scale16(a, b); }

    // Keys as int16, a few tiles at a time, then dotted with the query.
    void score_expanded(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero, int from, int to,
                        ptrdiff_t ahead) {
        const xq_side& key = call.key;
        const int groups = key.per_token ? (channels + key.group - 1) / key.group : 1;
        if (key.per_token)
            unit_of_tokens(scale, zero, groups);
        else
            fix_channels(scale, zero);
        Table table = load_table(table16);
        const Expand unpack_tile = pick_expand(key.bits, key.levels != nullptr);
        const int half = D / 2;
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            for (int i = 0; i < count; i++) {
                const float* q = turned + (size_t)(r + i) * D;
                for (int c = 0; c < D; c += 16)
                    store_floats(folded + c, load_floats(q + c) * load_floats(pair_scale + c % half));
                to_int16(folded, D, 32, 21724, weights + (size_t)i * D, steps + (size_t)i * (D / 32));
            }
            const DotWords dot = pick_dot_words<TILES>(count);
            for (int t = from; t < to; t += 16 * TILES) {
                for (int k = 0; k < TILES; k++) {
                    Words* tile = words + (size_t)k * half;
                    const int index = t / 16 + k;
                    unpack_tile(codes + index * tile_bytes(D, key.bits), D, table, tile, r ? 0 : ahead);
                    if (key.per_token) {
                        fix_tokens(scale, zero, groups, index * 16);
                        call.turn ? to_keys<true, true>(tile, index) : to_keys<true, false>(tile, index);
                    } else {
                        call.turn ? to_keys<false, true>(tile, index) : to_keys<false, false>(tile, index);
                    }
                }
                dot(words, D, weights, steps, scores + (size_t)r * n + t, n);
            }
        }
    }

    // Elements kept apart: what their codes stand for is replaced in the score.
    void score_outliers(const uint8_t* codes, const Ranges& ranges, int64_t id) {
        const xq_side& key = call.key;
        const auto* value = at_address<uint16_t>(key.outlier_value[id]);
        const auto* channel = at_address<uint16_t>(key.outlier_channel[id]);
        const int half = D / 2;
        for (int t = 0, at = 0; t < n; t++) {
            const int stop = at + count_of(key, id, t);
            for (; at < stop; at++) {
                const int c = channel[at] - g * D;
                if (c < 0 || c >= D) continue;
                float delta = half_to_float(value[at]) - decoded(key, ranges, codes, D, t % 16, t / 16, c, t, channel[at]);
                const int partner = c < half ? c + half : c - half;
                float cos = 1, sin = 0;
                if (call.turn) {
                    const int j = c % half, e = j % 4;
                    const int16_t* pair = call.turn +
                        ((size_t)(t / 16) * (D / 8) * 2 + j / 4 * 2 + e % 2) * 64 + t % 16 * 2 + e / 2;
                    cos = pair[0] / 32767.0f;
                    sin = pair[32] / (c < half ? 32767.0f : -32767.0f);
                }
                for (int r = 0; r < rows; r++) {
                    const float* q = turned + (size_t)r * D;
                    scores[(size_t)r * n + t] += delta * (q[c] * cos + q[partner] * sin);
                }
            }
        }
    }

    static int count_of(const xq_side& side, int64_t id, int token) {
        if (side.count_bytes == 1) return at_address<uint8_t>(side.outlier_count[id])[token];
        return at_address<uint16_t>(side.outlier_count[id])[token];
    }

    // What the code of one element stands for, without its offset. Keys: lanes are tokens.
    float decoded(const xq_side& side, const Ranges& ranges, const uint8_t* head, int k_size, int lane, int tile,
                  int element, int token, int channel) const {
        int code = code_at(head + tile * tile_bytes(k_size, side.bits), k_size, side.bits, lane, element);
        int at = side.per_token ? token * ((channels + side.group - 1) / side.group) + channel / side.group
                                : (side.fixed ? 0 : token / side.group * channels) + channel;
        return level_of(side, code) * half_to_float(ranges.scale[at]) + half_to_float(ranges.zero[at]);
    }

    void score(int64_t id, ptrdiff_t ahead) {
        const xq_side& key = call.key;
        const Ranges ranges(key, id);
        const auto* codes = at_address<uint8_t>(key.codes[id]) + (size_t)g * n * D * key.bits / 8;
        const bool fold = !key.per_token && !key.levels && !call.turn;
        if (key.per_token) {
            score_expanded(codes, ranges.scale, ranges.zero, 0, n, ahead);
        } else {
            const int group = key.fixed ? n : key.group;
            for (int from = 0, i = 0; from < n; from += group, i++) {
                const uint16_t* scale = ranges.scale + (size_t)i * channels + g * D;
                const uint16_t* zero = ranges.zero + (size_t)i * channels + g * D;
                const int to = std::min(from + group, n);
                fold ? score_folded(codes, scale, zero, from, to, ahead)
                     : score_expanded(codes, scale, zero, from, to, ahead);
            }
        }
        if (key.outlier_count) score_outliers(codes, ranges, id);
    }

    void mask_scores(int start, int valid) {
        for (int r = 0; r < rows; r++) {
            float* s = scores + (size_t)r * n;
            Floats factor = broadcast_float(call.scaling);
            for (int t = 0; t < n; t += 16) store_floats(s + t, load_floats(s + t) * factor);
            if (call.softcap > 0) soft_cap(s, valid, call.softcap);
            if (call.mask) {
                const int64_t at = b * call.mask_batch + r % call.queries * call.mask_query;
                for (int t = 0; t < valid; t++)
                    s[t] += mask_at(call.mask, call.mask_dtype, at + (start + t) * call.mask_token);
            }
            for (int t = valid; t < n; t++) s[t] = -INFINITY;
            for (int e = 0; e < call.exact_count; e++) {  // sinks stand in a block, but are kept as they are
                const xq_exact& kept = call.exact[e];
                if (!kept.column) continue;
                for (int i = 0; i < kept.count; i++) {
                    const int t = kept.column[(size_t)b * kept.count + i] - start;
                    if (t >= 0 && t < valid) s[t] = -INFINITY;
                }
            }
        }
    }

    // -- values ----------------------------------------------------------------------------------

    // Ranges per token: their scale is folded into the probabilities.
    void add_values_by_token(const uint8_t* codes, const Ranges& ranges, int r, int count, ptrdiff_t ahead) {
        const xq_side& value = call.value;
        const int groups = (channels + value.group - 1) / value.group;
        const bool looked_up = value.levels != nullptr;
        const int chunk = looked_up ? 32 : n;
        const float bound = looked_up ? 32767 : (float)((1 << value.bits) - 1);
        const Expand unpack_tile = pick_expand(value.bits, looked_up && value.bits <= 4);
        const Table table = load_table(table16);
        alignas(64) float part[MAX_ROWS * 16 * TILES];
        int prepared = -1;
        for (int c = 0; c < D;) {
            const int j = (g * D + c) / value.group;
            const int tiles = (g * D + c + 16 * TILES - 1) / value.group == j ? TILES : 1;
            if (j != prepared) {
                prepared = j;
                for (int i = 0; i < count; i++) {
                    const float* p = scores + (size_t)(r + i) * n;
                    float constant = 0;
                    for (int t = 0; t < n; t++) {
                        folded[t] = p[t] * half_to_float(ranges.scale[t * groups + j]);
                        constant += p[t] * half_to_float(ranges.zero[t * groups + j]);
                    }
                    bias[i] = constant;
                    float* step = steps + (size_t)i * (n / chunk);
                    to_int16(folded, n, chunk, bound, weights + (size_t)i * n, step);
                    if (looked_up)
                        for (int k = 0; k < n / 32; k++) step[k] *= 1 / 32767.0f;
                }
            }
            const uint8_t* tile = codes + c / 16 * tile_bytes(n, value.bits);
            if (looked_up) {
                for (int k = 0; k < tiles; k++)
                    unpack_tile(tile + k * tile_bytes(n, value.bits), n, table, words + (size_t)k * (n / 2),
                                r ? 0 : ahead);
                (tiles == 1 ? pick_dot_words<1>(count) : pick_dot_words<TILES>(count))(
                    words, n, weights, steps, part, 16 * TILES);
            } else {
                (tiles == 1 ? pick_dot_codes<1>(value.bits, count) : pick_dot_codes<TILES>(value.bits, count))(
                    tile, n, weights, steps, part, 16 * TILES, r ? 0 : ahead);
            }
            for (int i = 0; i < count; i++)
                for (int k = 0; k < tiles; k++) {
                    float* to = running.sums + (size_t)(r + i) * D + c + k * 16;
                    store_floats(to, load_floats(to) + load_floats(part + (i * TILES + k) * 16) +
                                         broadcast_float(bias[i]));
                }
            c += 16 * tiles;
        }
    }

    // One range per channel and block: applied to the sums.
    void add_values_by_channel(const uint8_t* codes, const Ranges& ranges, int r, int count, ptrdiff_t ahead) {
        const xq_side& value = call.value;
        const bool looked_up = value.levels != nullptr;
        const int chunk = looked_up ? 32 : n;
        const float bound = looked_up ? 32767 : (float)((1 << value.bits) - 1);
        const Expand unpack_tile = pick_expand(value.bits, looked_up && value.bits <= 4);
        const Table table = load_table(table16);
        alignas(64) float part[MAX_ROWS * 16 * TILES];
        for (int i = 0; i < count; i++) {
            const float* p = scores + (size_t)(r + i) * n;
            Floats constant = broadcast_float(0);
            for (int t = 0; t < n; t += 16) constant = constant + load_floats(p + t);
            bias[i] = sum(constant);
            float* step = steps + (size_t)i * (n / chunk);
            to_int16(p, n, chunk, bound, weights + (size_t)i * n, step);
            if (looked_up)
                for (int k = 0; k < n / 32; k++) step[k] *= 1 / 32767.0f;
        }
        for (int c = 0; c < D; c += 16 * TILES) {
            const uint8_t* tile = codes + c / 16 * tile_bytes(n, value.bits);
            if (looked_up) {
                for (int k = 0; k < TILES; k++)
                    unpack_tile(tile + k * tile_bytes(n, value.bits), n, table, words + (size_t)k * (n / 2),
                                r ? 0 : ahead);
                pick_dot_words<TILES>(count)(words, n, weights, steps, part, 16 * TILES);
            } else {
                pick_dot_codes<TILES>(value.bits, count)(tile, n, weights, steps, part, 16 * TILES, r ? 0 : ahead);
            }
            for (int i = 0; i < count; i++)
                for (int k = 0; k < TILES; k++) {
                    float* to = running.sums + (size_t)(r + i) * D + c + k * 16;
                    Floats scale = load_halves(ranges.scale + g * D + c + k * 16);
                    Floats zero = load_halves(ranges.zero + g * D + c + k * 16);
                    Floats added = fma(load_floats(part + (i * TILES + k) * 16), scale,
                                       zero * broadcast_float(bias[i]));
                    store_floats(to, load_floats(to) + added);
                }
        }
    }

    void add_value_outliers(const uint8_t* codes, const Ranges& ranges, int64_t id) {
        const xq_side& value = call.value;
        const auto* kept = at_address<uint16_t>(value.outlier_value[id]);
        const auto* channel = at_address<uint16_t>(value.outlier_channel[id]);
        for (int t = 0, at = 0; t < n; t++) {
            const int stop = at + count_of(value, id, t);
            for (; at < stop; at++) {
                const int c = channel[at] - g * D;
                if (c < 0 || c >= D) continue;
                float delta = half_to_float(kept[at]) - decoded(value, ranges, codes, n, c % 16, c / 16, t, t, channel[at]);
                for (int r = 0; r < rows; r++)
                    running.sums[(size_t)r * D + c] += scores[(size_t)r * n + t] * delta;
            }
        }
    }

    void add_values(int64_t id, ptrdiff_t ahead) {
        const xq_side& value = call.value;
        const Ranges ranges(value, id);
        const auto* codes = at_address<uint8_t>(value.codes[id]) + (size_t)g * n * D * value.bits / 8;
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            value.per_token ? add_values_by_token(codes, ranges, r, count, ahead)
                            : add_values_by_channel(codes, ranges, r, count, ahead);
        }
        if (value.outlier_count) add_value_outliers(codes, ranges, id);
    }

    void set_table(const xq_side& side) {
        std::memset(table16, 0, sizeof table16);
        if (side.levels)
            for (int i = 0; i < 1 << side.bits; i++) table16[i] = (int16_t)std::lrintf(side.levels[i] * 32767);
    }

    // -- what there is to attend to --------------------------------------------------------------

    void attend_blocks(int first, int last) {
        int start = 0;
        for (int j = 0; j < first; j++) start += call.lengths[j];
        const int64_t* ids = call.table + (size_t)b * call.columns;
        for (int j = first; j < last && start < call.limit; start += call.lengths[j++]) {
            const int64_t id = ids[j], next = ids[std::min(j + 1, last - 1)];
            turn_back(j);
            set_table(call.key);
            score(id, (ptrdiff_t)(call.key.codes[next] - call.key.codes[id]));
            mask_scores(start, std::min(call.lengths[j], call.limit - start));
            bool any = false;
            for (int r = 0; r < rows; r++) {
                float* s = scores + (size_t)r * n;
                if (running.weigh(r, s, n))
                    any = true;
                else
                    std::fill(s, s + n, 0.0f);
            }
            if (!any) continue;
            set_table(call.value);
            add_values(id, (ptrdiff_t)(call.value.codes[next] - call.value.codes[id]));
        }
    }

    void attend_exact(const xq_exact& kept) {
        if (kept.count == 0) return;
        const int half = D / 2;
        Arena arena(sizeof(float) * ((size_t)rows * kept.count + 2 * D + 64) + 256);
        float* s = arena.take<float>((size_t)rows * kept.count);
        float* row = arena.take<float>(D);
        float* copy = arena.take<float>(D);
        for (int t = 0; t < kept.count; t++) {
            const int64_t at = b * kept.batch_stride + t * kept.token_stride + g * kept.head_stride;
            get_row(kept.key, kept.dtype, at, D, row);
            if (kept.cos) {
                const float* cos = kept.cos + ((size_t)b * kept.count + t) * half;
                const float* sin = kept.sin + ((size_t)b * kept.count + t) * half;
                std::memcpy(copy, row, sizeof(float) * D);
                for (int j = 0; j < half; j++) {
                    row[j] = copy[j] * cos[j] - copy[j + half] * sin[j];
                    row[j + half] = copy[j + half] * cos[j] + copy[j] * sin[j];
                }
            }
            const int column = kept.column ? kept.column[(size_t)b * kept.count + t] : kept.start + t;
            for (int r = 0; r < rows; r++) {
                const float* q = query + (size_t)r * D;
                Floats dot = broadcast_float(0);
                for (int c = 0; c < D; c += 16) dot = fma(load_floats(q + c), load_floats(row + c), dot);
                float x = sum(dot) * call.scaling;
                if (call.softcap > 0) soft_cap(&x, 1, call.softcap);
                const int index = r % call.queries;
                if (column < 0 || (kept.column && column >= call.limit) || (kept.causal && !call.mask && index < t))
                    x = -INFINITY;
                else if (call.mask)
                    x += mask_at(call.mask, call.mask_dtype,
                                 b * call.mask_batch + index * call.mask_query + column * call.mask_token);
                s[(size_t)r * kept.count + t] = x;
            }
        }
        for (int r = 0; r < rows; r++) {
            float* p = s + (size_t)r * kept.count;
            if (!running.weigh(r, p, kept.count)) std::fill(p, p + kept.count, 0.0f);
        }
        for (int t = 0; t < kept.count; t++) {
            const int64_t at = b * kept.batch_stride + t * kept.token_stride + g * kept.head_stride;
            get_row(kept.value, kept.dtype, at, D, row);
            for (int r = 0; r < rows; r++) {
                const float p = s[(size_t)r * kept.count + t];
                float* to = running.sums + (size_t)r * D;
                Floats weight = broadcast_float(p);
                for (int c = 0; c < D; c += 16)
                    store_floats(to + c, fma(weight, load_floats(row + c), load_floats(to + c)));
            }
        }
    }
};

inline Running running_at(float* memory, int rows, int width) {
    return {rows, width, memory, memory + rows, memory + 2 * rows};
}

// Splits the blocks of every sequence and key/value head over the threads, then joins the parts.
inline int attend(const xq_attend& call) try {
    const int rows = call.group_heads * call.queries, D = call.head_size;
    const int heads = call.batch * call.kv_heads;
    const int threads = std::max(call.threads, 1);
    int parts = std::max(1, std::min(call.columns, (4 * threads + heads - 1) / heads));
    const int each = std::max(1, (call.columns + parts - 1) / std::max(parts, 1));
    parts = call.columns ? (call.columns + each - 1) / each : 0;
    const int slots = parts + 1;  // the last is for the exact tokens
    const size_t state = ((size_t)rows * (D + 2) + 15) / 16 * 16;
    Arena shared(sizeof(float) * state * slots * heads);
    float* states = shared.take<float>(state * slots * heads);
    bool failed = false;
#pragma omp parallel num_threads(threads)
    {
        try {
            Arena arena(Task::bytes(call) + 4096);
            uint8_t* clean = arena.next;
#pragma omp for schedule(dynamic) collapse(2)
            for (int head = 0; head < heads; head++)
                for (int part = 0; part < slots; part++) {
                    arena.next = clean;
                    Running running = running_at(states + ((size_t)head * slots + part) * state, rows, D);
                    running.clear();
                    Task task(call, head / call.kv_heads, head % call.kv_heads, arena, running);
                    if (part < parts) {
                        task.attend_blocks(part * each, std::min((part + 1) * each, call.columns));
                    } else {
                        for (int e = 0; e < call.exact_count; e++) task.attend_exact(call.exact[e]);
                    }
                }
        } catch (const std::bad_alloc&) {
#pragma omp atomic write
            failed = true;
        }
    }
    if (failed) return 1;
    for (int head = 0; head < heads; head++) {
        Running all = running_at(states + (size_t)head * slots * state, rows, D);
        for (int part = 1; part < slots; part++)
            all.merge(running_at(states + ((size_t)head * slots + part) * state, rows, D));
        const int b = head / call.kv_heads, g = head % call.kv_heads;
        for (int r = 0; r < rows; r++) {
            const int h = g * call.group_heads + r / call.queries;
            const int64_t at = b * call.out_batch + r % call.queries * call.out_token + h * call.out_head;
            const float inverse = all.total[r] > 0 ? 1 / all.total[r] : 0;
            for (int c = 0; c < D; c++) put(call.out, call.dtype, at + c, all.sums[(size_t)r * D + c] * inverse);
        }
    }
    return 0;
} catch (const std::bad_alloc&) {
    return 1;
}

}  // namespace
