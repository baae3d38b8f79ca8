// Attention over ranked codes of states x[t, c] = level[t, c] * scale_c * gain_t, of which keys are products:
//
//     k[t] = gain_t sum_c (W_c scale_c) level[t, c] + mean, rotated by RoPE;   score[t] = scaling q . k[t]
//     sum_t w_t x[t, c] = scale_c sum_t (w_t gain_t) level[t, c]
//
// Channels that have no bits are left out of both. The product of keys is one of int16 states and int16 weights.
// States are in the order of their scales, in groups of 64 columns. Columns of a group are of like size and share one
// step, as fine as sums of 32 bits allow, so that small ones are not lost beside large ones. The sums over tokens are
// in fp32. Both equal those of `quant.ranked.Ranked.decode`, times the weight of keys, to a relative error below 1e-3.
#pragma once
#include "ranking.h"
#include "widths.h"

namespace {

constexpr int WEIGHT_LIMIT = 8191;        // the highest weight, as in kernels/cpu/ranked.py
constexpr int GROUP_STRIDE = STRIP + 32;  // from token to token in a group; vectors are written whole

// Channels of a block that follow each other in order, have codes of one width and belong to one group.
struct Run {
    int first, count, width;  // of WIDTHS
    const uint8_t* packed;
    int stride;  // bytes from row to row
};

// Calls `work` with every run of a block.
template <class F>
void for_each_run(const xq_ranked_operand& operand, const uint8_t* packed, F work) {
    int first = 0;
    for (int width = ALL_WIDTHS - 1; width >= 0; width--) {
        const int count = operand.counts[width];
        for (int at = 0, next; at < count; at = next) {
            next = std::min(count, at + STRIP - (first + at) % STRIP);
            work(Run{first + at, next - at, width, packed + at, count});
        }
        packed += packed_bytes(WIDTHS[width], operand.block) * count;
        first += count;
    }
}

// Reads a block of ranked codes, for scores and for sums.
struct RankedReader {
    const xq_ranked_operand& operand;
    const int n, C;
    int coded = 0;
    Ranking ranks;
    uint8_t* windows;  // [n + 8, 64] of the codes of a run
    float* gains;      // [n]

    static size_t bytes(const xq_ranked_operand& operand) {
        return Ranking::bytes(operand.channels) + (size_t)(operand.block + 8) * STRIP + sizeof(float) * operand.block +
               2 * 64;
    }
    RankedReader(const xq_ranked_operand& operand, Workspace& workspace)
        : operand(operand), n(operand.block), C(operand.channels), ranks(C, workspace) {
        windows = workspace.take<uint8_t>((size_t)(n + 8) * STRIP);
        gains = workspace.take<float>(n);
        for (int count : operand.counts) coded += count;
    }

    // Reads scales and gains of a block and sorts its channels. Returns its codes.
    const uint8_t* open(int64_t id) {
        ranks.read(at_address<uint8_t>(operand.scale[id]), operand.usual, operand.sizes);
        const auto* packed = at_address<uint8_t>(operand.gain[id]);
        for (int t = 0; t < n; t++) gains[t] = size_of(operand.sizes, nibble_at(packed, n, t) - UNIT_GAIN_PLACE);
        return at_address<uint8_t>(operand.codes[id]);
    }
    // Calls `work` with every token and 32 channels of a run, and with their levels.
    template <class F>
    void for_each_level(const Run& run, F work) const {
        const Width& width = WIDTHS[run.width];
        const int count = n / width.tokens;
        pick_unpack_strip(width.code)(run.packed, count, windows, run.stride, run.count);
        codes_to_windows(width, count, STRIP, windows);
        for (int v = 0; v < width.tokens; v++) {
            const LargeTable table = load_large_table(operand.levels + run.width * TABLE_SIZE + v * WINDOWS);
            for (int i = 0; i < count; i++)
                for (int c = 0; c < run.count; c += 32)
                    work(i * width.tokens + v, c, look_up(table, windows + (size_t)i * STRIP + c));
        }
    }
};

// The keys of one block, head by head.
struct RankedKeys {
    const xq_ranked_scores& call;
    RankedReader states;
    const int n, width, groups;
    int16_t* states16;    // [groups, n, GROUP_STRIDE] in steps of the group
    int16_t* column_max;  // [groups * 64 + 64] of the highest level of a column, in steps of the group
    float* group_step;    // [groups]
    int16_t* panel;       // [width / 32, 32 pairs of columns, 32, 2] weights of a group
    float* keys;          // [n, width]

