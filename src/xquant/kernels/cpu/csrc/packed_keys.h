// Scores of a few queries with packed keys, a block at a time. Included once for each instruction set.
#pragma once
#include "operand.h"

namespace {

// Where the angle of each channel of a head is in the table of turns, for keys that are kept apart. The same
// for all tasks of a call.
struct TurnPlaces {
    struct Place {
        int32_t at, partner;  // in the table, at a tile's first token; the other channel of the pair
        float sine;           // 1 or -1, over the unit of the table
    };
    Place* of = nullptr;  // [D]

    static size_t bytes(const xq_attend& c) { return sizeof(Place) * c.head_size + 64; }
    TurnPlaces(const xq_attend& c, Arena& arena) {
        if (!c.key.outlier_count || !c.rope_table) return;
        const int D = c.head_size, half = D / 2, units = D / 32;
        of = arena.take<Place>(D);
        for (int i = 0; i < D; i++) {
            const int j = i % half, e = j % 4, q = j / 4;
            of[i] = {((q % units * 4 + q / units) * 2 + e % 2) * 64 + e / 2, i < half ? i + half : i - half,
                     (i < half ? 1 : -1) / 32767.0f};
        }
    }
};

// The keys of a task.
struct Keys : Side {
    const TurnPlaces& turns;
    float* query;               // [rows, D] times the scaling
    float* turned;              // [rows, D] turned back to the start of a block
    float* folded;              // [MAX_ROWS, D]
    int32_t *scale16, *zero16;  // [D / 2], or [ranges of a token, 16]
    float* pair_scale;          // [D / 2]

    static size_t bytes(const xq_attend& c) {
        const size_t rows = c.group_heads * c.queries, D = c.head_size;
        return 4 * (2 * rows * D + MAX_ROWS * D + 2 * 16 * D + D / 2) + 6 * 64;
    }

    Keys(const xq_attend& c, int b, int g, const Scratch& scratch, const TurnPlaces& turns, Arena& arena)
        : Side(c, c.key, 32767, b, g, scratch), turns(turns) {
        query = arena.take<float>((size_t)rows * D);
        turned = arena.take<float>((size_t)rows * D);
        folded = arena.take<float>(MAX_ROWS * D);
        scale16 = arena.take<int32_t>(16 * D);
        zero16 = arena.take<int32_t>(16 * D);
        pair_scale = arena.take<float>(D / 2);
        load_query();
    }

    void load_query() {
        const xq_attend& c = call;
        for (int h = 0; h < c.group_heads; h++)
            for (int q = 0; q < c.queries; q++)
                get_row(c.query, c.dtype,
                        b * c.query_batch + (g * c.group_heads + h) * c.query_head + q * c.query_token, D,
                        query + (size_t)(h * c.queries + q) * D);
        for (int i = 0; i < rows * D; i++) query[i] *= c.scaling;
    }

    // R(-p) q: what a key turned by r positions is to be dotted with, for a block that starts at p.
    void turn_back(int column) {
        if (!call.rope_table) {
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
        const float* offset = side.offset ? side.offset + g * D : nullptr;
        const float most = highest_weight(D, (float)((1 << side.bits) - 1));
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            Floats top[MAX_ROWS], constant[MAX_ROWS];
            for (int i = 0; i < count; i++) top[i] = constant[i] = broadcast_float(0);
            for (int c = 0; c < D; c += 16) {
                const Floats step = load_halves(scale + c);
                Floats base = load_halves(zero + c);
                if (offset) base = base + load_floats(offset + c);
                for (int i = 0; i < count; i++) {
                    const Floats x = load_floats(turned + (size_t)(r + i) * D + c), scaled = x * step;
                    top[i] = maximum(top[i], absolute(scaled));
                    constant[i] = fma(x, base, constant[i]);
                    store_floats(folded + i * D + c, scaled);
                }
            }
            for (int i = 0; i < count; i++) {
                bias[i] = sum(constant[i]);
                steps[i] = to_weights(folded + i * D, D, highest(top[i]), most, weights + i * 4, count);
            }
            const DotCodes dot = pick_dot_codes<TILES>(side.bits, count);
            for (int t = from; t < to; t += 16 * TILES)
                dot(codes + t / 16 * tile_bytes(D, side.bits), D, weights, steps, bias,
                    scores + (size_t)r * n + t, n, r ? 0 : ahead);
        }
    }

    // A scale times 2^bits must fit too.
    float key_limit() const {
        return side.levels ? KEY_LIMIT : std::min(KEY_LIMIT, 16383 * (1 - 1.0f / (1 << side.bits)));
    }

