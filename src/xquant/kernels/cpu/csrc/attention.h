// Attention of a few queries over one layer: out = softmax(scaling q K^T + mask) V, over packed tokens (packed_keys.h,
// packed_values.h) and exact ones. Keys and values are never written out.
//
// The blocks of every sequence and key/value head are cut into splits, and each split is a task with an online softmax
// of its own; exact tokens are one more task. A sequence has as many splits as its part of all blocks. Threads take
// tasks in order, then the states of a head are combined. So one long sequence keeps all threads busy, as many short
// ones do. All query heads of a key/value head, and all queries, share the codes once they are unpacked.
//
// It equals transformers' sdpa over the keys and values of `CompressedLayer.read`, to a relative error below 1e-3
// (tests/kernels/test_attend.py).
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "packed_keys.h"
#include "packed_values.h"

namespace {

// How the blocks of a sequence are cut, for each of its key/value heads.
struct Cut {
    int columns;     // of the table, up to the sequence's limit
    int blocks;      // of a split
    int splits;      // one more task has the exact tokens
    int first_task;  // of the sequence's first head
};

// Cuts the blocks of all sequences into about 16 tasks for every thread, so that none waits long for the last.
// Returns how many there are.
inline int cut_blocks(const xq_attend& call, Cut* cuts) {
    int64_t all = 0;
    for (int b = 0; b < call.batch; b++) {
        const int limit = call.limits[b];
        int columns = 0;
        if (call.lengths)
            for (int start = 0; start < limit; columns++) start += call.lengths[columns];
        else
            columns = (limit + call.block - 1) / call.block;
        cuts[b].columns = columns;
        all += (int64_t)columns * call.kv_heads;
    }
    const int64_t wanted = 16 * std::max(call.threads, 1);
    int tasks = 0;
    for (int b = 0; b < call.batch; b++) {
        Cut& cut = cuts[b];
        const int share = all ? (int)((wanted * cut.columns + all - 1) / all) : 0;
        const int splits = std::max(1, std::min(cut.columns / 2, share));
        cut.blocks = std::max(1, (cut.columns + splits - 1) / splits);
        cut.splits = (cut.columns + cut.blocks - 1) / cut.blocks;
        cut.first_task = tasks;
        tasks += call.kv_heads * (cut.splits + 1);
    }
    return tasks;
}

// One task by its number: a split of a sequence and head; the last split is the exact tokens.
struct Place {
    int b, g, split;
    Place(const xq_attend& call, const Cut* cuts, int task) {
        const Cut* after = std::upper_bound(cuts, cuts + call.batch, task,
                                            [](int number, const Cut& cut) { return number < cut.first_task; });
        b = (int)(after - cuts) - 1;
        const int tasks = cuts[b].splits + 1, number = task - cuts[b].first_task;
        g = number / tasks;
        split = number % tasks;
    }
};

inline float dot_rows(const float* a, const float* b, int size) {
    Floats lanes = broadcast_float(0);
    int c = 0;
    for (; c + 16 <= size; c += 16) lanes = fma(load_floats(a + c), load_floats(b + c), lanes);
    float dot = sum(lanes);
    for (; c < size; c++) dot += a[c] * b[c];
    return dot;
}

// to += weight * row.
inline void add_row(float weight, const float* row, int size, float* to) {
    const Floats factor = broadcast_float(weight);
    int c = 0;
    for (; c + 16 <= size; c += 16) store_floats(to + c, fma(factor, load_floats(row + c), load_floats(to + c)));
    for (; c < size; c++) to[c] += weight * row[c];
}

// The tokens of one sequence and key/value head that are kept unquantized.
struct ExactTokens {
    const xq_attend& call;
    const int b, g, D, rows;
    const float* query;  // [rows, D] times `scaling`
    OnlineSoftmax softmax;
    float* scores;       // [rows, most tokens of one kind]
    float *row, *copy;   // [D] a key or value; a key before RoPE

