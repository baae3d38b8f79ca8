// Sums of packed states that values are products of (rebuild.h): p X of p (X W).
#pragma once
#include "packed_values.h"

namespace {

// Columns of the table that have blocks of sequence b.
template <class Call>
int columns_of(const Call& call, int b, int n) {
    return call.limits ? std::min((call.limits[b] + n - 1) / n, call.columns) : call.columns;
}

// xq_rebuild_sum: the values of an attention with one key/value head of all channels, whose weights are given.
inline int rebuild_sum(const xq_rebuild_sum& given) {
    xq_attend call = {};
    call.value = given.value;
    call.block = given.block;
    call.kv_heads = call.queries = 1;
    call.head_size = given.channels;
    call.group_heads = given.rows;
    const int threads = std::max(given.threads, 1), splits = std::min(threads, given.columns), n = given.block;
    const int width = whole_vectors(given.channels);
    const size_t state_size = OnlineSoftmax::floats(given.rows, width), tokens = (size_t)given.columns * n;
    static thread_local Workspace shared;
    if (!shared.reserve(sizeof(float) * state_size * splits * given.batch)) return XQ_NO_MEMORY;
    float* states = shared.take<float>(state_size * splits * given.batch);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(Scratch::bytes(call) + PackedValues::bytes(call));
        failed += !ready;
#pragma omp for schedule(static) collapse(2)
        for (int b = 0; b < given.batch; b++)
            for (int split = 0; split < splits; split++) {
                if (!ready) continue;
                workspace.next = workspace.base;
                OnlineSoftmax softmax(states + ((size_t)b * splits + split) * state_size, given.rows, width);
                softmax.clear();
                PackedValues values(call, 0, Scratch(call, workspace), softmax, workspace);
                const int64_t columns = columns_of(given, b, n);
                const int last = (int)((split + 1) * columns / splits);
                for (int j = (int)(split * columns / splits); j < last; j++) {
                    const int32_t* ids = given.table + b * given.table_stride;
                    for (int r = 0; r < given.rows; r++) {
                        const float* weights = given.weights + ((size_t)b * given.rows + r) * tokens + (size_t)j * n;
                        std::memcpy(values.scores + (size_t)r * n, weights, sizeof(float) * n);
                        softmax.largest_weight[r] = highest_of(weights, n);
                    }
                    values.add(ids[j], {ids[std::min(j + 1, last - 1)], 0});
                }
            }
    }
    if (failed) return XQ_NO_MEMORY;
    for (int b = 0; b < given.batch; b++)
        for (int r = 0; r < given.rows; r++) {
            float* out = given.out + ((size_t)b * given.rows + r) * given.channels;
            for (int split = 0; split < splits; split++) {
                const float* sums =
                    OnlineSoftmax(states + ((size_t)b * splits + split) * state_size, given.rows, width).sums +
                    (size_t)r * width;
                for (int c = 0; c < given.channels; c++) out[c] = split ? out[c] + sums[c] : sums[c];
            }
        }
    return XQ_DONE;
}

}  // namespace