    void largest(Floats scale, Floats zero, Floats& reach) const {
        if (side.levels) {  // levels are in [-1, 1]
            reach = maximum(reach, absolute(zero) + scale);
        } else {
            Floats end = fma(scale, broadcast_float((float)((1 << side.bits) - 1)), zero);
            reach = maximum(reach, maximum(absolute(zero), absolute(end)));
        }
    }

    // int16 scale and zero of every channel; the two channels of a rotation share a unit.
    void fix_channels(const uint16_t* scale, const uint16_t* zero) {
        const float* offset = side.offset ? side.offset + g * D : nullptr;
        const float per_level = side.levels ? 32768.0f / 32767 : (float)(1 << side.bits);
        const int half = D / 2;
        const Floats limit = broadcast_float(key_limit()), level = broadcast_float(per_level);
        const QuadPlaces low{D / 32, 1, 0, 0}, high{D / 32, 1, 0, 4};  // quads of half a head are 4 apart
        QuadPlaces places[2][2] = {{low, low}, {high, high}};
        for (int c = 0; c < half; c += 16) {
            Floats reach = broadcast_float(1e-20f), s[2], z[2];
            for (int part = 0; part < 2; part++) {
                s[part] = load_halves(scale + c + part * half);
                z[part] = load_halves(zero + c + part * half);
                if (offset) z[part] = z[part] + load_floats(offset + c + part * half);
                largest(s[part], z[part], reach);
            }
            const Floats unit = limit / reach;
            store_floats(pair_scale + c, reach / limit);
            for (int part = 0; part < 2; part++) {
                // 2^15 where a range of 1 bit is symmetric
                const Floats most = broadcast_float(32767);
                places[part][0].store(to_nearest(minimum(s[part] * unit * level, most)), (int16_t*)scale16);
                places[part][1].store(to_nearest(z[part] * unit), (int16_t*)zero16);
            }
        }
    }

    // The same for ranges per token: one unit, vectors over the 16 tokens of a tile for each range.
    void unit_of_tokens(const uint16_t* scale, const uint16_t* zero) {
        float reach = 1e-20f;
        for (int t = 0; t < n; t++)
            for (int j = g * D / side.group; j <= (g * D + D - 1) / side.group; j++) {
                float s = half_to_float(scale[j * n + t]), z = half_to_float(zero[j * n + t]);
                float end = side.levels ? std::fabs(z) + s : std::fabs(z + s * ((1 << side.bits) - 1));
                reach = std::fmax(reach, std::fmax(std::fabs(z), end));
            }
        for (int j = 0; j < D / 2; j++) pair_scale[j] = reach / key_limit();
    }
    void fix_tokens(const uint16_t* scale, const uint16_t* zero, int t) {
        const float per_level = side.levels ? 32768.0f / 32767 : (float)(1 << side.bits);
        const int first = g * D / side.group, last = (g * D + D - 1) / side.group;
        for (int j = first; j <= last; j++)
            for (int lane = 0; lane < 16; lane++) {
                float s = half_to_float(scale[j * n + t + lane]) / pair_scale[0] * per_level;
                float z = half_to_float(zero[j * n + t + lane]) / pair_scale[0];
                uint32_t s16 = (uint16_t)(int16_t)std::lrintf(std::fmin(s, 32767.0f));
                uint32_t z16 = (uint16_t)(int16_t)std::lrintf(z);
                scale16[(j - first) * 16 + lane] = (int32_t)(s16 | s16 << 16);
                zero16[(j - first) * 16 + lane] = (int32_t)(z16 | z16 << 16);
            }
    }

    // Levels [D / 2] of one tile to keys, turned by 0, 1, ... positions where the call asks for it.
    template <bool PER_TOKEN, bool TURN>
    void to_keys(Words* tile, int tile_index) {
        const int units = D / 32, group = side.group, first = g * D / group;
        const int16_t* table = TURN ? call.rope_table + (size_t)tile_index * D * 16 : nullptr;
        for (int r = 0; r < units; r++, tile += 16)
            for (int k = 0; k < 4; k++) {
                const int quad = r + k * units;
                for (int odd = 0; odd < 2; odd++) {
                    const int a = k * 2 + odd, b = a + 8;  // channels half a head apart
                    Words scale_a, scale_b, zero_a, zero_b;
                    if (PER_TOKEN) {
                        const int ga = (g * D + quad * 4) / group - first;
                        const int gb = (g * D + D / 2 + quad * 4) / group - first;
                        scale_a = load(scale16 + ga * 16), zero_a = load(zero16 + ga * 16);
                        scale_b = load(scale16 + gb * 16), zero_b = load(zero16 + gb * 16);
                    } else {
                        scale_a = broadcast(scale16[r * 16 + a]), zero_a = broadcast(zero16[r * 16 + a]);
                        scale_b = broadcast(scale16[r * 16 + b]), zero_b = broadcast(zero16[r * 16 + b]);
                    }
                    Words low = add16(times(tile[a], scale_a), zero_a);
                    Words high = add16(times(tile[b], scale_b), zero_b);
                    if (TURN) {
                        Words cos = load(table), sin = load(table + 32);
                        table += 64;
                        tile[a] = sub16(times(low, cos), times(high, sin));
                        tile[b] = add16(times(high, cos), times(low, sin));
                    } else {
                        tile[a] = low;
                        tile[b] = high;
                    }
                }
            }
    }