    static size_t most(const xq_attend& c) {
        int most = 0;
        for (int e = 0; e < c.exact_count; e++) most = std::max(most, c.exact[e].count);
        return most;
    }
    static size_t bytes(const xq_attend& c) {
        const size_t rows = c.group_heads * c.queries;
        return 4 * (rows * most(c) + 2 * c.head_size) + 3 * 64;
    }

    ExactTokens(const xq_attend& c, int b, int g, const float* query, OnlineSoftmax softmax, Workspace& workspace)
        : call(c), b(b), g(g), D(c.head_size), rows(c.group_heads * c.queries), query(query), softmax(softmax) {
        scores = workspace.take<float>((size_t)rows * most(c));
        row = workspace.take<float>(D);
        copy = workspace.take<float>(D);
    }

    // Caps and masks the scores [rows, n] with a block of packed tokens, of which `valid` are to be seen, the first of
    // them at `start` in the sequence. Sinks are in a block too, but count as exact tokens.
    void mask_packed(float* packed, size_t stride, int start, int valid) const {
        for (int r = 0; r < rows; r++) {
            float* s = packed + r * stride;
            if (call.softcap > 0) soft_cap(s, valid, call.softcap);
            if (call.mask) {
                const int64_t at = b * call.mask_batch + r % call.queries * call.mask_query;
                for (int t = 0; t < valid; t++)
                    s[t] += mask_at(call.mask, call.mask_dtype, at + (start + t) * call.mask_token);
            }
            for (int t = valid; t < call.block; t++) s[t] = -INFINITY;
        }
        for (int e = 0; e < call.exact_count; e++) {
            const xq_exact& exact = call.exact[e];
            if (!exact.column) continue;
            for (int i = 0; i < exact.count; i++) {
                const int t = exact.column[(size_t)b * exact.count + i] - start;
                if (t < 0 || t >= valid) continue;
                for (int r = 0; r < rows; r++) packed[r * stride + t] = -INFINITY;
            }
        }
    }

    void attend() {
        for (int e = 0; e < call.exact_count; e++) attend_to(call.exact[e]);
    }

    void attend_to(const xq_exact& exact) {
        const xq_run run = exact.runs ? exact.runs[b] : xq_run{b, 0, exact.count, exact.start};
        if (run.count == 0) return;
        const int pairs = exact.pairs, limit = call.limits[b];
        const int turn = exact.capacity ? exact.capacity - run.first : run.count;  // tokens before the ring's end
        const int64_t begin = run.row * exact.batch_stride + run.first * exact.token_stride + g * exact.head_stride;
        const int64_t back = exact.capacity * exact.token_stride;
        float* s = scores;
        for (int t = 0; t < run.count; t++) {
            const int64_t at = begin + t * exact.token_stride - (t < turn ? 0 : back);
            load_row(exact.key, exact.dtype, at, D, row);
            if (exact.cos) {
                const float* cos = exact.cos + ((size_t)b * exact.count + t) * pairs;
                const float* sin = exact.sin + ((size_t)b * exact.count + t) * pairs;
                std::memcpy(copy, row, sizeof(float) * D);
                for (int j = 0; j < pairs; j++) {
                    row[j] = copy[j] * cos[j] - copy[j + pairs] * sin[j];
                    row[j + pairs] = copy[j + pairs] * cos[j] + copy[j] * sin[j];
                }
            }
            const int column = exact.column ? exact.column[(size_t)b * exact.count + t] : run.start + t;
            for (int r = 0; r < rows; r++) {
                float x = dot_rows(query + (size_t)r * D, row, D);
                if (call.softcap > 0) soft_cap(&x, 1, call.softcap);
                const int index = r % call.queries;
                if (column < 0 || (exact.column && column >= limit) || (exact.causal && !call.mask && index < t))
                    x = -INFINITY;
                else if (call.mask)
                    x += mask_at(call.mask, call.mask_dtype,
                                 b * call.mask_batch + index * call.mask_query + column * call.mask_token);
                s[(size_t)r * run.count + t] = x;
            }
        }
        if (!softmax.update(s, run.count)) return;
        for (int t = 0; t < run.count; t++) {
            const int64_t at = begin + t * exact.token_stride - (t < turn ? 0 : back);
            load_row(exact.value, exact.dtype, at, D, row);
            for (int r = 0; r < rows; r++) {
                const float p = s[(size_t)r * run.count + t];
                add_row(p, row, D, softmax.sums + (size_t)r * D);
            }
        }
    }
};

// What one thread does at a time: one split of the blocks of a sequence and key/value head, or its exact tokens.
struct Task {
    const xq_attend& call;
    const int b, g;
    const int n, rows, limit;
    OnlineSoftmax softmax;
    Scratch scratch;
    PackedKeys keys;
    PackedValues values;
    ExactTokens exact;

