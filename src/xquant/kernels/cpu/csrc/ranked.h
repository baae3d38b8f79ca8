// Attention over ranked codes of states x[t, c] = level[t, c] * scale_c * gain_t, of which keys and values are products:
//
//     k[t] = gain_t sum_c (W_c scale_c) level[t, c] + mean, rotated by RoPE;   score[t] = scaling q . k[t]
//     sum_t w_t v[t] = sum_c V_c scale_c (sum_t (w_t gain_t) level[t, c]) + sum_t w_t mean
//
// A block is unpacked once for all heads, and both sums are made of its levels. Between them lies an online softmax.
// Channels that have no bits are left out. After all blocks the sums of a row are multiplied with V.
//
// The product of keys is one of int16 states and int16 weights. States are in the order of their scales, in groups of 96
// columns. Columns of a group are of like size and share one step, as fine as sums of 32 bits allow, so that small ones
// are not lost beside large ones. For slow pairs (turning.h), rows that are made for a block take the place of W. The
// sums over tokens are in fp32. The output equals attention over what `quant.ranked.Ranked.decode` gives, times the
// weights, to a relative error below 1e-3.
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

// The memory of an attention's softmaxes: one a split of a sequence for the rows of all heads, with sums of states; one
// a sequence and head for exact tokens, with sums of values.
struct RankedStates {
    const xq_ranked_attend& given;
    const int splits, rows, D;
    const size_t packed_size, exact_size;
    float *packed, *exact;

    static int splits_of(const xq_attend& call) {
        int most = 1;
        for (int b = 0; b < call.batch; b++) most = std::max(most, columns_up_to(call, call.limits[b], true));
        return std::min(most, (8 * std::max(call.threads, 1) + call.batch - 1) / call.batch);
    }
    RankedStates(const xq_ranked_attend& given)
        : given(given),
          splits(splits_of(given.attend)),
          rows(rows_of_sequence(given.attend)),
          D(given.attend.head_size),
          packed_size(OnlineSoftmax::floats(rows * given.attend.kv_heads, given.states.channels)),
          exact_size(OnlineSoftmax::floats(rows, D)) {}

    bool reserve(Workspace& workspace) {
        const xq_attend& call = given.attend;
        const size_t tasks = (size_t)call.batch * splits, heads = (size_t)call.batch * call.kv_heads;
        if (!workspace.reserve(4 * (packed_size * tasks + exact_size * heads) + 2 * 64)) return false;
        packed = workspace.take<float>(packed_size * tasks);
        exact = workspace.take<float>(exact_size * heads);
        return true;
    }
    OnlineSoftmax of_split(int b, int split) const {
        const int all = rows * given.attend.kv_heads;
        return OnlineSoftmax(packed + ((size_t)b * splits + split) * packed_size, all, given.states.channels);
    }
    OnlineSoftmax of_exact(int b, int g) const {
        return OnlineSoftmax(exact + ((size_t)b * given.attend.kv_heads + g) * exact_size, rows, D);
    }
};

// The output of the rows of one sequence and head.
struct RankedOutput {
    const xq_ranked_attend& given;
    const RankedStates& states;
    const int C, filled;  // channels, and those of whole vectors
    float* sums;          // [rows, filled] of states by weights that add up to 1 with those of exact tokens
    float *of_packed, *of_exact;  // [rows] the packed tokens' part of all weights, what sums of exact ones are taken by

    static size_t bytes(const xq_ranked_attend& c) {
        const size_t rows = rows_of_sequence(c.attend);
        return 4 * rows * ((c.states.channels + 15) / 16 * 16 + 2) + 3 * 64;
    }
    RankedOutput(const xq_ranked_attend& given, const RankedStates& states, Workspace& workspace)
        : given(given), states(states), C(given.states.channels), filled((C + 15) / 16 * 16) {
        sums = workspace.take<float>((size_t)states.rows * filled);
        of_packed = workspace.take<float>(states.rows);
        of_exact = workspace.take<float>(states.rows);
    }

    // Combines what the splits and the exact tokens have of a row.
    void combine(int b, int g, int r) const {
        const OnlineSoftmax exact = states.of_exact(b, g);
        const int row = g * states.rows + r;
        float highest = exact.running_max[r];
        for (int i = 0; i < states.splits; i++) highest = std::max(highest, states.of_split(b, i).running_max[row]);
        float* to = sums + (size_t)r * filled;
        std::fill_n(to, filled, 0.0f);
        const auto weight_of = [highest](float max) { return max == -INFINITY ? 0 : std::exp(max - highest); };
        float packed = 0;
        for (int i = 0; i < states.splits; i++) {
            const OnlineSoftmax split = states.of_split(b, i);
            const float weight = weight_of(split.running_max[row]);
            packed += weight * split.running_sum[row];
            for (int c = 0; weight > 0 && c < C; c++) to[c] += weight * split.sums[(size_t)row * C + c];
        }
        const float weight = weight_of(exact.running_max[r]);
        float total = packed + weight * exact.running_sum[r];
        const float* sink_logits = given.attend.sink_logits;
        const int head = g * given.attend.group_heads + r / given.attend.queries;
        if (sink_logits && total > 0) total += std::exp(sink_logits[head] - highest);
        const float inverse = total > 0 ? 1 / total : 0;
        for (int c = 0; c < filled; c++) to[c] *= inverse;
        of_packed[r] = packed * inverse;
        of_exact[r] = weight * inverse;
    }

