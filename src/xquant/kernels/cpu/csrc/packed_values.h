// Sums of packed values by weights, a block at a time. Included once for each instruction set.
#pragma once
#include "operand.h"
#include "online_softmax.h"

namespace {

// The values of a task: weights are in `scores`, sums in `running`.
struct Values : Side {
    const Running running;
    float* token_scale;  // [2, n]

    static size_t bytes(const xq_attend& c) { return sizeof(float) * 2 * c.block + 64; }

    Values(const xq_attend& c, int b, int g, const Scratch& scratch, Running running, Arena& arena)
        : Side(c, c.value, VALUE_LIMIT, b, g, scratch), running(running) {
        token_scale = arena.take<float>(2 * (size_t)n);
    }

    // Weights of a block for values, of row i of `count`: probabilities times `scale` (null: 1), none above
    // `top`. The bias is their sum with `zero` (null: 0) in place of the scale.
    void weigh(const float* p, const float* scale, const float* zero, float top, int i, int count) {
        const float most =
            side.levels ? highest_word_weight(VALUE_LIMIT) : highest_weight(n, (float)((1 << side.bits) - 1));
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
        steps[i] = side.levels ? step / VALUE_LIMIT : step;
    }

    // Adds the codes of `tiles` tiles of channels, weighted, and the bias, to `out`.
    void add_tiles(const uint8_t* codes, int tiles, int count, float* out, size_t stride, ptrdiff_t ahead) {
        if (side.levels) {
            const Expand unpack_tile = pick_expand(side.bits, true);
            const Table table = load_table(table16);
            for (int k = 0; k < tiles; k++)
                unpack_tile(codes + k * tile_bytes(n, side.bits), n, table, words + (size_t)k * (n / 2), ahead);
            (tiles == 1 ? pick_dot_words<1>(count) : pick_dot_words<TILES>(count))(words, n, weights, steps, bias,
                                                                                  out, stride);
        } else {
            (tiles == 1 ? pick_dot_codes<1>(side.bits, count) : pick_dot_codes<TILES>(side.bits, count))(
                codes, n, weights, steps, bias, out, stride, ahead);
        }
    }

    // Ranges per token [ranges, n]: their scale is folded into the probabilities.
    void add_by_token(const uint8_t* codes, const Ranges& ranges, int r, int count, ptrdiff_t ahead) {
        float *scale = token_scale, *zero = token_scale + n;
        int prepared = -1;
        for (int c = 0; c < D;) {
            const int j = (g * D + c) / side.group;
            // Some ranges end inside a head, and some heads inside a range.
            const int end = c + 16 * TILES;
            const int tiles = end <= D && (g * D + end - 1) / side.group == j ? TILES : 1;
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
                    weigh(scores + (size_t)(r + i) * n, scale, zero, running.latest[r + i] * highest_scale, i, count);
            }
            add_tiles(codes + c / 16 * tile_bytes(n, side.bits), tiles, count, running.sums + (size_t)r * D + c, D,
                      r ? 0 : ahead);
            c += 16 * tiles;
        }
    }

    // One range per channel and block: applied to the sums.
    void add_by_channel(const uint8_t* codes, const Ranges& ranges, int r, int count, ptrdiff_t ahead) {
        float totals[MAX_ROWS];
        alignas(64) float part[MAX_ROWS * 16 * TILES];
        for (int i = 0; i < count; i++) {
            const float* p = scores + (size_t)(r + i) * n;
            Floats total = broadcast_float(0);
            for (int t = 0; t < n; t += 16) total = total + load_floats(p + t);
            totals[i] = sum(total);
            weigh(p, nullptr, nullptr, running.latest[r + i], i, count);
        }
        for (int c = 0; c < D; c += 16 * TILES) {
            std::memset(part, 0, sizeof part);
            add_tiles(codes + c / 16 * tile_bytes(n, side.bits), TILES, count, part, 16 * TILES, r ? 0 : ahead);
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

    void add_outliers(int64_t id) {
        each_outlier(id, [&](int t, int c, float excess) {
            const float* weight = scores + t;
            float* sum = running.sums + c;
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++, weight += n, sum += D) *sum += *weight * excess;
        });
    }

    void add(int64_t id, Spot next) {
        const Ranges ranges(side, id);
        const auto* codes = at_address<uint8_t>(codes_at({id, g}));
        const ptrdiff_t ahead = (ptrdiff_t)(codes_at(next) - codes_at({id, g}));
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = std::min(rows - r, MAX_ROWS);
            side.per_token ? add_by_token(codes, ranges, r, count, ahead)
                           : add_by_channel(codes, ranges, r, count, ahead);
        }
        if (side.outlier_count) add_outliers(id);
    }
};

}  // namespace
