// Attention over ranked codes of states x[t, c] = level[t, c] * scale_c * gain_t, of which keys are products:
//
//     k[t] = gain_t sum_c (W_c scale_c) level[t, c] + mean, rotated by RoPE;   score[t] = scaling q . k[t]
//     sum_t w_t x[t, c] = scale_c sum_t (w_t gain_t) level[t, c]
//
// Channels that have no bits are left out of both. The product of keys is one of int16 states and int16 weights.
// States are in the order of their scales, in groups of 96 columns. Columns of a group are of like size and share one
// step, as fine as sums of 32 bits allow, so that small ones are not lost beside large ones. The sums over tokens are
// in fp32. Both equal those of `quant.ranked.Ranked.decode`, times the weight of keys, to a relative error below 1e-3.
#pragma once
#include "ranked_reader.h"

namespace {

constexpr int WEIGHT_LIMIT = 8191;  // the highest weight, as in kernels/cpu/ranked.py
constexpr int GROUP = 96;           // columns that share a step, in order
constexpr int KEY_ROWS = 4, KEY_TILES = TILES * TILES;  // tokens, and vectors of channels, of a tile of keys

// The keys of one block: head by head, KEY_ROWS tokens at a time.
struct RankedKeys {
    const xq_ranked_scores& call;
    RankedReader states;  // levels in steps of their group
    const int n, width, groups;
    int16_t* column_max;  // [groups + 1, GROUP] of the highest level of a column, in steps of the group
    float* group_step;    // [groups]
    int16_t* panel;       // [groups, width / 32, pairs of columns, 32, 2] weights of a head
    float* keys;          // [KEY_ROWS, width]

    static int groups_of(const xq_ranked_operand& operand) {
        return (RankedReader::coded_of(operand) + GROUP - 1) / GROUP;
    }
    static size_t bytes(const xq_ranked_scores& c) {
        const size_t groups = groups_of(c.key);
        return RankedReader::bytes(c.key) + 2 * ((groups + 1) * GROUP + groups * GROUP * c.width) +
               4 * (groups + KEY_ROWS * c.width) + 4 * 64;
    }
    RankedKeys(const xq_ranked_scores& c, Workspace& workspace)
        : call(c), states(c.key, workspace), n(c.key.block), width(c.width), groups(groups_of(c.key)) {
        column_max = workspace.take<int16_t>((size_t)(groups + 1) * GROUP);
        group_step = workspace.take<float>(groups);
        panel = workspace.take<int16_t>((size_t)groups * GROUP * width);
        keys = workspace.take<float>((size_t)KEY_ROWS * width);
    }

    // Chooses the step of every group, and what the highest level of a column is in steps.
    void set_column_ranges() const {
        const int* order = states.ranks.order;
        int width = ALL_WIDTHS - 1, left = call.key.counts[width];
        for (int group = 0; group < groups; group++) {
            float highest[GROUP], top = 0, total = 0;
            const int count = std::min(GROUP, states.coded - group * GROUP);
            for (int i = 0; i < count; i++) {
                while (!left) left = call.key.counts[--width];
                left--;
                const int channel = order[group * GROUP + i];
                highest[i] = call.key.highest_level[width] * states.ranks.sizes[channel] * call.weight_scale[channel];
                top = std::max(top, highest[i]);
                total += highest[i];
            }
            // Rounding adds at most 1 to each.
            const float most = (float)(INT32_MAX / WEIGHT_LIMIT - GROUP) * 0.999f;
            group_step[group] = std::max({total / most, top / 32767, 1e-30f});
            for (int i = 0; i < GROUP; i++)
                column_max[group * GROUP + i] = i < count ? (int16_t)std::lrintf(highest[i] / group_step[group]) : 0;
        }
    }

    int pairs_of(int group) const { return (std::min(GROUP, states.coded - group * GROUP) + 1) / 2; }

    // Gathers a head's weights of the columns of a group, two columns beside each other.
    void gather_weights(int group, int head) const {
        const int first = group * GROUP, count = std::min(GROUP, states.coded - first), pairs = pairs_of(group);
        const size_t row = (size_t)call.kv_heads * width;
        for (int p = 0; p < pairs; p++) {
            const int* channel = states.ranks.order + first + 2 * p;
            const int16_t* a = call.weights + channel[0] * row + (size_t)head * width;
            const int16_t* b = 2 * p + 1 < count ? call.weights + channel[1] * row + (size_t)head * width : nullptr;
            for (int d = 0; d < width; d += 32) {
                const Words x = load(a + d), y = b ? load(b + d) : zero_words();
                int16_t* to = panel + (size_t)group * GROUP * width + ((size_t)d / 32 * pairs + p) * 64;
                store(to, zip_low16(x, y));
                store(to + 32, zip_high16(x, y));
            }
        }
    }

