// Attention over ranked codes of states x[t, c] = level[t, c] * scale_c * gain_t, of which keys and values are products:
//
//     k[t] = gain_t sum_c (W_c scale_c) level[t, c] + mean, rotated by RoPE;   score[t] = scaling q . k[t]
//     sum_t w_t v[t] = sum_c V_c scale_c (sum_t (w_t gain_t) level[t, c]) + sum_t w_t mean
//
// A block is unpacked once for all heads, and both sums are made of its levels. Between them lies an online softmax.
// Where values are products of more states than keys, these are unpacked after the softmax, and summed alone.
// Channels that have no bits are left out. After all blocks the sums of a row are multiplied with V.
//
// The output equals attention over what `quant.ranked.Ranked.decode` gives, times the weights, to a relative error below
// 2e-3 where all codes are wide; what narrow ones cost, ranked_columns.h says.
#pragma once
#include "ranked_blocks.h"

namespace {

// The memory of an attention's softmaxes: one a split of a sequence for the rows of all heads, with sums of states; one
// a sequence and head for exact tokens, with sums of values.
struct RankedStates {
    const xq_ranked_attend& given;
    const int splits, rows, D, C;
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
          C(given.states.channels + given.more.channels),
          packed_size(OnlineSoftmax::floats(rows * given.attend.kv_heads, C)),
          exact_size(OnlineSoftmax::floats(rows, whole_vectors(D))) {}

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
        return OnlineSoftmax(packed + ((size_t)b * splits + split) * packed_size, all, C);
    }
    OnlineSoftmax of_exact(int b, int g) const {
        return OnlineSoftmax(exact + ((size_t)b * given.attend.kv_heads + g) * exact_size, rows, whole_vectors(D));
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
        return 4 * rows * ((c.states.channels + c.more.channels + 15) / 16 * 16 + 2) + 3 * 64;
    }
    RankedOutput(const xq_ranked_attend& given, const RankedStates& states, Workspace& workspace)
        : given(given), states(states), C(states.C), filled((C + 15) / 16 * 16) {
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
                    const float kept = of_exact[r] * exact.sums[(size_t)r * exact.width + d];
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

// xq_ranked_attend.
inline int ranked_attend(const xq_ranked_attend& given) {
    const xq_attend& call = given.attend;
    static thread_local Workspace shared;
    RankedStates states(given);
    if (!states.reserve(shared)) return XQ_NO_MEMORY;
    const size_t bytes =
        std::max({RankedBlocks::bytes(given), attend_exact_bytes(call), RankedOutput::bytes(given)});
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
