// Attention over tokens that are kept as they are: tail, sinks and the newest. A warp takes every WARPS-th token;
// a thread has pairs of channels that RoPE rotates together.
#pragma once
#include "states.h"

constexpr int OWN = PAIRS / 32;  // pairs of a thread

struct Partial {  // of the rows of a program, in one warp
    float maximum[ROWS], total[ROWS], low[ROWS][OWN], high[ROWS][OWN];
};

// Add tokens of a run, whose keys and values begin at `key` and `value` in a row of their own.
DEVICE void add_run(const Arguments& a, Partial& found, const float (&q)[ROWS][2 * OWN], int first_row, const void* keys,
                    int64 key_at, const void* values, int64 value_at, int64 key_stride, int64 value_stride, Run run,
                    int capacity, const float* cos, const float* sin, const int* columns, int limit, bool causal, int b,
                    int head) {
    const int warp = thread() / 32, lane = thread() % 32;
    for (int i = warp; i < run.count; i += WARPS) {
        int place = run.first + i, column = run.start + i;
        if (capacity && place >= capacity) place -= capacity;
        if (columns) {
            column = columns[i];
            if (column < 0 || column >= limit) continue;
        }
        float low[OWN], high[OWN];
#pragma unroll
        for (int p = 0; p < OWN; p++) {
            const int c = p * 32 + lane;
            low[p] = state_at(keys, key_at + place * key_stride + c);
            high[p] = state_at(keys, key_at + place * key_stride + c + PAIRS);
            if (cos) {
                const float x = cos[i * PAIRS + c], y = sin[i * PAIRS + c], old = low[p];
                low[p] = old * x - high[p] * y;
                high[p] = high[p] * x + old * y;
            }
        }
        float value_low[OWN], value_high[OWN];
#pragma unroll
        for (int p = 0; p < OWN; p++) {
            value_low[p] = state_at(values, value_at + place * value_stride + p * 32 + lane);
            value_high[p] = state_at(values, value_at + place * value_stride + p * 32 + lane + PAIRS);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const Row row = row_of(a, head, first_row + r);
            float score = 0;
#pragma unroll
            for (int p = 0; p < OWN; p++) score += q[r][2 * p] * low[p] + q[r][2 * p + 1] * high[p];
#pragma unroll
            for (int m = 16; m; m /= 2) score += from_other(score, m);
            score = capped(a, score);
            if (a.mask_kind) score = masked(a, b * a.mask_batch + row.place * a.mask_query, column, score);
            if (!row.there || (causal && !a.mask_kind && row.place < i)) score = NOTHING;
            const float raised = larger(found.maximum[r], score), shrink = exp_of(found.maximum[r], raised);
            const float weight = exp_of(score, raised);
            found.maximum[r] = raised;
            found.total[r] = found.total[r] * shrink + weight;
#pragma unroll
            for (int p = 0; p < OWN; p++) {
                found.low[r][p] = found.low[r][p] * shrink + weight * value_low[p];
                found.high[r][p] = found.high[r][p] * shrink + weight * value_high[p];
            }
        }
    }
}

// The newest tokens of an engine's sequence go into its ring, behind what the ring holds.
DEVICE void append(const Arguments& a, int b, int head) {
    const Run run = run_of(a.newest, b, 0, 0), held = run_of(a.tail.runs, b, 0, 0);
    for (int i = thread(); i < run.count * HEAD; i += 32 * WARPS) {
        const int token = i / HEAD, c = i % HEAD;
        const int64 from = run.row + run.first + token;
        const int64 to = held.row * a.tail.row + (held.first + held.count + token) % a.tail.capacity * a.tail.token;
        put_state(a.tail.data, to + head * HEAD + c, state_at(a.key.data, from * a.key.token + head * a.key.head + c));
        put_state(a.tail.data, to + (a.kv_heads + head) * HEAD + c,
                  state_at(a.value.data, from * a.value.token + head * a.value.head + c));
    }
}

// One split of the rows from `first_row` on: `joint` has room for the sums of all warps.
DEVICE void attend_exact(const Arguments& a, int b, int head, int first_row, int limit, float* joint, float* stats) {
    const int warp = thread() / 32, lane = thread() % 32;
    Partial found;
    float q[ROWS][2 * OWN];
    const Run newest = run_of(a.newest, b, a.queries, a.past);
    const int64 own = newest.row * a.query.batch;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const Row row = row_of(a, head, first_row + r);
        found.maximum[r] = LOWEST;
        found.total[r] = 0;
#pragma unroll
        for (int p = 0; p < OWN; p++) {
            const int64 at = own + row.head * a.query.head + row.place * a.query.token + p * 32 + lane;
            q[r][2 * p] = row.there ? state_at(a.query.data, at) * a.scaling : 0;
            q[r][2 * p + 1] = row.there ? state_at(a.query.data, at + PAIRS) * a.scaling : 0;
            found.low[r][p] = found.high[r][p] = 0;
        }
    }
    const int64 width = (int64)a.kv_heads * HEAD;
    const Run tail = run_of(a.tail.runs, b, a.tail.count, limit);
    int64 at = tail.row * a.tail.row + head * HEAD, angle = (int64)b * tail.count * PAIRS;
    add_run(a, found, q, first_row, a.tail.data, at, a.tail.data, at + width, a.tail.token, a.tail.token, tail,
            a.tail.capacity, a.tail.cos ? a.tail.cos + angle : 0, a.tail.sin + angle, 0, 0, false, b, head);
    if (a.sinks.data) {
        const Run sinks = run_of(a.sinks.runs, b, a.sinks.count, 0);
        at = sinks.row * a.sinks.row + head * HEAD, angle = (int64)b * sinks.count * PAIRS;
        add_run(a, found, q, first_row, a.sinks.data, at, a.sinks.data, at + width, a.sinks.token, a.sinks.token, sinks, 0,
                a.sinks.cos ? a.sinks.cos + angle : 0, a.sinks.sin + angle,
                PAGED ? 0 : a.sinks.columns + b * sinks.count, limit, false, b, head);
    }
    const int64 key_at = newest.row * a.key.batch + head * a.key.head;
    const int64 value_at = newest.row * a.value.batch + head * a.value.head;
    add_run(a, found, q, first_row, a.key.data, key_at, a.value.data, value_at, a.key.token, a.value.token, newest, 0, 0, 0,
            0, 0, true, b, head);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (lane == 0) {
            stats[(warp * ROWS + r) * 2] = found.maximum[r];
            stats[(warp * ROWS + r) * 2 + 1] = found.total[r];
        }
#pragma unroll
        for (int p = 0; p < OWN; p++) {
            joint[(warp * ROWS + r) * HEAD + p * 32 + lane] = found.low[r][p];
            joint[(warp * ROWS + r) * HEAD + p * 32 + lane + PAIRS] = found.high[r][p];
        }
    }
}
