// Attention of a few queries over one layer: out = softmax(scaling q K^T + mask) V, over packed tokens (packed_keys.h,
// packed_values.h) and exact ones. Keys and values are never written out.
//
// It is cut into tasks (cut.h), each with an online softmax of its own. Threads take tasks in order, then the states of
// a row are combined. All rows of a task share the codes.
//
// It equals transformers' sdpa over the keys and values of `CompressedLayer.read`, to a relative error below 1e-3
// (tests/kernels/test_attend.py).
#pragma once
#include <omp.h>

#include <atomic>

#include "cut.h"
#include "exact.h"
#include "packed_keys.h"
#include "packed_values.h"

namespace {

// What one thread does at a time.
struct Task {
    const xq_attend& call;
    const Place place;
    const int n;
    const Rows rows;
    OnlineSoftmax softmax;
    Scratch scratch;
    PackedKeys keys;
    PackedValues values;
    ExactTokens exact;

    static size_t bytes(const xq_attend& c, int rows) {
        const size_t query = c.turned_query ? 4 * (size_t)rows * whole_vectors(c.head_size) + 64 : 0;
        return Rows::bytes(rows) + Scratch::bytes(c, rows) + PackedKeys::bytes(c, rows) + PackedValues::bytes(c) +
               ExactTokens::bytes(c, rows) + query;
    }

    Task(const xq_attend& c, const Place& place, Workspace& workspace, OnlineSoftmax softmax,
         const RopePlaces& rope_places)
        : call(c),
          place(place),
          n(c.block),
          rows(c, place.part.b, place.g, place.chunk * place.part.chunk_rows, place.rows(), workspace),
          softmax(softmax),
          scratch(c, rows.count, workspace),
          keys(c, place.g, rows, scratch, rope_places, workspace),
          values(c, place.g, scratch, softmax, workspace),
          exact(c, place.g, rows, c.turned_query ? own_query(workspace) : keys.query, softmax, workspace) {}

    // The queries that exact tokens are multiplied with, where packed keys have others.
    float* own_query(Workspace& workspace) const {
        float* query = workspace.take<float>((size_t)rows.count * softmax.width);
        load_queries(call, call.query, rows, softmax.width, query);
        return query;
    }

    // Sums of packed values [rows, D] times the matrix of the head, which turns them back.
    void turn_sums() {
        const int D = call.head_size;
        const float* turn = call.value_turn + place.g * call.value_turn_head;
        for (int r = 0; r < rows.count; r++) {
            float* sums = softmax.sums + (size_t)r * softmax.width;
            std::memcpy(exact.row, sums, sizeof(float) * D);
            for (int c = 0; c < D; c += 16) {
                Floats turned = broadcast_float(0);
                // What is read behind a row is of the next, and what it adds to behind the sums of a head.
                for (int j = 0; j < D - 1; j++)
                    turned = fma(broadcast_float(exact.row[j]), load_floats(turn + (size_t)j * D + c), turned);
                const Floats last = load_floats(turn + (size_t)(D - 1) * D + c, D - c);
                store_floats(sums + c, fma(broadcast_float(exact.row[D - 1]), last, turned));
            }
        }
    }

    // `then`: the thread's next task, whose codes are fetched in time.
    void attend_blocks(const Place& then) {
        const int first = place.first_block(), last = place.last_block(), limit = call.limits[place.part.b];
        int start = first * n;
        if (call.lengths) {
            start = 0;
            for (int j = 0; j < first; j++) start += call.lengths[j];
        }
        const HeadBlock after = then.exact() ? block(last - 1) : Task::block(call, then, then.first_block());
        for (int j = first, length; j < last; start += length, j++) {
            length = call.lengths ? call.lengths[j] : n;
            const int valid = std::min(length, limit - start);
            if (!any_seen(call, rows, start, valid)) continue;
            const int64_t id = block(j).id;
            const HeadBlock next = j + 1 < last ? block(j + 1) : after;
            keys.prefetch_ranges(next);
            values.prefetch_ranges(next);
            keys.rotate_query(j);
            keys.score(id, next);
            mask_packed(call, rows, scratch.scores, n, start, valid);
            if (!softmax.update(scratch.scores, n)) continue;
            values.add(id, next);
        }
    }

