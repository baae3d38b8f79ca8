// The softmax of a few queries where keys and values are rebuilt from what is packed (rebuild.h): between the
// scores with packed keys, which are given, and the sums of packed values, which come after it. Scores become the
// weights of packed tokens. Tokens that are kept exactly are scored, weighed and summed here.
#pragma once
#include "attention.h"
#include "rebuild.h"

namespace {

inline size_t weigh_bytes(const xq_attend& call) {
    const int rows = rows_of_sequence(call), D = call.head_size;
    return Rows::bytes(rows) + attend_exact_bytes(call) + 4 * OnlineSoftmax::floats(rows, whole_vectors(D)) + 64;
}

// One sequence and key/value head. `scores` [rows, tokens] are those of its table.
inline void weigh_head(const xq_weigh& given, int b, int g, float* scores, Workspace& workspace) {
    const xq_attend& call = given.attend;
    const int rows = rows_of_sequence(call), D = call.head_size, width = whole_vectors(D);
    const int tokens = given.columns * call.block, limit = call.limits[b];
    OnlineSoftmax softmax(workspace.take<float>(OnlineSoftmax::floats(rows, width)), rows, width);
    softmax.clear();
    attend_exact(call, b, g, softmax, workspace);
    const Rows all(call, b, g, 0, rows, workspace);
    bool seen = false;
    if (limit > 0) {
        for (int j = 0, start = 0; j < given.columns; j++) {
            const int length = call.lengths ? call.lengths[j] : call.block;
            const int valid = std::max(std::min(length, limit - start), 0);
            mask_packed(call, all, scores + (size_t)j * call.block, tokens, start, valid);
            start += length;
        }
        seen = softmax.update(scores, tokens);
    }
    if (!seen) std::fill(scores, scores + (size_t)rows * tokens, 0.0f);
    for (int r = 0; r < rows; r++) {
        float total = softmax.running_sum[r];
        if (call.sink_logits && total > 0) total += std::exp(call.sink_logits[all[r].head] - softmax.running_max[r]);
        const float inverse = total > 0 ? 1 / total : 0;
        Floats packed = broadcast_float(0);
        for (int t = 0; seen && t < tokens; t += 16) {
            float* weights = scores + (size_t)r * tokens + t;
            const Floats weight = load_floats(weights) * broadcast_float(inverse);
            store_floats(weights, weight);
            packed = packed + weight;
        }
        const float seen_packed = sum(packed);
        const int64_t at = b * call.out_batch + all[r].query * call.out_token + all[r].head * call.out_head;
        for (int c = 0; c < D; c++) {
            const float added = given.value_bias ? seen_packed * given.value_bias[(size_t)g * D + c] : 0;
            store_element(call.out, call.dtype, at + c, softmax.sums[(size_t)r * width + c] * inverse + added);
        }
    }
}

// xq_weigh.
inline int weigh(const xq_weigh& given) {
    const xq_attend& call = given.attend;
    const size_t head = (size_t)call.group_heads * call.queries * given.columns * call.block;
    int failed = 0;
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(weigh_bytes(call));
        failed += !ready;
#pragma omp for schedule(dynamic) collapse(2)
        for (int b = 0; b < call.batch; b++)
            for (int g = 0; g < call.kv_heads; g++) {
                if (!ready) continue;
                workspace.next = workspace.base;
                weigh_head(given, b, g, given.scores + ((size_t)b * call.kv_heads + g) * head, workspace);
            }
    }
    if (failed) return XQ_NO_MEMORY;
    if (call.append) append(call);
    return XQ_DONE;
}

}  // namespace