    // Keys as int16, a few tiles at a time, then dotted with the query.
    void score_expanded(const uint8_t* codes, const uint16_t* scale, const uint16_t* zero, int from, int to,
                        ptrdiff_t ahead) {
        if (side.per_token)
            unit_of_tokens(scale, zero);
        else
            fix_channels(scale, zero);
        Table table = load_table(table16);
        const Expand unpack_tile = pick_expand(side.bits, side.levels != nullptr);
        const int half = D / 2;
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            for (int i = 0; i < count; i++) {
                const float* q = turned + (size_t)(r + i) * D;
                Floats top = broadcast_float(0);
                for (int c = 0; c < D; c += 16) {
                    Floats x = load_floats(q + c) * load_floats(pair_scale + (c < half ? c : c - half));
                    top = maximum(top, absolute(x));
                    store_floats(folded + c, x);
                }
                const float most = highest_word_weight(TURNED_LIMIT);
                steps[i] = to_weights(folded, D, highest(top), most, weights + i * 4, count);
                bias[i] = 0;
            }
            if (!side.per_token && !side.levels && call.rope_table) {
                const DotTurned dot = pick_dot_turned(side.bits, count);
                for (int t = from; t < to; t += 16 * TILES)
                    dot(codes + t / 16 * tile_bytes(D, side.bits), D,
                        {scale16, zero16, call.rope_table + (size_t)(t / 16) * D * 16}, weights, steps,
                        scores + (size_t)r * n + t, n, r ? 0 : ahead);
                continue;
            }
            const DotWords dot = pick_dot_words<TILES>(count);
            for (int t = from; t < to; t += 16 * TILES) {
                for (int k = 0; k < TILES; k++) {
                    Words* tile = words + (size_t)k * half;
                    const int index = t / 16 + k;
                    unpack_tile(codes + index * tile_bytes(D, side.bits), D, table, tile, r ? 0 : ahead);
                    if (side.per_token) {
                        fix_tokens(scale, zero, index * 16);
                        call.rope_table ? to_keys<true, true>(tile, index) : to_keys<true, false>(tile, index);
                    } else {
                        call.rope_table ? to_keys<false, true>(tile, index) : to_keys<false, false>(tile, index);
                    }
                }
                dot(words, D, weights, steps, bias, scores + (size_t)r * n + t, n);
            }
        }
    }

    void score_outliers(int64_t id) {
        each_outlier(id, [&](int t, int c, float excess) {
            const float *here = turned + c, *there = here;
            float cos = excess, sin = 0;
            if (call.rope_table) {
                const TurnPlaces::Place place = turns.of[c];
                const int16_t* pair = call.rope_table + (size_t)(t / 16) * D * 16 + place.at + t % 16 * 2;
                there = turned + place.partner;
                cos = excess * (1 / 32767.0f) * pair[0];
                sin = excess * place.sine * pair[32];
            }
            float* score = scores + t;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++, here += D, there += D, score += n) *score += *here * cos + *there * sin;
        });
    }

    // `next`: the spot whose codes are to be in the CPU's cache when it is their turn.
    void score(int64_t id, Spot next) {
        const Ranges ranges(side, id);
        const auto* codes = at_address<uint8_t>(codes_at({id, g}));
        const ptrdiff_t ahead = (ptrdiff_t)(codes_at(next) - codes_at({id, g}));
        std::memset(scores, 0, sizeof(float) * (size_t)rows * n);
        const int channels = call.kv_heads * D;
        const bool fold = !side.per_token && !side.levels && !call.rope_table;
        if (side.per_token) {
            score_expanded(codes, ranges.scale, ranges.zero, 0, n, ahead);
        } else {
            const int group = side.offline ? n : side.group;
            for (int from = 0, i = 0; from < n; from += group, i++) {
                const uint16_t* scale = ranges.scale + (size_t)i * channels + g * D;
                const uint16_t* zero = ranges.zero + (size_t)i * channels + g * D;
                const int to = std::min(from + group, n);
                fold ? score_folded(codes, scale, zero, from, to, ahead)
                     : score_expanded(codes, scale, zero, from, to, ahead);
            }
        }
        if (side.outlier_count) score_outliers(id);
    }
};

}  // namespace