    static HeadBlock block(const xq_attend& call, const Place& place, int column) {
        return {call.table[place.part.b * call.table_stride + column], place.g};
    }
    HeadBlock block(int column) const { return block(call, place, column); }
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

// The output of one row, from what the tasks that have it found.
struct RowOutput {
    const Plan& plan;
    float* states;
    size_t state_size;

    // Calls found(state of a task, number of the row in it).
    template <class Found>
    void each_state(const Part& part, int g, int row, Found found) const {
        const Place here(plan, part.task(g, row));
        for (int split = 0; split < part.tasks(); split++) {
            float* memory = states + (size_t)(part.task(g, row) + split) * state_size;
            found(OnlineSoftmax(memory, here.rows(), whole_vectors(plan.call.head_size)), row % part.chunk_rows);
        }
    }
    template <class Found>
    void each_state(int b, int g, int row, Found found) const {
        each_state(plan.parts[b], g, row, found);
        if (plan.shared[b] < 0) return;
        const Part& shared = plan.parts[plan.shared[b]];
        each_state(shared, g, (b - shared.b) * rows_of_sequence(plan.call) + row, found);
    }

    // `sums` [D] is scratch.
    void write(int b, int g, int row, float* sums) const {
        const xq_attend& call = plan.call;
        const int D = call.head_size, h = g * call.group_heads + row / call.queries;
        float highest = -INFINITY, total = 0;
        each_state(b, g, row, [&](const OnlineSoftmax& state, int r) {
            highest = std::max(highest, state.running_max[r]);
        });
        std::fill(sums, sums + D, 0.0f);
        each_state(b, g, row, [&](const OnlineSoftmax& state, int r) {
            if (state.running_max[r] == -INFINITY) return;
            const float weight = std::exp(state.running_max[r] - highest);
            total += weight * state.running_sum[r];
            for (int c = 0; c < D; c++) sums[c] += weight * state.sums[(size_t)r * state.width + c];
        });
        if (call.sink_logits && total > 0) total += std::exp(call.sink_logits[h] - highest);
        const float inverse = total > 0 ? 1 / total : 0;
        const int64_t at =
            batch_of(call, b) * call.out_batch + row % call.queries * call.out_token + h * call.out_head;
        for (int c = 0; c < D; c++) store_element(call.out, call.dtype, at + c, sums[c] * inverse);
    }
};

// xq_attend.
inline int attend(const xq_attend& call) {
    const int D = call.head_size, width = whole_vectors(D), sequence = rows_of_sequence(call);
    static thread_local Workspace planning, shared;
    if (!planning.reserve(Plan::bytes(call))) return XQ_NO_MEMORY;
    const Plan plan(call, planning);
    const size_t state_size = OnlineSoftmax::floats(plan.most_rows, width);
    if (!shared.reserve(sizeof(float) * state_size * plan.tasks + 64 + RopePlaces::bytes(call))) return XQ_NO_MEMORY;
    float* states = shared.take<float>(state_size * plan.tasks);
    const RopePlaces rope_places(call, shared);
    const RowOutput output{plan, states, state_size};
    int failed = 0;
    std::atomic<int> taken{0};
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(Task::bytes(call, plan.most_rows));
        failed += !ready;
        // A thread takes its next task before it begins one, to know which codes to fetch.
        for (int number = ready ? taken++ : plan.tasks, next; number < plan.tasks; number = next) {
            next = taken++;
            workspace.next = workspace.base;
            const Place here(plan, number);
            OnlineSoftmax softmax(states + (size_t)number * state_size, here.rows(), width);
            softmax.clear();
            Task task(call, here, workspace, softmax, rope_places);
            if (here.exact()) {
                task.exact.attend();
                continue;
            }
            task.attend_blocks(next < plan.tasks ? Place(plan, next) : here);
            if (call.value_turn) task.turn_sums();
        }
#pragma omp barrier
        workspace.next = workspace.base;
        float* sums = workspace.take<float>(D);
#pragma omp for collapse(3) schedule(static)
        for (int b = 0; b < call.batch; b++)
            for (int g = 0; g < call.kv_heads; g++)
                for (int row = 0; row < sequence; row++)
                    if (ready) output.write(b, g, row, sums);
    }
    if (failed) return XQ_NO_MEMORY;
    if (call.append) append(call);
    return XQ_DONE;
}

}  // namespace
