// Attention to blocks of ranked codes (ranked.h): what one thread does with some blocks of a sequence, for all its rows.
//
// The product of keys is one of int16 states and int16 weights. States are in the order of their scales, in groups of 96
// columns. Columns of a group are of like size and share one step, as fine as sums of 32 bits allow, so that small ones
// are not lost beside large ones. For slow pairs (turning.h), rows that are made for a block take the place of W. The
// sums over tokens are in fp32.
#pragma once
#include <numeric>

#include "attention.h"
#include "ranked_reader.h"
#include "turning.h"

namespace {

constexpr int WEIGHT_LIMIT = 8191;  // the highest weight, as in kernels/cpu/ranked.py
constexpr int GROUP = 96;           // columns that share a step, in order

// Adds up the levels of 32 ranks, `stride` from token to token, by ROWS rows of weights.
template <int ROWS>
void sum_levels(const int16_t* levels, int stride, int n, const float* weights, float* out) {
    Floats sums[ROWS][2];
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = broadcast_float(0);
    for (int t = 0; t < n; t++) {
        const Words level = load(levels + (size_t)t * stride);
        const Floats low = to_floats(low_half(level)), high = to_floats(high_half(level));
        for (int r = 0; r < ROWS; r++) {
            const Floats weight = broadcast_float(weights[(size_t)r * n + t]);
            sums[r][0] = fma(low, weight, sums[r][0]);
            sums[r][1] = fma(high, weight, sums[r][1]);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        store_floats(out + r * 32, sums[r][0]);
        store_floats(out + r * 32 + 16, sums[r][1]);
    }
}
using SumLevels = void (*)(const int16_t*, int, int, const float*, float*);
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
    RankedReader states;
    TurnedScores turned;
    const int groups, pairs;     // of columns
    const int built, slow;       // rows of a head that are built, and made for slow pairs
    const int lanes;             // of a panel
    float* size;                 // [coded] of a level of 1, by rank
    int16_t* column_max;         // [groups, GROUP] of the highest level of a column, in steps of the group
    float* group_step;           // [groups]
    Words* columns;              // [n / 16, filled pairs] levels of 16 tokens, in steps of the group
    int32_t* panel;              // [pairs, lanes] weights of a head for two columns
    int32_t* factors;            // [slow pairs, slow] as of TurnedScores
    float *slow_step, *slow_bias, *slow_inverse;  // [slow]
    float* query;                // [heads, rows, D]
    float* scores;               // [heads, rows, n]

    static int groups_of(const xq_ranked_operand& states) { return (RankedReader::coded_of(states) + GROUP - 1) / GROUP; }
    static int filled_pairs(const xq_ranked_operand& states) { return groups_of(states) * GROUP / 2; }
    static int built_of(const xq_ranked_attend& c) {
        return std::min(c.turning.built, TurnedScores::filled(c.attend.head_size));
    }
    static int slow_of(const xq_ranked_attend& c) {
        const int rows = rows_of_sequence(c.attend) * c.turning.waves;
        return TurnedScores::slow_pairs(c.turning, c.attend.head_size) ? (rows + 15) / 16 * 16 : 0;
    }
    // Weights of built rows are stored 32 at a time.
    static int lanes_of(const xq_ranked_attend& c) {
        return std::max((built_of(c) + 31) / 32 * 32, built_of(c) + slow_of(c));
    }
    static size_t bytes(const xq_ranked_attend& c) {
        const xq_attend& call = c.attend;
        const size_t n = call.block, D = call.head_size, rows = rows_of_sequence(call), all = rows * call.kv_heads;
        const size_t pairs = filled_pairs(c.states), slow = slow_of(c);
        return RankedReader::bytes(c.states) + TurnedScores::bytes(c.turning, D, n, rows) + 2 * Rows::bytes(rows) +
               4 * (size_t)RankedReader::coded_of(c.states) + 4 * pairs + 4 * groups_of(c.states) +
               64 * (n / 16) * pairs + 4 * pairs * lanes_of(c) +
               4 * slow * (TurnedScores::slow_pairs(c.turning, D) + 3) + 4 * all * (D + n) + 12 * 64;
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
          turned(c.turning, D, n, rows, workspace),
          groups(groups_of(c.states)),
          pairs((states.coded + 1) / 2),
          built(built_of(c)),
          slow(slow_of(c)),
          lanes(lanes_of(c)) {
        const size_t filled = filled_pairs(c.states);
        size = workspace.take<float>(states.coded);
        column_max = workspace.take<int16_t>(2 * filled);
        group_step = workspace.take<float>(groups);
        columns = workspace.take<Words>(n / 16 * filled);
        panel = workspace.take<int32_t>(filled * lanes);
        factors = workspace.take<int32_t>((size_t)turned.pairs * slow);
        slow_step = workspace.take<float>(slow);
        slow_bias = workspace.take<float>(slow);
        slow_inverse = workspace.take<float>(slow);
        query = workspace.take<float>((size_t)heads * rows * D);
        scores = workspace.take<float>((size_t)heads * rows * n);
        uint8_t* here = workspace.next;
        for (int g = 0; g < heads; g++, workspace.next = here)
            load_queries(call, call.query, Rows(call, b, g, 0, rows, workspace), query + (size_t)g * rows * D);
    }

    // Sets the size of a level of 1, the step of every group, and what the highest level of a column is in steps.
    void set_sizes() const {
        int rank = 0;
        for (int width = ALL_WIDTHS - 1; width >= 0; width--)
            for (int i = 0; i < given.states.counts[width]; i++, rank++)
                size[rank] = states.ranks.sizes[states.ranks.order[rank]] * given.states.highest_level[width];
        for (int group = 0; group < groups; group++) {
            const int first = group * GROUP, count = std::min(GROUP, states.coded - first);
            float highest[GROUP], top = 0, total = 0;
            for (int i = 0; i < count; i++) {
                highest[i] = size[first + i] * given.weight_scale[states.ranks.order[first + i]];
                top = std::max(top, highest[i]);
                total += highest[i];
            }
            // Rounding adds at most 1 to each.
            const float most = (float)(INT32_MAX / WEIGHT_LIMIT - GROUP) * 0.999f;
            group_step[group] = std::max({total / most, top / 32767, 1e-30f});
            for (int i = 0; i < GROUP; i++)
                column_max[first + i] = i < count ? (int16_t)std::lrintf(highest[i] / group_step[group]) : 0;
        }
        for (rank = 0; rank < states.coded; rank++) size[rank] /= LEVEL_SCALE;
    }

    // Brings levels, in steps of their group, into an order with tokens as lanes.
    void turn_levels() const {
        const size_t filled = filled_pairs(given.states);
        for (int c = 0; c < states.coded; c += 32) {
            const Words most = load(column_max + c);
            for (int t = 0; t < n; t += 16) {
                Words levels[16];
                for (int i = 0; i < 16; i++)
                    levels[i] = multiply_q15(load(states.levels + (size_t)(t + i) * states.stride + c), most);
                transpose(levels);
                for (int i = 0; i < 16; i++) columns[t / 16 * filled + c / 2 + i] = levels[i];
            }
        }
    }

    // The channel of a column; past the last any will do, since levels there are 0.
    int channel_of(int column) const { return states.ranks.order[std::min(column, states.coded - 1)]; }

    // Gathers a head's weights of all columns, two columns beside each other.
    void gather_weights(int head) const {
        const int width = (built + 31) / 32 * 32;
        const size_t row = (size_t)heads * width;
        for (int p = 0; p < pairs; p++) {
            const int16_t* a = given.weights + channel_of(2 * p) * row + (size_t)head * width;
            const int16_t* b = given.weights + channel_of(2 * p + 1) * row + (size_t)head * width;
            for (int d = 0; d < width; d += 32) {
                const Words x = load(a + d), y = load(b + d);
                int32_t* to = panel + (size_t)p * lanes + d;
                store(to, zip_low16(x, y));
                store(to + 16, zip_high16(x, y));
            }
        }
    }

    // Makes the factors of slow pairs. A row is a product of them with the weights of slow pairs; by Cauchy and Schwarz
    // no weight of it is above the product of both norms.
    void make_factors(int head) {
        const int width = turned.width;
        const float* mean = given.slow_mean + (size_t)head * 2 * width;
        for (int i = 0; i < slow; i++) {
            const int at = i % BUILT_ROWS;
            const float step = turned.take_factors(i, at, nullptr, mean, slow_bias[i]);
            for (int j = 0; j < turned.pairs; j++)
                factors[(size_t)j * slow + i] = turned.factors[(size_t)at * width + j];
            const float bound = step > 0 ? std::sqrt(turned.square()) * given.slow_norm[head] : 0;
            slow_step[i] = bound / WEIGHT_LIMIT;
            slow_inverse[i] = bound > 0 ? step * WEIGHT_LIMIT / bound : 0;
        }
    }

    // Makes the rows of slow pairs, behind those of `gather_weights`, for COLUMNS columns at a time.
    void make_slow(int head) {
        constexpr int COLUMNS = 8;
        make_factors(head);
        const size_t row = (size_t)heads * turned.pairs * 2, at = (size_t)head * turned.pairs * 2;
        for (int c = 0; c < states.coded; c += COLUMNS) {
            const int16_t* weights[COLUMNS];
            for (int k = 0; k < COLUMNS; k++) weights[k] = given.slow_weights + channel_of(c + k) * row + at;
            for (int i = 0; i < slow; i += 16) {
                Words sums[COLUMNS];
                for (Words& sum : sums) sum = zero_words();
                for (int j = 0; j < turned.pairs; j++) {
                    const Words factor = load(factors + (size_t)j * slow + i);
                    for (int k = 0; k < COLUMNS; k++)
                        sums[k] = dot16(sums[k], factor, broadcast(pair_at(weights[k], j)));
                }
                const Floats inverse = load_floats(slow_inverse + i);
                for (int k = 0; k < COLUMNS; k += 2) {
                    const Words low = to_nearest(to_floats(sums[k]) * inverse) & broadcast(65535);
                    const Words high = shift_left32<16>(to_nearest(to_floats(sums[k + 1]) * inverse));
                    store(panel + (size_t)(c + k) / 2 * lanes + built + i, low | high);
                }
            }
        }
    }

    // Multiplies BUILT_ROWS lanes of a panel with the levels of 16 T tokens from t on.
    template <int T>
    void multiply(int lane, int t, const float* steps, const float* base) const {
        const size_t filled = filled_pairs(given.states);
        const Words* levels = columns + t / 16 * filled;
        Floats found[BUILT_ROWS][T];
        for (int i = 0; i < BUILT_ROWS; i++)
            for (int k = 0; k < T; k++) found[i][k] = broadcast_float(0);
        for (int group = 0; group < groups; group++) {
            Words sums[BUILT_ROWS][T];
            for (int i = 0; i < BUILT_ROWS; i++)
                for (int k = 0; k < T; k++) sums[i][k] = zero_words();
            const int last = std::min((group + 1) * GROUP / 2, pairs);
            for (int p = group * GROUP / 2; p < last; p++) {
                Words level[T];
                for (int k = 0; k < T; k++) level[k] = levels[k * filled + p];
                const int32_t* weights = panel + (size_t)p * lanes + lane;
                unroll<BUILT_ROWS>([&](auto i) {
                    const Words weight = broadcast(weights[i]);
                    for (int k = 0; k < T; k++) sums[i][k] = dot16(sums[i][k], level[k], weight);
                });
            }
            const Floats step = broadcast_float(group_step[group]);
            for (int i = 0; i < BUILT_ROWS; i++)
                for (int k = 0; k < T; k++) found[i][k] = fma(to_floats(sums[i][k]), step, found[i][k]);
        }
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
            multiply<T>(d, t, nullptr, mean + d);
            turned.score_built(d, angles, t, t + 16 * T, out, n);
        }
        for (int i = 0; i < turned.slow_rows; i += BUILT_ROWS) {
            multiply<T>(built + i, t, slow_step + i, slow_bias + i);
            turned.score_slow(i, t, t + 16 * T, out, n);
        }
    }

    // The scores of a head with the block in this column of the table.
    void score(int head, int column) {
        float* out = scores + (size_t)head * rows * n;
        std::fill_n(out, (size_t)rows * n, 0.0f);
        turned.take_query(query + (size_t)head * rows * D, b, column);
        gather_weights(head);
        if (slow) make_slow(head);
        const size_t angles = turned.angles(b, column);
        int t = 0;
        for (; t + 16 * TILES <= n; t += 16 * TILES) score<TILES>(head, t, angles, out);
        for (; t < n; t += 16) score<1>(head, t, angles, out);
    }

    // Adds the levels of the block to the sums, by the weights of `rows` rows from r on.
    void add_rows(int r, int rows) const {
        const SumLevels sum = pick_sum_levels(rows, std::make_integer_sequence<int, MOST_ROWS>());
        const int C = given.states.channels;
        float found[MOST_ROWS * 32];
        for (int first = 0; first < states.coded; first += 32) {
            sum(states.levels + first, states.stride, n, scores + (size_t)r * n, found);
            for (int i = 0; i < std::min(32, states.coded - first); i++) {
                float* to = softmax.sums + (size_t)r * C + states.ranks.order[first + i];
                for (int j = 0; j < rows; j++) to[(size_t)j * C] += found[j * 32 + i] * size[first + i];
            }
        }
    }

    // Attends to the block in this column of the table, of which `valid` tokens from `start` on are to be seen.
    void attend(int column, int start, int valid) {
        if (!any_seen(call, of_head, start, valid)) return;
        const uint8_t* packed = states.open(call.table[b * call.table_stride + column]);
        set_sizes();
        states.read_levels(packed);
        turn_levels();
        for (int head = 0; head < heads; head++) {
            score(head, column);
            mask_packed(call, of_head, scores + (size_t)head * rows * n, n, start, valid);
        }
        const int all = heads * rows;
        if (!softmax.update(scores, n)) return;
        for (int r = 0; r < all; r++)
            for (int t = 0; t < n; t += 16) {
                float* weights = scores + (size_t)r * n + t;
                store_floats(weights, load_floats(weights) * load_floats(states.gains + t));
            }
        const int parts = (all + MOST_ROWS - 1) / MOST_ROWS;
        for (int i = 0; i < parts; i++) {
            const int first = i * all / parts;
            add_rows(first, (i + 1) * all / parts - first);
        }
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