    // Sets or, after the first group, adds to the keys of KEY_ROWS tokens the product of a group's states and weights.
    void multiply_group(int group, int t) const {
        int d = 0;
        for (; d + 16 * KEY_TILES <= width; d += 16 * KEY_TILES) multiply_tile<KEY_TILES>(group, t, d);
        for (; d < width; d += 16 * TILES) multiply_tile<TILES>(group, t, d);
    }

    // The same for 16 T channels from d on.
    template <int T>
    void multiply_tile(int group, int t, int d) const {
        const Floats step = broadcast_float(group_step[group]);
        const size_t pairs = pairs_of(group);
        const int16_t* left = states.levels + (size_t)t * states.stride + group * GROUP;
        const int16_t* weights[T];
        for (int k = 0; k < T; k++)
            weights[k] = panel + (size_t)group * GROUP * width + (d / 16 + k) / 2 * pairs * 64 + (d / 16 + k) % 2 * 32;
        Words sums[KEY_ROWS][T];
        for (int i = 0; i < KEY_ROWS; i++)
            for (int k = 0; k < T; k++) sums[i][k] = zero_words();
        for (size_t p = 0; p < pairs; p++) {
            Words weight[T];
            for (int k = 0; k < T; k++) weight[k] = load(weights[k] + p * 64);
            for (int i = 0; i < KEY_ROWS; i++) {
                const Words state = broadcast(pair_at(left + (size_t)i * states.stride, p));
                for (int k = 0; k < T; k++) sums[i][k] = dot16(sums[i][k], weight[k], state);
            }
        }
        for (int i = 0; i < KEY_ROWS; i++)
            for (int k = 0; k < T; k++) {
                float* key = keys + (size_t)i * width + d + k * 16;
                const Floats before = group ? load_floats(key) : broadcast_float(0);
                store_floats(key, fma(to_floats(sums[i][k]), step, before));
            }
    }

    // Applies gain, mean and RoPE to the keys of KEY_ROWS tokens from t on. cos and sin are those of t.
    void finish_keys(int head, int t, const float* cos, const float* sin) const {
        const float* mean = call.mean + (size_t)head * width;
        const int rotary_pairs = call.rotary_pairs;
        for (int i = 0; i < KEY_ROWS; i++, cos += call.rope_token, sin += call.rope_token) {
            float* key = keys + (size_t)i * width;
            const Floats gain = broadcast_float(states.gains[t + i]);
            const auto finished = [&](int d) { return fma(load_floats(key + d), gain, load_floats(mean + d)); };
            int d = 0;
            if (rotary_pairs % 16 == 0) {
                for (; d < rotary_pairs; d += 16) {
                    const Floats x = finished(d), y = finished(d + rotary_pairs);
                    const Floats u = load_floats(cos + d), v = load_floats(sin + d);
                    store_floats(key + d, x * u - y * v);
                    store_floats(key + d + rotary_pairs, fma(y, u, x * v));
                }
                for (d = 2 * rotary_pairs; d < width; d += 16) store_floats(key + d, finished(d));
                continue;
            }
            for (; d < width; d += 16) store_floats(key + d, finished(d));
            for (d = 0; d < rotary_pairs; d++) {
                const float x = key[d], y = key[d + rotary_pairs];
                key[d] = x * cos[d] - y * sin[d];
                key[d + rotary_pairs] = y * cos[d] + x * sin[d];
            }
        }
    }

    void score(const float* query, float* out, size_t tokens) const {
        for (int r = 0; r < call.rows; r++) {
            const float* row = query + (size_t)r * width;
            for (int i = 0; i < KEY_ROWS; i++) {
                const float* key = keys + (size_t)i * width;
                Floats found = broadcast_float(0);
                for (int d = 0; d < width; d += 16) found = fma(load_floats(key + d), load_floats(row + d), found);
                out[r * tokens + i] = sum(found);
            }
        }
    }

    void run(int b, int column) {
        const uint8_t* packed = states.open(call.table[b * call.table_stride + column]);
        set_column_ranges();
        states.read_levels(packed, [this](int first) {
            const Words most = load(column_max + first);
            return [most](Words level) { return multiply_q15(level, most); };
        });
        const size_t tokens = (size_t)call.columns * n, at = (size_t)column * n;
        for (int head = 0; head < call.kv_heads; head++) {
            const size_t from = ((size_t)b * call.kv_heads + head) * call.rows;
            for (int group = 0; group < groups; group++) gather_weights(group, head);
            for (int t = 0; t < n; t += KEY_ROWS) {
                if (!groups) std::fill(keys, keys + (size_t)KEY_ROWS * width, 0.0f);
                for (int group = 0; group < groups; group++) multiply_group(group, t);
                const size_t angles = (size_t)b * call.rope_batch + (at + t) * call.rope_token;
                finish_keys(head, t, call.cos + angles, call.sin + angles);
                score(call.query + from * width, call.scores + from * tokens + at + t, tokens);
            }
        }
    }
};

// xq_ranked_scores.
inline int ranked_scores(const xq_ranked_scores& call) {
    int failed = 0;
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(RankedKeys::bytes(call));
        failed += !ready;
#pragma omp for schedule(dynamic) collapse(2)
        for (int b = 0; b < call.batch; b++)
            for (int column = 0; column < call.columns; column++) {
                if (!ready || column >= columns_of(call, b, call.key.block)) continue;
                workspace.next = workspace.base;
                RankedKeys(call, workspace).run(b, column);
            }
    }
    return failed ? XQ_NO_MEMORY : XQ_DONE;
}

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

