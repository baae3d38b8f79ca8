// Attention of a few queries over packed keys and values, which are never materialized.
// Included once for each instruction set.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "arena.h"
#include "elements.h"
#include "softmax.h"

namespace {

// Ranges of one block: element (token, channel) decodes to code * scale + zero (+ offset).
struct Ranges {
    const uint16_t *scale, *zero;
    Ranges(const xq_side& side, int64_t id)
        : scale(at_address<uint16_t>(side.scale[side.fixed ? 0 : id])),
          zero(at_address<uint16_t>(side.zero[side.fixed ? 0 : id])) {}
};

// A block of one sequence and its key/value head.
struct Spot {
    int64_t id;
    int head;
};

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
        if (!c.key.outlier_count || !c.turn) return;
        const int D = c.head_size, half = D / 2, units = D / 32;
        of = arena.take<Place>(D);
        for (int i = 0; i < D; i++) {
            const int j = i % half, e = j % 4, q = j / 4;
            of[i] = {((q % units * 4 + q / units) * 2 + e % 2) * 64 + e / 2, i < half ? i + half : i - half,
                     (i < half ? 1 : -1) / 32767.0f};
        }
    }
};

// The task of one thread: some blocks of one sequence and key/value head.
struct Task {
    const xq_attend& call;
    const int b, g;
    const int D, n, rows, per, channels;
    float* query;        // [rows, D] times the scaling
    float* turned;       // [rows, D] turned back to the start of a block
    float* scores;       // [rows, n]
    int16_t* weights;    // [MAX_ROWS, max(D, n)]
    float* steps;        // [MAX_ROWS]
    float* bias;         // [MAX_ROWS]
    float* folded;       // [MAX_ROWS, D]
    Words* words;        // [TILES, max(D, n) / 2]
    int32_t *scale16, *zero16;  // [D / 2], or [ranges of a token, 16]
    float* pair_scale;   // [D / 2]
    float* token_scale;  // [2, max(D, n)]
    int16_t table16[16];
    const TurnPlaces& turns;
    int32_t *outlier_token, *outlier_at;  // of a block
    float* exact_scores; // [rows, most exact tokens]
    Running running;

    static size_t most(const xq_attend& c) { return std::max(c.head_size, c.block); }
    static size_t outlier_room(const xq_attend& c) {
        if (!c.key.outlier_count && !c.value.outlier_count) return 0;
        return (size_t)c.block * c.kv_heads * c.head_size + 32;
    }
    static size_t bytes(const xq_attend& c) {
        size_t rows = c.group_heads * c.queries, D = c.head_size, m = most(c), exact = 0;
        for (int e = 0; e < c.exact_count; e++) exact = std::max(exact, (size_t)c.exact[e].count);
        return 4 * (rows * exact + 3 * rows * D + rows * c.block + MAX_ROWS * m + rows * 3 + 5 * m + (MAX_ROWS + 4) * D + 64 * D) +
               2 * MAX_ROWS * m + 64 * TILES * m / 2 + 8 * outlier_room(c) + 40 * 64;
    }

    Task(const xq_attend& c, int b, int g, Arena& arena, Running running, const TurnPlaces& turns)
        : call(c), b(b), g(g), D(c.head_size), n(c.block), rows(c.group_heads * c.queries),
          per(c.group_heads), channels(c.kv_heads * c.head_size), turns(turns), running(running) {
        query = arena.take<float>((size_t)rows * D);
        turned = arena.take<float>((size_t)rows * D);
        scores = arena.take<float>((size_t)rows * n);
        weights = arena.take<int16_t>(MAX_ROWS * most(c));
        steps = arena.take<float>(MAX_ROWS);
        bias = arena.take<float>(MAX_ROWS);
        folded = arena.take<float>(MAX_ROWS * D);
        words = arena.take<Words>(TILES * most(c) / 2);
        scale16 = arena.take<int32_t>(16 * D);
        zero16 = arena.take<int32_t>(16 * D);
        pair_scale = arena.take<float>(D / 2);
        token_scale = arena.take<float>(2 * most(c));
        const size_t most_outliers = outlier_room(c);
        outlier_token = arena.take<int32_t>(most_outliers);
        outlier_at = arena.take<int32_t>(most_outliers);
        size_t exact = 0;
        for (int e = 0; e < c.exact_count; e++) exact = std::max(exact, (size_t)c.exact[e].count);
        exact_scores = arena.take<float>(rows * exact);
    }