    template <int DTYPE>
    void write(int b, int g) const {
        const xq_attend& call = given.attend;
        const OnlineSoftmax exact = states.of_exact(b, g);
        constexpr int AT_A_TIME = 4;
        for (int d = 0; d < call.head_size; d++) {
            const int64_t weights = ((int64_t)g * call.head_size + d) * C;
            for (int first = 0; first < states.rows; first += AT_A_TIME) {
                const int count = std::min(AT_A_TIME, states.rows - first);
                Floats products[AT_A_TIME];
                for (Floats& product : products) product = broadcast_float(0);
                for (int c = 0; c < C; c += 16) {
                    const Floats weight = load_as<DTYPE>(given.value_weight, weights + c, C - c);
                    for (int i = 0; i < AT_A_TIME; i++) {
                        const float* from = sums + (size_t)(first + std::min(i, count - 1)) * filled + c;
                        products[i] = fma(weight, load_floats(from), products[i]);
                    }
                }
                for (int i = 0; i < count; i++) {
                    const int r = first + i, head = g * call.group_heads + r / call.queries;
                    const int64_t at = batch_of(call, b) * call.out_batch + r % call.queries * call.out_token +
                                       head * call.out_head;
                    const float packed = sum(products[i]) + of_packed[r] * given.value_mean[g * call.head_size + d];
                    const float kept = of_exact[r] * exact.sums[(size_t)r * call.head_size + d];
                    store_element(call.out, call.dtype, at + d, packed + kept);
                }
            }
        }
    }

    void write(int b, int g) const {
        for (int r = 0; r < states.rows; r++) combine(b, g, r);
        switch (given.value_dtype) {
            case XQ_FLOAT32: return write<XQ_FLOAT32>(b, g);
            case XQ_BFLOAT16: return write<XQ_BFLOAT16>(b, g);
            default: return write<XQ_FLOAT16>(b, g);
        }
    }
};

// Attends to the exact tokens of one sequence and head.
inline void attend_exact(const xq_attend& call, int b, int g, OnlineSoftmax softmax, Workspace& workspace) {
    const Rows rows(call, b, g, 0, rows_of_sequence(call), workspace);
    float* query = workspace.take<float>((size_t)rows.count * call.head_size);
    load_queries(call, call.query, rows, query);
    ExactTokens(call, g, rows, query, softmax, workspace).attend();
}

// xq_ranked_attend.
inline int ranked_attend(const xq_ranked_attend& given) {
    const xq_attend& call = given.attend;
    const int rows = rows_of_sequence(call);
    static thread_local Workspace shared;
    RankedStates states(given);
    if (!states.reserve(shared)) return XQ_NO_MEMORY;
    const size_t exact_bytes = Rows::bytes(rows) + 4 * (size_t)rows * call.head_size + 64 + ExactTokens::bytes(call, rows);
    const size_t bytes = std::max({RankedBlocks::bytes(given), exact_bytes, RankedOutput::bytes(given)});
    int failed = 0;
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(bytes);
        failed += !ready;
#pragma omp for schedule(dynamic) collapse(2) nowait
        for (int b = 0; b < call.batch; b++)
            for (int split = 0; split < states.splits; split++) {
                if (!ready) continue;
                workspace.next = workspace.base;
                OnlineSoftmax softmax = states.of_split(b, split);
                softmax.clear();
                RankedBlocks(given, b, softmax, workspace).run(split, states.splits);
            }
#pragma omp for schedule(dynamic) collapse(2)
        for (int b = 0; b < call.batch; b++)
            for (int g = 0; g < call.kv_heads; g++) {
                if (!ready) continue;
                workspace.next = workspace.base;
                OnlineSoftmax softmax = states.of_exact(b, g);
                softmax.clear();
                attend_exact(call, b, g, softmax, workspace);
            }
#pragma omp for schedule(static) collapse(2)
        for (int b = 0; b < call.batch; b++)
            for (int g = 0; g < call.kv_heads; g++) {
                if (!ready) continue;
                workspace.next = workspace.base;
                RankedOutput(given, states, workspace).write(b, g);
            }
    }
    if (failed) return XQ_NO_MEMORY;
    if (call.append) append(call);
    return XQ_DONE;
}

}  // namespace
