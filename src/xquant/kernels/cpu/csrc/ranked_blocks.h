// Attention to blocks of ranked codes (ranked.h): what one thread does with some blocks of a sequence, for all its rows.
//
// The product of keys is one of integers (ranked_columns.h). For slow pairs (turning.h), rows that are made for a block
// take the place of the weight of keys. Sums over the tokens of a block are of 16 bits too, those over blocks in fp32.
#pragma once
#include <numeric>

#include "attention.h"
#include "ranked_columns.h"

namespace {

// Adds up the levels of 32 ranks, `stride` from token to token, by ROWS rows of weights of two tokens. Zipped, sums are
// in the order of `place_of`.
template <int ROWS>
void sum_levels(const int16_t* levels, int stride, int n, const int32_t* weights, int32_t* out) {
    Words sums[ROWS][2];
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = zero_words();
    for (int t = 0; t < n; t += 2) {
        const Words a = load(levels + (size_t)t * stride), b = load(levels + (size_t)(t + 1) * stride);
        const Words low = zip_low16(a, b), high = zip_high16(a, b);
        for (int r = 0; r < ROWS; r++) {
            const Words weight = broadcast(weights[((size_t)r * n + t) / 2]);
            sums[r][0] = dot16(sums[r][0], low, weight);
            sums[r][1] = dot16(sums[r][1], high, weight);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        store(out + r * 32, sums[r][0]);
        store(out + r * 32 + 16, sums[r][1]);
    }
}
inline int place_of(int rank) { return rank / 8 * 4 + rank % 4 + rank % 8 / 4 * 16; }
using SumLevels = void (*)(const int16_t*, int, int, const int32_t*, int32_t*);
template <int... R>
SumLevels pick_sum_levels(int rows, std::integer_sequence<int, R...>) {
    static constexpr SumLevels all[] = {sum_levels<R + 1>...};
    return all[rows - 1];
}

// What one thread does with some blocks of a sequence, for all its rows.
struct RankedBlocks {
    static constexpr float LEVEL_SCALE = 32767;
    static constexpr int MOST_ROWS = MAX_ROWS * 3 / 2;  // that share levels

    const xq_ranked_attend& given;
    const xq_attend& call;
    const int b, n, D, heads, rows;  // rows of a head
    const Rows of_head;              // those of the first head: masks are the same for all
    OnlineSoftmax softmax;           // of the rows of all heads, of sums by channel
    RankedReader states, more;
    TurnedScores turned;
    const int built;             // channels of a head
    const Columns<2> loud;       // with wide codes
    const Columns<4> quiet;
    SlowFactors slow;
    float *slow_step, *slow_bias;  // [slow.rows] what turns products with them into rows
    float *size, *more_size;     // [coded] of a level of 1, by rank
    float* highest;              // [coded] of the highest level, times the unit of weights
    float* query;                // [heads, rows, D]
    float* scores;               // [heads, rows, n]
    int32_t* weights;            // [heads, rows, n / 2] of two tokens, two int16 each
    float* weight_step;          // [heads, rows]

    static int loud_of(const xq_ranked_operand& states) {
        int loud = 0;
        for (int width = 0; width < ALL_WIDTHS; width++)
            if (WIDTHS[width].code > 4 * WIDTHS[width].tokens) loud += states.counts[width];
        return loud;
    }
    static int quiet_of(const xq_ranked_operand& states) { return RankedReader::coded_of(states) - loud_of(states); }
    static int built_of(const xq_ranked_attend& c) {
        return std::min(c.turning.built, TurnedScores::filled(c.attend.head_size));
    }
    static int slow_of(const xq_ranked_attend& c) {
        const int rows = rows_of_sequence(c.attend) * c.turning.waves;
        return TurnedScores::slow_pairs(c.turning, c.attend.head_size) ? (rows + 15) / 16 * 16 : 0;
    }
    // Weights of built rows are stored 32 at a time, those of slow pairs 16.
    static int lanes_of(const xq_ranked_attend& c) {
        return (std::max((built_of(c) + 31) / 32 * 32, built_of(c) + slow_of(c)) + 15) / 16 * 16;
    }
    static size_t bytes(const xq_ranked_attend& c) {
        const xq_attend& call = c.attend;
        const size_t n = call.block, D = call.head_size, rows = rows_of_sequence(call), all = rows * call.kv_heads;
        const size_t slow = slow_of(c), lanes = lanes_of(c);
        const size_t coded = RankedReader::coded_of(c.states), more = RankedReader::coded_of(c.more);
        return RankedReader::bytes(c.states) + RankedReader::bytes(c.more) + TurnedScores::bytes(c.turning, D, n, rows) + 2 * Rows::bytes(rows) +
               Columns<2>::bytes(loud_of(c.states), n, lanes) + Columns<4>::bytes(quiet_of(c.states), n, lanes) +
               4 * (SlowFactors::size(slow, TurnedScores::slow_pairs(c.turning, D)) + 2 * slow) +
               4 * (2 * coded + more) + 4 * all * (D + n + n / 2 + 1) + 14 * 64;
    }
    RankedBlocks(const xq_ranked_attend& c, int b, OnlineSoftmax softmax, Workspace& workspace)
        : given(c),
          call(c.attend),
          b(b),
          n(call.block),
          D(call.head_size),
          heads(call.kv_heads),
          rows(rows_of_sequence(call)),
          of_head(call, b, 0, 0, rows, workspace),
          softmax(softmax),
          states(c.states, workspace),
          more(c.more, workspace),
          turned(c.turning, D, n, rows, workspace),
          built(built_of(c)),
          loud(states, 0, loud_of(c.states), lanes_of(c), workspace),
          quiet(states, loud_of(c.states), quiet_of(c.states), lanes_of(c), workspace),
          slow(slow_of(c), turned.pairs, workspace) {
        slow_step = workspace.take<float>(slow.rows);
        slow_bias = workspace.take<float>(slow.rows);
        size = workspace.take<float>(states.coded);
        more_size = workspace.take<float>(more.coded);
        highest = workspace.take<float>(states.coded);
        query = workspace.take<float>((size_t)heads * rows * D);
        scores = workspace.take<float>((size_t)heads * rows * n);
        weights = workspace.take<int32_t>((size_t)heads * rows * n / 2);
        weight_step = workspace.take<float>((size_t)heads * rows);
        uint8_t* here = workspace.next;
        for (int g = 0; g < heads; g++, workspace.next = here)
            load_queries(call, call.query, Rows(call, b, g, 0, rows, workspace), D, query + (size_t)g * rows * D);
    }

    // Sets what a level of 1 of each rank is.
    static void set_sizes(const RankedReader& states, float* size) {
        int rank = 0;
        for (int width = ALL_WIDTHS - 1; width >= 0; width--)
            for (int i = 0; i < states.operand.counts[width]; i++, rank++) {
                const float level = states.operand.highest_level[width] / LEVEL_SCALE;
                size[rank] = states.ranks.sizes[states.ranks.order[rank]] * level;
            }
    }

    // Sets the steps of columns.
    void set_steps() const {
        for (int rank = 0; rank < states.coded; rank++)
            highest[rank] = size[rank] * LEVEL_SCALE * given.weight_scale[states.ranks.order[rank]];
        loud.set_steps(highest);
        quiet.set_steps(highest);
    }

    // Makes the factors of slow pairs. A row is a product of them with the weights of slow pairs; by Cauchy and Schwarz
    // no weight of it is above the product of both norms.
    void make_factors(int head) {
        const int width = turned.width;
        const float* mean = given.slow_mean + (size_t)head * 2 * width;
        for (int i = 0; i < slow.rows; i++) {
            const int at = i % BUILT_ROWS;
            const float step = turned.take_factors(i, at, nullptr, mean, slow_bias[i]);
            const float bound = step > 0 ? std::sqrt(turned.square()) * given.slow_norm[head] : 0;
            slow_step[i] = bound / WEIGHT_LIMIT;
            slow.set(i, turned.factors + (size_t)at * width, step, bound);
        }
        if constexpr (FAST_BYTES) slow.narrow_all();
    }

    // Takes the weights of a head: of channels that are built, and behind them of slow pairs.
    void take_weights(int head) {
        make_factors(head);
        const int width = (built + 31) / 32 * 32;
        const size_t row = (size_t)heads * width, pairs = turned.pairs, bytes = (pairs + 1) / 2 * 4;
        const int16_t* weights = given.weights + (size_t)head * width;
        const SlowWeights slow_weights{given.slow_weights + head * pairs * 2, heads * pairs * 2,
                                       given.slow_bytes + head * bytes, heads * bytes,
                                       given.slow_units + head, (size_t)heads};
        const auto take = [&](const auto& columns) {
            columns.gather(weights, row, width);
            columns.make_slow(slow, slow_weights, built);
            columns.set_offsets();
        };
        take(loud);
        take(quiet);
    }

    // Builds BUILT_ROWS channels of the keys of 16 T tokens from t on, or products with rows of slow pairs.
    template <int T>
    void build(int lane, int t, const float* steps, const float* base) const {
        Floats found[BUILT_ROWS][T];
        for (int i = 0; i < BUILT_ROWS; i++)
            for (int k = 0; k < T; k++) found[i][k] = broadcast_float(0);
        loud.add(lane, t, found);
        quiet.add(lane, t, found);
        for (int k = 0; k < T; k++) {
            const int at = t + k * 16;
            const Floats gain = load_floats(states.gains + at);
            for (int i = 0; i < BUILT_ROWS; i++) {
                const Floats scale = steps ? gain * broadcast_float(steps[i]) : gain;
                store_floats(turned.keys + (size_t)i * n + at, fma(found[i][k], scale, broadcast_float(base[i])));
            }
        }
    }

    template <int T>
    void score(int head, int t, size_t angles, float* out) const {
        const float* mean = given.mean + (size_t)head * built;
        for (int d = 0; d < built; d += BUILT_ROWS) {
            build<T>(d, t, nullptr, mean + d);
            turned.score_built(d, angles, t, t + 16 * T, out, n);
        }
        for (int i = 0; i < turned.slow_rows; i += BUILT_ROWS) {
            build<T>(built + i, t, slow_step + i, slow_bias + i);
            turned.score_slow(i, t, t + 16 * T, out, n);
        }
    }

    // The scores of a head with the block in this column of the table.
    void score(int head, int column) {
        float* out = scores + (size_t)head * rows * n;
        std::fill_n(out, (size_t)rows * n, 0.0f);
        turned.take_query(query + (size_t)head * rows * D, b, column);
        take_weights(head);
        const size_t angles = turned.angles(b, column);
        int t = 0;
        for (; t + 16 * TILES <= n; t += 16 * TILES) score<TILES>(head, t, angles, out);
        for (; t < n; t += 16) score<1>(head, t, angles, out);
    }

    // Rounds the weights of all rows, times gains, to 16 bits. Their sum is below 2^16, so that sums of levels stay within
    // 32 bits.
    void round_weights(const float* gains) const {
        for (int r = 0; r < heads * rows; r++) {
            const float* weight = scores + (size_t)r * n;
            auto* to = (int16_t*)(weights + (size_t)r * n / 2);
            const auto at = [&](int t) { return load_floats(weight + t) * load_floats(gains + t); };
            Floats total = broadcast_float(0), top = total;
            for (int t = 0; t < n; t += 16) {
                const Floats x = at(t);
                total = total + x;
                top = maximum(top, x);
            }
            weight_step[r] = std::max(sum(total) / (65535 - n), ::highest(top) / 32767);
            const Floats inverse = inverse_of(weight_step[r]);
            for (int t = 0; t < n; t += 16) store_low_words(to + t, to_nearest(at(t) * inverse));
        }
    }

    // Adds the levels of the block to the sums of its channels, of which `sums` are the first row's, by the weights of
    // `count` rows from r on.
    void add_rows(const RankedReader& states, const float* size, float* sums, int r, int count) const {
        const SumLevels sum_of = pick_sum_levels(count, std::make_integer_sequence<int, MOST_ROWS>());
        alignas(64) int32_t found[MOST_ROWS * 32];
        alignas(64) float sizes[32] = {}, scaled[MOST_ROWS * 32];
        const size_t width = softmax.width;
        for (int first = 0; first < states.coded; first += 32) {
            sum_of(states.levels + first, states.stride, n, weights + (size_t)r * n / 2, found);
            const int ranks = std::min(32, states.coded - first);
            for (int i = 0; i < ranks; i++) sizes[place_of(i)] = size[first + i];
            for (int i = 0; i < count * 32; i += 16) {
                const Floats step = broadcast_float(weight_step[r + i / 32]);
                store_floats(scaled + i, to_floats(load(found + i)) * (load_floats(sizes + i % 32) * step));
            }
            for (int i = 0; i < ranks; i++) {
                float* to = sums + r * width + states.ranks.order[first + i];
                const float* from = scaled + place_of(i);
                for (int j = 0; j < count; j++) to[j * width] += from[j * 32];
            }
        }
    }

    // The same by the weights of all rows.
    void add(const RankedReader& states, const float* size, float* sums) const {
        round_weights(states.gains);
        const int all = heads * rows, parts = (all + MOST_ROWS - 1) / MOST_ROWS;
        for (int i = 0; i < parts; i++) {
            const int first = i * all / parts;
            add_rows(states, size, sums, first, (i + 1) * all / parts - first);
        }
    }

    // Attends to the block in this column of the table, of which `valid` tokens from `start` on are to be seen.
    void attend(int column, int start, int valid) {
        if (!any_seen(call, of_head, start, valid)) return;
        const int64_t id = call.table[b * call.table_stride + column];
        states.read(id);
        set_sizes(states, size);
        set_steps();
        loud.turn_levels();
        quiet.turn_levels();
        for (int head = 0; head < heads; head++) {
            score(head, column);
            mask_packed(call, of_head, scores + (size_t)head * rows * n, n, start, valid);
        }
        if (!softmax.update(scores, n)) return;
        add(states, size, softmax.sums);
        if (!more.coded) return;
        more.read(id);
        set_sizes(more, more_size);
        add(more, more_size, softmax.sums + given.states.channels);
    }

    // Attends to the blocks of one split of the table.
    void run(int split, int splits) {
        const int limit = call.limits[b], columns = columns_up_to(call, limit, true);
        const int first = (int)((int64_t)split * columns / splits), last = (int)((int64_t)(split + 1) * columns / splits);
        int start = first * n;
        if (call.lengths) start = std::accumulate(call.lengths, call.lengths + first, 0);
        for (int j = first, length; j < last; start += length, j++) {
            length = call.lengths ? call.lengths[j] : n;
            attend(j, start, std::min(length, limit - start));
        }
    }
};

}  // namespace