    void load_query() {
        const xq_attend& c = call;
        for (int h = 0; h < per; h++)
            for (int q = 0; q < c.queries; q++)
                get_row(c.query, c.dtype, b * c.query_batch + (g * per + h) * c.query_head + q * c.query_token,
                        D, query + (size_t)(h * c.queries + q) * D);
        for (int i = 0; i < rows * D; i++) query[i] *= c.scaling;
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
        const float most = highest_weight(D, (float)((1 << key.bits) - 1));
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
            const DotCodes dot = pick_dot_codes<TILES>(key.bits, count);
            for (int t = from; t < to; t += 16 * TILES)
                dot(codes + t / 16 * tile_bytes(D, key.bits), D, weights, steps, bias,
                    scores + (size_t)r * n + t, n, r ? 0 : ahead);
        }
    }

    // A scale times 2^bits must fit too.
    float key_limit() const {
        return call.key.levels ? KEY_LIMIT : std::min(KEY_LIMIT, 16383 * (1 - 1.0f / (1 << call.key.bits)));
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
        const Floats limit = broadcast_float(key_limit()), level = broadcast_float(per_level);
        const QuadPlaces low{D / 32, 1, 0, 0}, high{D / 32, 1, 0, 4};  // quads of half a head are 4 apart
        QuadPlaces places[2][2] = {{low, low}, {high, high}};
        for (int c = 0; c < half; c += 16) {
            Floats reach = broadcast_float(1e-20f), s[2], z[2];
            for (int part = 0; part < 2; part++) {
                s[part] = load_halves(scale + c + part * half);
                z[part] = load_halves(zero + c + part * half);
                if (offset) z[part] = z[part] + load_floats(offset + c + part * half);
                largest(key, s[part], z[part], reach);
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
        const xq_side& key = call.key;
        float reach = 1e-20f;
        for (int t = 0; t < n; t++)
            for (int j = g * D / key.group; j <= (g * D + D - 1) / key.group; j++) {
                float s = half_to_float(scale[j * n + t]), z = half_to_float(zero[j * n + t]);
                float end = key.levels ? std::fabs(z) + s : std::fabs(z + s * ((1 << key.bits) - 1));
                reach = std::fmax(reach, std::fmax(std::fabs(z), end));
            }
        for (int j = 0; j < D / 2; j++) pair_scale[j] = reach / key_limit();
    }
    void fix_tokens(const uint16_t* scale, const uint16_t* zero, int t) {
        const xq_side& key = call.key;
        const float per_level = key.levels ? 32768.0f / 32767 : (float)(1 << key.bits);
        const int first = g * D / key.group, last = (g * D + D - 1) / key.group;
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
        const int units = D / 32, group = call.key.group, first = g * D / group;
        const int16_t* table = TURN ? call.turn + (size_t)tile_index * D * 16 : nullptr;
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
        const xq_side& key = call.key;
        if (key.per_token)
            unit_of_tokens(scale, zero);
        else
            fix_channels(scale, zero);
        Table table = load_table(table16);
        const Expand unpack_tile = pick_expand(key.bits, key.levels != nullptr);
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
                steps[i] = to_weights(folded, D, highest(top), highest_word_weight(TURNED_LIMIT), weights + i * 4, count);
                bias[i] = 0;
            }
            if (!key.per_token && !key.levels && call.turn) {
                const DotTurned dot = pick_dot_turned(key.bits, count);
                for (int t = from; t < to; t += 16 * TILES)
                    dot(codes + t / 16 * tile_bytes(D, key.bits), D,
                        {scale16, zero16, call.turn + (size_t)(t / 16) * D * 16}, weights, steps,
                        scores + (size_t)r * n + t, n, r ? 0 : ahead);
                continue;
            }
            const DotWords dot = pick_dot_words<TILES>(count);
            for (int t = from; t < to; t += 16 * TILES) {
                for (int k = 0; k < TILES; k++) {
                    Words* tile = words + (size_t)k * half;
                    const int index = t / 16 + k;
                    unpack_tile(codes + index * tile_bytes(D, key.bits), D, table, tile, r ? 0 : ahead);
                    if (key.per_token) {
                        fix_tokens(scale, zero, index * 16);
                        call.turn ? to_keys<true, true>(tile, index) : to_keys<true, false>(tile, index);
                    } else {
                        call.turn ? to_keys<false, true>(tile, index) : to_keys<false, false>(tile, index);
                    }
                }
                dot(words, D, weights, steps, bias, scores + (size_t)r * n + t, n);
            }
        }
    }

    // Calls found(token, channel of the head, what the element is more than its code says) for the elements
    // of this head that are kept apart. Without branches that depend on where they are.
    template <class Found>
    void each_outlier(const xq_side& side, int64_t id, Found found) const {
        const auto* excess = at_address<uint16_t>(side.outlier_excess[id]);
        const auto* channel = at_address<uint16_t>(side.outlier_channel[id]);
        const auto* count8 = at_address<uint8_t>(side.outlier_count[id]);
        const auto* count16 = at_address<uint16_t>(side.outlier_count[id]);
        int total = 0;
        for (int t = 0; t < n; t++) {
            const int count = side.count_bytes == 1 ? count8[t] : count16[t];
            for (int i = 0; i < count; i += 16)  // the next token writes over what is too much
                store(outlier_token + total + i, broadcast(t));
            total += count;
        }
        const int first = g * D, listed = list_between(channel, total, first, D, outlier_at);
        for (int i = 0; i < listed; i++) {
            const int at = outlier_at[i];
            found(outlier_token[at], channel[at] - first, half_to_float(excess[at]));
        }
    }

    void score_outliers(int64_t id) {
        each_outlier(call.key, id, [&](int t, int c, float excess) {
            const float *here = turned + c, *there = here;
            float cos = excess, sin = 0;
            if (call.turn) {
                const TurnPlaces::Place place = turns.of[c];
                const int16_t* pair = call.turn + (size_t)(t / 16) * D * 16 + place.at + t % 16 * 2;
                there = turned + place.partner;
                cos = excess * (1 / 32767.0f) * pair[0];
                sin = excess * place.sine * pair[32];
            }
            float* score = scores + t;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++, here += D, there += D, score += n) *score += *here * cos + *there * sin;
        });
    }

    uint64_t codes_at(const xq_side& side, Spot spot) const {
        return side.codes[spot.id] + (uint64_t)spot.head * n * D * side.bits / 8;
    }

    // `next`: the spot whose codes are to be in the CPU's cache when it is their turn.
    void score(int64_t id, Spot next) {
        const xq_side& key = call.key;
        const Ranges ranges(key, id);
        const auto* codes = at_address<uint8_t>(codes_at(key, {id, g}));
        const ptrdiff_t ahead = (ptrdiff_t)(codes_at(key, next) - codes_at(key, {id, g}));
        std::memset(scores, 0, sizeof(float) * (size_t)rows * n);
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
        if (key.outlier_count) score_outliers(id);
    }

    void mask_scores(int start, int valid) {
        for (int r = 0; r < rows; r++) {
            float* s = scores + (size_t)r * n;
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

    // Weights of a block for values, of row i of `count`: probabilities times `scale` (null: 1), none above
    // `top`. The bias is their sum with `zero` (null: 0) in place of the scale.
    void weigh_values(const float* p, const float* scale, const float* zero, float top, int i, int count) {
        const xq_side& value = call.value;
        const float most =
            value.levels ? highest_word_weight(VALUE_LIMIT) : highest_weight(n, (float)((1 << value.bits) - 1));
        const float step = top / most;
        const Floats inverse = to_units(step);
        QuadPlaces places{n / 32, count};
        Floats constant = broadcast_float(0);
        for (int t = 0; t < n; t += 16) {
            const Floats weight = load_floats(p + t);
            if (zero) constant = fma(weight, load_floats(zero + t), constant);
            const Floats scaled = scale ? weight * load_floats(scale + t) : weight;
            places.store(to_nearest(scaled * inverse), weights + i * 4);
        }
        bias[i] = zero ? sum(constant) : 0;
        steps[i] = value.levels ? step / VALUE_LIMIT : step;
    }

    // Adds the codes of `tiles` tiles of channels, weighted, and the bias, to `out`.
    void add_tiles(const uint8_t* codes, int tiles, int count, float* out, size_t stride, ptrdiff_t ahead) {
        const xq_side& value = call.value;
        if (value.levels) {
            const Expand unpack_tile = pick_expand(value.bits, true);
            const Table table = load_table(table16);
            for (int k = 0; k < tiles; k++)
                unpack_tile(codes + k * tile_bytes(n, value.bits), n, table, words + (size_t)k * (n / 2), ahead);
            (tiles == 1 ? pick_dot_words<1>(count) : pick_dot_words<TILES>(count))(words, n, weights, steps, bias,
                                                                                  out, stride);
        } else {
            (tiles == 1 ? pick_dot_codes<1>(value.bits, count) : pick_dot_codes<TILES>(value.bits, count))(
                codes, n, weights, steps, bias, out, stride, ahead);
        }
    }

    // Ranges per token [ranges, n]: their scale is folded into the probabilities.
    void add_values_by_token(const uint8_t* codes, const Ranges& ranges, int r, int count, ptrdiff_t ahead) {
        const xq_side& value = call.value;
        float *scale = token_scale, *zero = token_scale + n;
        int prepared = -1;
        for (int c = 0; c < D;) {
            const int j = (g * D + c) / value.group;
            // Some ranges end inside a head, and some heads inside a range.
            const int end = c + 16 * TILES;
            const int tiles = end <= D && (g * D + end - 1) / value.group == j ? TILES : 1;
            if (j != prepared) {
                prepared = j;
                Floats high = broadcast_float(0);
                for (int t = 0; t < n; t += 16) {
                    Floats s = load_halves(ranges.scale + (size_t)j * n + t);
                    high = maximum(high, s);
                    store_floats(scale + t, s);
                    store_floats(zero + t, load_halves(ranges.zero + (size_t)j * n + t));
                }
                const float highest_scale = highest(high);
                for (int i = 0; i < count; i++)
                    weigh_values(scores + (size_t)(r + i) * n, scale, zero, running.latest[r + i] * highest_scale, i,
                                 count);
            }
            add_tiles(codes + c / 16 * tile_bytes(n, value.bits), tiles, count,
                      running.sums + (size_t)r * D + c, D, r ? 0 : ahead);
            c += 16 * tiles;
        }
    }

    // One range per channel and block: applied to the sums.
    void add_values_by_channel(const uint8_t* codes, const Ranges& ranges, int r, int count, ptrdiff_t ahead) {
        float totals[MAX_ROWS];
        alignas(64) float part[MAX_ROWS * 16 * TILES];
        for (int i = 0; i < count; i++) {
            const float* p = scores + (size_t)(r + i) * n;
            Floats total = broadcast_float(0);
            for (int t = 0; t < n; t += 16) total = total + load_floats(p + t);
            totals[i] = sum(total);
            weigh_values(p, nullptr, nullptr, running.latest[r + i], i, count);
        }
        for (int c = 0; c < D; c += 16 * TILES) {
            std::memset(part, 0, sizeof part);
            add_tiles(codes + c / 16 * tile_bytes(n, call.value.bits), TILES, count, part, 16 * TILES,
                      r ? 0 : ahead);
            for (int i = 0; i < count; i++)
                for (int k = 0; k < TILES; k++) {
                    float* to = running.sums + (size_t)(r + i) * D + c + k * 16;
                    Floats scale = load_halves(ranges.scale + g * D + c + k * 16);
                    Floats zero = load_halves(ranges.zero + g * D + c + k * 16);
                    Floats added = fma(load_floats(part + (i * TILES + k) * 16), scale,
                                       zero * broadcast_float(totals[i]));
                    store_floats(to, load_floats(to) + added);
                }
        }
    }

    void add_value_outliers(int64_t id) {
        each_outlier(call.value, id, [&](int t, int c, float excess) {
            const float* weight = scores + t;
            float* sum = running.sums + c;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++, weight += n, sum += D) *sum += *weight * excess;
        });
    }

    void add_values(int64_t id, Spot next) {
        const xq_side& value = call.value;
        const Ranges ranges(value, id);
        const auto* codes = at_address<uint8_t>(codes_at(value, {id, g}));
        const ptrdiff_t ahead = (ptrdiff_t)(codes_at(value, next) - codes_at(value, {id, g}));
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            value.per_token ? add_values_by_token(codes, ranges, r, count, ahead)
                            : add_values_by_channel(codes, ranges, r, count, ahead);
        }
        if (value.outlier_count) add_value_outliers(id);
    }

    void set_table(const xq_side& side, float most) {
        std::memset(table16, 0, sizeof table16);
        if (side.levels)
            for (int i = 0; i < 1 << side.bits; i++) table16[i] = (int16_t)std::lrintf(side.levels[i] * most);
    }

    // Asks for the ranges of a block that is wanted next; its codes are asked for as others are read.
    void prefetch_ranges(const xq_side& side, Spot next) const {
        if (side.fixed) return;
        const size_t count = side.per_token ? n : D;
        const size_t at = side.per_token ? (size_t)(next.head * D / side.group) * n : (size_t)next.head * D;
        for (uint64_t address : {side.scale[next.id], side.zero[next.id]})
            for (size_t i = 0; i < count; i += 32) prefetch(at_address<uint16_t>(address) + at + i);
    }

    // -- what there is to attend to --------------------------------------------------------------

    // `after`: where this thread goes on.
    void attend_blocks(int first, int last, Spot after) {
        int start = 0;
        for (int j = 0; j < first; j++) start += call.lengths[j];
        const int64_t* ids = call.table + (size_t)b * call.columns;
        for (int j = first; j < last && start < call.limit; start += call.lengths[j++]) {
            const int64_t id = ids[j];
            const Spot next = j + 1 < last ? Spot{ids[j + 1], g} : after;
            prefetch_ranges(call.key, next);
            prefetch_ranges(call.value, next);
            turn_back(j);
            set_table(call.key, 32767);
            score(id, next);
            mask_scores(start, std::min(call.lengths[j], call.limit - start));
            if (!running.weigh(scores, n)) continue;
            set_table(call.value, VALUE_LIMIT);
            add_values(id, next);
        }
    }

    void attend_exact(const xq_exact& kept) {
        if (kept.count == 0) return;
        const int half = D / 2;
        float *s = exact_scores, *row = folded, *copy = token_scale;
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
                float x = sum(dot);
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
        if (!running.weigh(s, kept.count)) return;
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

// Splits the blocks of every sequence and key/value head over the threads, then joins the parts. 1: not
// enough memory.
inline int attend(const xq_attend& call) {
    const int rows = call.group_heads * call.queries, D = call.head_size;
    const int heads = call.batch * call.kv_heads;
    const int threads = std::max(call.threads, 1);
    // More parts than threads, so that none waits long for the last.
    int parts = std::max(1, std::min(call.columns / 2, (16 * threads + heads - 1) / heads));
    const int each = std::max(1, (call.columns + parts - 1) / std::max(parts, 1));
    parts = call.columns ? (call.columns + each - 1) / each : 0;
    const int slots = parts + 1;  // the last is for the exact tokens
    const size_t state = Running::floats(rows, D);
    static thread_local Arena shared;
    if (!shared.reserve(sizeof(float) * state * slots * heads + 64 + TurnPlaces::bytes(call))) return 1;
    float* states = shared.take<float>(state * slots * heads);
    const TurnPlaces turns(call, shared);
    int failed = 0;
    const int tasks = heads * slots;
    std::atomic<int> taken{0};
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        static thread_local Arena arena;
        const bool ready = arena.reserve(Task::bytes(call));
        failed += !ready;
        // Threads take tasks one ahead, to know which codes they will want.
        for (int task = ready ? taken++ : tasks, next; task < tasks; task = next) {
            next = taken++;
            arena.next = arena.base;
            const int head = task / slots, part = task % slots;
            Running running(states + (size_t)task * state, rows, D);
            running.clear();
            Task work(call, head / call.kv_heads, head % call.kv_heads, arena, running, turns);
            work.load_query();
            if (part == parts) {
                for (int e = 0; e < call.exact_count; e++) work.attend_exact(call.exact[e]);
                continue;
            }
            const int last = std::min((part + 1) * each, call.columns);
            Spot after = {call.table[(size_t)work.b * call.columns + last - 1], work.g};
            if (next < tasks && next % slots < parts)
                after = {call.table[(size_t)(next / slots / call.kv_heads) * call.columns + next % slots * each],
                         next / slots % call.kv_heads};
            work.attend_blocks(part * each, last, after);
        }
    }
    if (failed) return 1;
    for (int head = 0; head < heads; head++) {
        Running all(states + (size_t)head * slots * state, rows, D);
        for (int part = 1; part < slots; part++)
            all.merge(Running(states + ((size_t)head * slots + part) * state, rows, D));
        const int b = head / call.kv_heads, g = head % call.kv_heads;
        for (int r = 0; r < rows; r++) {
            const int h = g * call.group_heads + r / call.queries;
            const int64_t at = b * call.out_batch + r % call.queries * call.out_token + h * call.out_head;
            const float inverse = all.total[r] > 0 ? 1 / all.total[r] : 0;
            for (int c = 0; c < D; c++) put(call.out, call.dtype, at + c, all.sums[(size_t)r * D + c] * inverse);
        }
    }
    return 0;
}

}  // namespace
