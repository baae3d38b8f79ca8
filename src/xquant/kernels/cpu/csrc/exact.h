// Attention over the tokens that are kept as they are: scores, and weighted values, of some tokens at a time in fp32.
#pragma once
#include <algorithm>

#include "online_softmax.h"
#include "rows.h"

namespace {

// `size`: a multiple of 16.
inline float dot_rows(const float* a, const float* b, int size) {
    Floats lanes = broadcast_float(0);
    for (int c = 0; c < size; c += 16) lanes = fma(load_floats(a + c), load_floats(b + c), lanes);
    return sum(lanes);
}

// Caps and masks the scores [rows, n] with a block of packed tokens, of which `valid` are to be seen, the first of them
// at `start` in the sequence. Sinks are in a block too, but count as exact tokens.
inline void mask_packed(const xq_attend& call, const Rows& rows, float* scores, size_t stride, int start, int valid) {
    for (int r = 0; r < rows.count; r++) {
        float* s = scores + r * stride;
        if (call.softcap > 0) soft_cap(s, valid, call.softcap);
        if (call.mask) MaskRow(call, rows[r], start).add_to(s, valid);
        for (int t = valid; t < call.block; t++) s[t] = -INFINITY;
        for (int e = 0; e < call.exact_count; e++) {
            const xq_exact& exact = call.exact[e];
            for (int i = 0; exact.column && i < exact.count; i++) {
                const int t = exact.column[(size_t)rows[r].b * exact.count + i] - start;
                if (t >= 0 && t < valid) s[t] = -INFINITY;
            }
        }
    }
}

// The exact tokens of a key/value head, for the rows of a task. Heads may have any size: rows of states, queries and
// sums are filled up with zeros to whole vectors.
struct ExactTokens {
    static constexpr int AT_A_TIME = 64;
    // With so many rows, keys are turned so that 16 tokens lie beside each other.
    static constexpr int MANY_ROWS = 16;

    const xq_attend& call;
    const int g, D, width, rows;
    const Rows all;
    const float* query;  // [rows, width] times `scaling`
    OnlineSoftmax softmax;  // of sums [rows, width]
    float* scores;     // [rows, AT_A_TIME]
    float* states;     // [AT_A_TIME, width] keys, then values
    float* turned;     // [D, AT_A_TIME] keys
    float* row;        // [D] scratch

    static size_t bytes(const xq_attend& c, size_t rows) {
        const size_t width = whole_vectors(c.head_size);
        return 4 * (rows * AT_A_TIME + 2 * AT_A_TIME * width + width) + 4 * 64;
    }

    ExactTokens(const xq_attend& c, int g, const Rows& all, const float* query, OnlineSoftmax softmax,
                Workspace& workspace)
        : call(c),
          g(g),
          D(c.head_size),
          width(whole_vectors(D)),
          rows(all.count),
          all(all),
          query(query),
          softmax(softmax) {
        scores = workspace.take<float>((size_t)rows * AT_A_TIME);
        states = workspace.take<float>(AT_A_TIME * width);
        for (int t = 0; width > D && t < AT_A_TIME; t++) std::fill(states + t * width + D, states + (t + 1) * width, 0.0f);
        turned = workspace.take<float>(AT_A_TIME * D);
        row = workspace.take<float>(D);
    }

    // Attends to those of the one sequence that all rows are of.
    void attend() {
        int last_query = 0;
        for (int r = 0; r < rows; r++) last_query = std::max(last_query, all[r].query);
        for (int e = 0; e < call.exact_count; e++) {
            const xq_exact& exact = call.exact[e];
            const int b = all[0].b;
            const xq_run run = exact.runs ? exact.runs[b] : xq_run{b, 0, exact.count, exact.start};
            const int end = exact.causal && !call.mask ? std::min(run.count, last_query + 1) : run.count;
            for (int from = 0; from < end; from += AT_A_TIME)
                attend_to(exact, run, from, std::min(AT_A_TIME, end - from));
        }
    }

    void attend_to(const xq_exact& exact, const xq_run& run, int from, int count) {
        if (!exact.column && !any_seen(call, all, run.start + from, count)) return;
        const int stride = (count + 15) / 16 * 16;
        load_states(exact.key, exact, run, from, count);
        if (exact.cos) rotate(exact, from, count);
        rows < MANY_ROWS ? score_by_row(count, stride) : score_by_lane(count, stride);
        for (int r = 0; r < rows; r++) hide(exact, run, from, count, r, stride);
        if (!softmax.update(scores, stride)) return;
        load_states(exact.value, exact, run, from, count);
        weigh(count, stride);
    }

    // A run may go on at the beginning of a ring.
    void load_states(const void* of, const xq_exact& exact, const xq_run& run, int from, int count) {
        const int wrap = exact.capacity ? exact.capacity - run.first : run.count;
        const int64_t begin = run.row * exact.batch_stride + run.first * exact.token_stride + g * exact.head_stride;
        for (int t = 0; t < count; t++) {
            const int place = from + t - (from + t < wrap ? 0 : exact.capacity);
            load_row(of, exact.dtype, begin + place * exact.token_stride, D, states + (size_t)t * width);
        }
    }