    static int groups_of(const xq_ranked_operand& operand) {
        int coded = 0;
        for (int count : operand.counts) coded += count;
        return (coded + STRIP - 1) / STRIP;
    }
    static size_t bytes(const xq_ranked_scores& c) {
        const size_t groups = groups_of(c.key), n = c.key.block;
        return RankedReader::bytes(c.key) +
               2 * (groups * n * GROUP_STRIDE + (groups + 1) * STRIP + (size_t)STRIP * c.width) +
               4 * (groups + n * c.width) + 5 * 64;
    }
    RankedKeys(const xq_ranked_scores& c, Workspace& workspace)
        : call(c), states(c.key, workspace), n(c.key.block), width(c.width), groups(groups_of(c.key)) {
        states16 = workspace.take<int16_t>((size_t)groups * n * GROUP_STRIDE);
        column_max = workspace.take<int16_t>((size_t)(groups + 1) * STRIP);
        group_step = workspace.take<float>(groups);
        panel = workspace.take<int16_t>((size_t)STRIP * width);
        keys = workspace.take<float>((size_t)n * width);
    }

    // Chooses the step of every group, and what the highest level of a column is in steps.
    void set_column_ranges() const {
        const int* order = states.ranks.order;
        int width = ALL_WIDTHS - 1, left = call.key.counts[width];
        for (int group = 0; group < groups; group++) {
            float highest[STRIP], top = 0, total = 0;
            const int count = std::min(STRIP, states.coded - group * STRIP);
            for (int i = 0; i < count; i++) {
                while (!left) left = call.key.counts[--width];
                left--;
                const int channel = order[group * STRIP + i];
                highest[i] = call.key.highest_level[width] * states.ranks.sizes[channel] * call.weight_scale[channel];
                top = std::max(top, highest[i]);
                total += highest[i];
            }
            // Rounding adds at most 1 to each of the 64.
            const float most = (float)(INT32_MAX / WEIGHT_LIMIT - STRIP) * 0.999f;
            group_step[group] = std::max({total / most, top / 32767, 1e-30f});
            for (int i = 0; i < STRIP; i++)
                column_max[group * STRIP + i] = i < count ? (int16_t)std::lrintf(highest[i] / group_step[group]) : 0;
        }
    }

    void decode_run(const Run& run) const {
        const int16_t* step = column_max + run.first;
        int16_t* out = states16 + (size_t)(run.first / STRIP) * n * GROUP_STRIDE + run.first % STRIP;
        states.for_each_level(run, [&](int t, int c, Words level) {
            store(out + (size_t)t * GROUP_STRIDE + c, multiply_q15(level, load(step + c)));
        });
    }

    // Gathers a head's weights of the columns of a group, two columns beside each other. Returns the pairs.
    int gather_weights(int group, int head) const {
        const int first = group * STRIP, count = std::min(STRIP, states.coded - first), pairs = (count + 1) / 2;
        const size_t row = (size_t)call.kv_heads * width;
        for (int p = 0; p < pairs; p++) {
            const int* channel = states.ranks.order + first + 2 * p;
            const int16_t* a = call.weights + channel[0] * row + (size_t)head * width;
            const int16_t* b = 2 * p + 1 < count ? call.weights + channel[1] * row + (size_t)head * width : nullptr;
            for (int d = 0; d < width; d += 32) {
                const Words x = load(a + d), y = b ? load(b + d) : zero_words();
                int16_t* to = panel + ((size_t)d / 32 * pairs + p) * 64;
                store(to, zip_low16(x, y));
                store(to + 32, zip_high16(x, y));
            }
        }
        return pairs;
    }

    // Adds the product of a group's states and its gathered weights to the keys.
    void multiply_group(int group, int pairs) const {
        const Floats step = broadcast_float(group_step[group]);
        for (int d = 0; d < width; d += 16 * TILES) {
            const int16_t* weights = panel + (size_t)d / 32 * pairs * 64 + d % 32 * 2;
            for (int t = 0; t < n; t += MAX_ROWS) {
                const int16_t* left = states16 + ((size_t)group * n + t) * GROUP_STRIDE;
                Words sums[MAX_ROWS][TILES];
                for (int i = 0; i < MAX_ROWS; i++)
                    for (int k = 0; k < TILES; k++) sums[i][k] = zero_words();
                for (int p = 0; p < pairs; p++) {
                    Words weight[TILES];
                    for (int k = 0; k < TILES; k++) weight[k] = load(weights + (size_t)p * 64 + k * 32);
                    for (int i = 0; i < MAX_ROWS; i++) {
                        const Words state = broadcast(pair_at(left, i * (GROUP_STRIDE / 2) + p));
                        for (int k = 0; k < TILES; k++) sums[i][k] = dot16(sums[i][k], weight[k], state);
                    }
                }
                for (int i = 0; i < MAX_ROWS; i++)
                    for (int k = 0; k < TILES; k++) {
                        float* key = keys + (size_t)(t + i) * width + d + k * 16;
                        const Floats sum = to_floats(sums[i][k]) * step;
                        store_floats(key, group ? load_floats(key) + sum : sum);
                    }
            }
        }
    }