    static size_t bytes(const xq_attend& c) {
        const size_t query = c.turned_query ? 4 * (size_t)c.group_heads * c.queries * c.head_size + 64 : 0;
        return Scratch::bytes(c) + PackedKeys::bytes(c) + PackedValues::bytes(c) + ExactTokens::bytes(c) + query;
    }

    Task(const xq_attend& c, int b, int g, Workspace& workspace, OnlineSoftmax softmax, const RopePlaces& rope_places)
        : call(c),
          b(b),
          g(g),
          n(c.block),
          rows(c.group_heads * c.queries),
          limit(c.limits[b]),
          softmax(softmax),
          scratch(c, workspace),
          keys(c, b, g, scratch, rope_places, workspace),
          values(c, b, g, scratch, softmax, workspace),
          exact(c, b, g, c.turned_query ? own_query(workspace) : keys.query, softmax, workspace) {}

    // The queries that exact tokens are multiplied with, where packed keys have others.
    float* own_query(Workspace& workspace) const {
        float* query = workspace.take<float>((size_t)rows * call.head_size);
        load_query(call, call.query, b, g, query);
        return query;
    }

    // Sums of packed values [rows, D] times the matrix of the head, which turns them back.
    void turn_sums() {
        const int D = call.head_size;
        const float* turn = call.value_turn + g * call.value_turn_head;
        for (int r = 0; r < rows; r++) {
            float* sums = softmax.sums + (size_t)r * D;
            std::memcpy(exact.row, sums, sizeof(float) * D);
            for (int c = 0; c < D; c += 16) {
                Floats turned = broadcast_float(0);
                for (int j = 0; j < D; j++)
                    turned = fma(broadcast_float(exact.row[j]), load_floats(turn + (size_t)j * D + c), turned);
                store_floats(sums + c, turned);
            }
        }
    }