    void rotate(const xq_exact& exact, int from, int count) {
        const int pairs = exact.pairs;
        for (int t = 0; t < count; t++) {
            const int64_t at = ((int64_t)all[0].b * exact.count + from + t) * pairs;
            const float *cos = exact.cos + at, *sin = exact.sin + at;
            float* key = states + (size_t)t * width;
            std::memcpy(row, key, sizeof(float) * D);
            for (int j = 0; j < pairs; j++) {
                key[j] = row[j] * cos[j] - row[j + pairs] * sin[j];
                key[j + pairs] = row[j + pairs] * cos[j] + row[j] * sin[j];
            }
        }
    }

    void score_by_row(int count, int stride) {
        for (int t = 0; t < count; t++)
            for (int r = 0; r < rows; r++)
                scores[(size_t)r * stride + t] =
                    dot_rows(query + (size_t)r * width, states + (size_t)t * width, width);
    }

    void score_by_lane(int count, int stride) {
        for (int c = 0; c < D; c++)
            for (int t = 0; t < count; t++) turned[(size_t)c * stride + t] = states[(size_t)t * width + c];
        for (int r = 0; r < rows; r += 4)
            for (int t = 0; t < stride; t += 16) {
                const int most = std::min(4, rows - r);
                Floats dot[4] = {broadcast_float(0), broadcast_float(0), broadcast_float(0), broadcast_float(0)};
                const float* q[4];
                for (int i = 0; i < 4; i++) q[i] = query + (size_t)(r + std::min(i, most - 1)) * width;
                for (int c = 0; c < D; c++) {
                    const Floats key = load_floats(turned + (size_t)c * stride + t);
                    for (int i = 0; i < 4; i++) dot[i] = fma(broadcast_float(q[i][c]), key, dot[i]);
                }
                for (int i = 0; i < most; i++) store_floats(scores + (size_t)(r + i) * stride + t, dot[i]);
            }
    }

    // Sets what a row does not see to -infinity, up to `stride`.
    void hide(const xq_exact& exact, const xq_run& run, int from, int count, int r, int stride) {
        float* s = scores + (size_t)r * stride;
        const Row& row = all[r];
        if (call.softcap > 0) soft_cap(s, count, call.softcap);
        if (exact.column) {
            const int limit = call.limits[row.b];
            const MaskRow mask(call, row, 0);
            for (int t = 0; t < count; t++) {
                const int column = exact.column[(size_t)row.b * exact.count + from + t];
                if (column < 0 || column >= limit)
                    s[t] = -INFINITY;
                else if (call.mask)
                    s[t] += mask[column];
            }
        } else if (call.mask) {
            MaskRow(call, row, run.start + from).add_to(s, count);
        } else if (exact.causal) {
            for (int t = std::max(row.query + 1 - from, 0); t < count; t++) s[t] = -INFINITY;
        }
        for (int t = count; t < stride; t++) s[t] = -INFINITY;
    }

    void weigh(int count, int stride) {
        for (int r = 0; r < rows; r++) {
            int c = 0;
            for (; c + 64 <= width; c += 64) weigh<4>(r, c, count, stride);
            for (; c < width; c += 16) weigh<1>(r, c, count, stride);
        }
    }
    template <int VECTORS>
    void weigh(int r, int c, int count, int stride) {
        float* to = softmax.sums + (size_t)r * width + c;
        Floats sums[VECTORS];
        for (int i = 0; i < VECTORS; i++) sums[i] = load_floats(to + i * 16);
        for (int t = 0; t < count; t++) {
            const Floats weight = broadcast_float(scores[(size_t)r * stride + t]);
            const float* value = states + (size_t)t * width + c;
            for (int i = 0; i < VECTORS; i++) sums[i] = fma(weight, load_floats(value + i * 16), sums[i]);
        }
        for (int i = 0; i < VECTORS; i++) store_floats(to + i * 16, sums[i]);
    }
};

inline size_t attend_exact_bytes(const xq_attend& call) {
    const int rows = rows_of_sequence(call);
    return Rows::bytes(rows) + 4 * (size_t)rows * whole_vectors(call.head_size) + 64 + ExactTokens::bytes(call, rows);
}

// Attends to the exact tokens of one sequence and head, for all its rows. `softmax` has sums of whole vectors.
inline void attend_exact(const xq_attend& call, int b, int g, OnlineSoftmax softmax, Workspace& workspace) {
    const Rows rows(call, b, g, 0, rows_of_sequence(call), workspace);
    const int width = whole_vectors(call.head_size);
    float* query = workspace.take<float>((size_t)rows.count * width);
    load_queries(call, call.query, rows, width, query);
    ExactTokens(call, g, rows, query, softmax, workspace).attend();
}

}  // namespace