    // Applies gain, mean and RoPE to the keys of a head. cos and sin are at the block's first token.
    void finish_keys(int head, const float* cos, const float* sin) const {
        const float* mean = call.mean + (size_t)head * width;
        const int rotary_pairs = call.rotary_pairs;
        for (int t = 0; t < n; t++, cos += call.rope_token, sin += call.rope_token) {
            float* key = keys + (size_t)t * width;
            const Floats gain = broadcast_float(states.gains[t]);
            for (int d = 0; d < width; d += 16)
                store_floats(key + d, fma(load_floats(key + d), gain, load_floats(mean + d)));
            int d = 0;
            for (; d + 16 <= rotary_pairs; d += 16) {
                const Floats x = load_floats(key + d), y = load_floats(key + d + rotary_pairs);
                const Floats u = load_floats(cos + d), v = load_floats(sin + d);
                store_floats(key + d, x * u - y * v);
                store_floats(key + d + rotary_pairs, fma(y, u, x * v));
            }
            for (; d < rotary_pairs; d++) {
                const float x = key[d], y = key[d + rotary_pairs];
                key[d] = x * cos[d] - y * sin[d];
                key[d + rotary_pairs] = y * cos[d] + x * sin[d];
            }
        }
    }

    void score(const float* query, float* out, size_t tokens) const {
        for (int t = 0; t < n; t++) {
            const float* key = keys + (size_t)t * width;
            for (int r = 0; r < call.rows; r++) {
                const float* row = query + (size_t)r * width;
                Floats found = broadcast_float(0);
                for (int d = 0; d < width; d += 16) found = fma(load_floats(key + d), load_floats(row + d), found);
                out[r * tokens + t] = sum(found);
            }
        }
    }

    void run(int b, int column) {
        const uint8_t* packed = states.open(call.table[b * call.table_stride + column]);
        set_column_ranges();
        for_each_run(call.key, packed, [this](const Run& run) { decode_run(run); });
        const size_t tokens = (size_t)call.columns * n, at = (size_t)column * n;
        const size_t angles = (size_t)b * call.rope_batch + at * call.rope_token;
        for (int head = 0; head < call.kv_heads; head++) {
            if (!groups) std::fill(keys, keys + (size_t)n * width, 0.0f);
            for (int group = 0; group < groups; group++) multiply_group(group, gather_weights(group, head));
            finish_keys(head, call.cos + angles, call.sin + angles);
            const size_t from = ((size_t)b * call.kv_heads + head) * call.rows;
            score(call.query + from * width, call.scores + from * tokens + at, tokens);
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

// Sums the levels of a run by ROWS rows of weights, 16 TILES channels at a time.
template <int ROWS>
void sum_levels(const float* levels, int count, int n, const float* weights, float* out) {
    for (int c = 0; c < count; c += 16 * TILES) {
        Floats sums[ROWS][TILES];
        for (int r = 0; r < ROWS; r++)
            for (int k = 0; k < TILES; k++) sums[r][k] = broadcast_float(0);
        for (int t = 0; t < n; t++) {
            Floats level[TILES];
            for (int k = 0; k < TILES; k++) level[k] = load_floats(levels + (size_t)t * STRIP + c + k * 16);
            for (int r = 0; r < ROWS; r++) {
                const Floats weight = broadcast_float(weights[(size_t)r * n + t]);
                for (int k = 0; k < TILES; k++) sums[r][k] = fma(level[k], weight, sums[r][k]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int k = 0; k < TILES; k++) store_floats(out + r * STRIP + c + k * 16, sums[r][k]);
    }
}
using SumLevels = void (*)(const float*, int, int, const float*, float*);
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
    float* levels;   // [n, 64] of a run, times LEVEL_SCALE
    static constexpr float LEVEL_SCALE = 32767;

    static size_t bytes(const xq_ranked_sum& c) {
        return RankedReader::bytes(c.value) + sizeof(float) * c.value.block * ((size_t)c.rows + STRIP) + 2 * 64;
    }
    RankedValues(const xq_ranked_sum& c, Workspace& workspace) : call(c), states(c.value, workspace), n(c.value.block) {
        weights = workspace.take<float>((size_t)c.rows * n);
        levels = workspace.take<float>((size_t)n * STRIP);
    }

    void add_run(const Run& run, float* out) const {
        states.for_each_level(run, [&](int t, int c, Words level) {
            float* to = levels + (size_t)t * STRIP + c;
            store_floats(to, to_floats(low_half(level)));
            store_floats(to + 16, to_floats(high_half(level)));
        });
        for (int r = 0; r < call.rows; r += MAX_ROWS) {
            const int rows = std::min(call.rows - r, MAX_ROWS);
            float found[MAX_ROWS * STRIP];
            pick_sum_levels(rows, std::make_integer_sequence<int, MAX_ROWS>())(levels, run.count, n,
                                                                               weights + (size_t)r * n, found);
            for (int i = 0; i < run.count; i++) {
                const int channel = states.ranks.order[run.first + i];
                const float size = states.ranks.sizes[channel] * (call.value.highest_level[run.width] / LEVEL_SCALE);
                for (int j = 0; j < rows; j++) out[(size_t)(r + j) * states.C + channel] += found[j * STRIP + i] * size;
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
        for_each_run(call.value, packed, [&](const Run& run) { add_run(run, out); });
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