    // `after`: the first block of the thread's next task.
    void attend_blocks(int first, int last, HeadBlock after) {
        int start = first * n;
        if (call.lengths) {
            start = 0;
            for (int j = 0; j < first; j++) start += call.lengths[j];
        }
        const int32_t* ids = call.table + b * call.table_stride;
        for (int j = first, length; j < last; start += length, j++) {
            length = call.lengths ? call.lengths[j] : n;
            const int64_t id = ids[j];
            const HeadBlock next = j + 1 < last ? HeadBlock{ids[j + 1], g} : after;
            keys.prefetch_ranges(next);
            values.prefetch_ranges(next);
            keys.rotate_query(j);
            keys.score(id, next);
            exact.mask_packed(scratch.scores, n, start, std::min(length, limit - start));
            if (!softmax.update(scratch.scores, n)) continue;
            values.add(id, next);
        }
    }
};

// Writes the newest tokens into the ring of their sequence, behind those that it holds.
inline void append(const xq_attend& call) {
    const xq_exact &ring = call.exact[0], &newest = call.exact[1];
    const int64_t size = ring.dtype == XQ_FLOAT32 ? 4 : 2;
    const size_t width = size * call.kv_heads * call.head_size;
    for (int b = 0; b < call.batch; b++) {
        const xq_run held = ring.runs[b], run = newest.runs[b];
        for (int t = 0; t < run.count; t++) {
            const int64_t place = (held.first + held.count + t) % ring.capacity;
            const int64_t to = size * (held.row * ring.batch_stride + place * ring.token_stride);
            const int64_t from = size * (run.row * newest.batch_stride + (run.first + t) * newest.token_stride);
            std::memcpy((char*)ring.key + to, (const char*)newest.key + from, width);
            std::memcpy((char*)ring.value + to, (const char*)newest.value + from, width);
        }
    }
}

// xq_attend.
inline int attend(const xq_attend& call) {
    const int rows = call.group_heads * call.queries, D = call.head_size;
    const size_t state_size = OnlineSoftmax::floats(rows, D);
    static thread_local Workspace plan, shared;
    if (!plan.reserve(sizeof(Cut) * call.batch)) return XQ_NO_MEMORY;
    Cut* cut = plan.take<Cut>(call.batch);
    const int tasks = cut_blocks(call, cut);
    if (!shared.reserve(sizeof(float) * state_size * tasks + 64 + RopePlaces::bytes(call))) return XQ_NO_MEMORY;
    float* states = shared.take<float>(state_size * tasks);
    const RopePlaces rope_places(call, shared);
    int failed = 0;
    std::atomic<int> taken{0};
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(Task::bytes(call));
        failed += !ready;
        // A thread takes its next task before it begins one, to know which codes to fetch.
        for (int task = ready ? taken++ : tasks, next; task < tasks; task = next) {
            next = taken++;
            workspace.next = workspace.base;
            const Place here(call, cut, task);
            const Cut& own = cut[here.b];
            OnlineSoftmax softmax(states + (size_t)task * state_size, rows, D);
            softmax.clear();
            Task work(call, here.b, here.g, workspace, softmax, rope_places);
            if (here.split == own.splits) {
                work.exact.attend();
                continue;
            }
            const int first = here.split * own.blocks, last = std::min(first + own.blocks, own.columns);
            HeadBlock after = {call.table[here.b * call.table_stride + last - 1], here.g};
            if (next < tasks) {
                const Place then(call, cut, next);
                if (then.split < cut[then.b].splits)
                    after = {call.table[then.b * call.table_stride + then.split * cut[then.b].blocks], then.g};
            }
            work.attend_blocks(first, last, after);
            if (call.value_turn) work.turn_sums();
        }
    }
    if (failed) return XQ_NO_MEMORY;
    for (int head = 0; head < call.batch * call.kv_heads; head++) {
        const int b = head / call.kv_heads, g = head % call.kv_heads, parts = cut[b].splits + 1;
        float* first = states + (size_t)(cut[b].first_task + g * parts) * state_size;
        OnlineSoftmax all(first, rows, D);
        for (int split = 1; split < parts; split++) all.combine(OnlineSoftmax(first + split * state_size, rows, D));
        const int64_t batch = call.query_batches ? call.query_batches[b] : b;
        for (int r = 0; r < rows; r++) {
            const int h = g * call.group_heads + r / call.queries;
            const int64_t at = batch * call.out_batch + r % call.queries * call.out_token + h * call.out_head;
            float total = all.running_sum[r];
            if (call.sink_logits && total > 0) total += std::exp(call.sink_logits[h] - all.running_max[r]);
            const float inverse = total > 0 ? 1 / total : 0;
            for (int c = 0; c < D; c++)
                store_element(call.out, call.dtype, at + c, all.sums[(size_t)r * D + c] * inverse);
        }
    }
    if (call.append) append(call);
    return XQ_DONE;
}

}  // namespace