// The weighted sums of one block.
struct RankedValues {
    const xq_ranked_sum& call;
    RankedReader states;
    const int n;
    float* weights;  // [rows, n] times the gains
    float* size;     // [coded] of a level of 1, by rank
    static constexpr float LEVEL_SCALE = 32767;
    static constexpr int MOST_ROWS = MAX_ROWS * 3 / 2;  // that share levels

    static size_t bytes(const xq_ranked_sum& c) {
        return RankedReader::bytes(c.value) +
               sizeof(float) * ((size_t)c.value.block * c.rows + RankedReader::coded_of(c.value)) + 2 * 64;
    }
    RankedValues(const xq_ranked_sum& c, Workspace& workspace) : call(c), states(c.value, workspace), n(c.value.block) {
        weights = workspace.take<float>((size_t)c.rows * n);
        size = workspace.take<float>(states.coded);
    }

    void set_sizes() const {
        int rank = 0;
        for (int width = ALL_WIDTHS - 1; width >= 0; width--)
            for (int i = 0; i < call.value.counts[width]; i++, rank++)
                size[rank] = states.ranks.sizes[states.ranks.order[rank]] *
                             (call.value.highest_level[width] / LEVEL_SCALE);
    }

    // Adds the sums of `rows` rows of weights from r on.
    void add_rows(int r, int rows, float* out) const {
        const SumLevels sum = pick_sum_levels(rows, std::make_integer_sequence<int, MOST_ROWS>());
        float found[MOST_ROWS * 32];
        for (int first = 0; first < states.coded; first += 32) {
            sum(states.levels + first, states.stride, n, weights + (size_t)r * n, found);
            for (int i = 0; i < std::min(32, states.coded - first); i++) {
                float* to = out + (size_t)r * states.operand.channels + states.ranks.order[first + i];
                for (int j = 0; j < rows; j++)
                    to[(size_t)j * states.operand.channels] += found[j * 32 + i] * size[first + i];
            }
        }
    }

    // Adds the block in this column of the table to `out` [rows, C].
    void add(int b, int column, float* out) {
        const size_t tokens = (size_t)call.columns * n;
        const uint8_t* packed = states.open(call.table[b * call.table_stride + column]);
        for (int r = 0; r < call.rows; r++) {
            const float* given = call.weights + ((size_t)b * call.rows + r) * tokens + (size_t)column * n;
            for (int t = 0; t < n; t++) weights[(size_t)r * n + t] = given[t] * states.gains[t];
        }
        states.read_levels(packed, [](int) { return [](Words level) { return level; }; });
        set_sizes();
        const int parts = (call.rows + MOST_ROWS - 1) / MOST_ROWS;
        for (int i = 0; i < parts; i++) {
            const int first = i * call.rows / parts;
            add_rows(first, (i + 1) * call.rows / parts - first, out);
        }
    }
};

// xq_ranked_sum. Every split of the blocks has sums of its own, which are added at the end.
inline int ranked_sum(const xq_ranked_sum& call) {
    const int threads = std::max(call.threads, 1), splits = std::max(std::min(threads, call.columns), 1);
    const size_t state_size = (size_t)call.rows * call.value.channels, all = state_size * call.batch;
    static thread_local Workspace shared;
    if (!shared.reserve(sizeof(float) * all * splits + 64)) return XQ_NO_MEMORY;
    float* sums = shared.take<float>(all * splits);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(RankedValues::bytes(call));
        failed += !ready;
#pragma omp for schedule(static) collapse(2)
        for (int b = 0; b < call.batch; b++)
            for (int split = 0; split < splits; split++) {
                if (!ready) continue;
                float* out = sums + split * all + b * state_size;
                std::fill(out, out + state_size, 0.0f);
                const int64_t columns = columns_of(call, b, call.value.block);
                const int last = (int)((split + 1) * columns / splits);
                for (int j = (int)(split * columns / splits); j < last; j++) {
                    workspace.next = workspace.base;
                    RankedValues(call, workspace).add(b, j, out);
                }
            }
    }
    if (failed) return XQ_NO_MEMORY;
    std::copy(sums, sums + all, call.out);
    for (int split = 1; split < splits; split++)
        for (size_t i = 0; i < all; i++) call.out[i] += sums[split * all + i];
    return XQ_DONE;
}

}  // namespace
