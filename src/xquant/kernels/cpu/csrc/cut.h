// How the attention of a call is cut into tasks.
//
// - A part is some blocks of a table, for the rows of one sequence or of several. Sequences next to each other whose
//   tables begin with the same blocks (one prompt, answered several times) have one part for these, so that their codes
//   are read once for all. What follows is a part for each sequence, with its exact tokens.
// - The rows of a part are cut into chunks, which fit into the CPU's cache with what belongs to them.
// - The blocks of a part are cut into splits, so that one long sequence keeps all threads busy, as many short ones do.
//
// A task is one split for one chunk of rows of one key/value head; exact tokens are one more split.
#pragma once
#include <algorithm>

#include "rows.h"

namespace {

constexpr int CHUNK_ROWS = 64;  // the most of a task

// Columns of the table with the first `limit` tokens; the last may have some of them, or must have all.
inline int columns_up_to(const xq_attend& call, int limit, bool begun) {
    if (!call.lengths) return (limit + (begun ? call.block - 1 : 0)) / call.block;
    int found = 0;
    for (int start = 0; start < limit; found++) {
        start += call.lengths[found];
        if (!begun && start > limit) break;
    }
    return found;
}

struct Part {
    int b, sequences;        // whose blocks; whose rows are those of b, b + 1, ...
    int first, last;         // blocks, by their columns in the table of b
    int rows, chunk_rows;    // of a key/value head; of a chunk
    int chunks;
    int blocks, splits;      // of a split; without that of exact tokens
    bool exact;              // whether there is one
    int first_task;

    int tasks() const { return splits + exact; }  // of a head and chunk
    // The task that has this row of key/value head g in its first split.
    int task(int g, int row) const { return first_task + (g * chunks + row / chunk_rows) * tasks(); }
};

struct Plan {
    const xq_attend& call;
    Part* parts;       // first those of each sequence, then those of several
    int32_t* shared;   // [B] the part that a sequence shares; -1: none
    int32_t* columns;  // [B] up to the sequence's limit
    int count, tasks = 0, most_rows = 0;

    static size_t bytes(const xq_attend& call) {
        return 2 * (sizeof(Part) + sizeof(int32_t)) * call.batch + 3 * 64;
    }

    Plan(const xq_attend& call, Workspace& workspace) : call(call), count(call.batch) {
        parts = workspace.take<Part>(2 * call.batch);
        shared = workspace.take<int32_t>(call.batch);
        columns = workspace.take<int32_t>(call.batch);
        std::fill(shared, shared + call.batch, -1);
        for (int b = 0; b < call.batch; b++) columns[b] = columns_up_to(call, call.limits[b], true);
        for (int b = 0; b < call.batch;) b += share_from(b);
        set_tasks();
    }

    // With how many blocks, up to `most`, the tables of two sequences begin alike.
    int alike(int a, int b, int most) const {
        const int32_t *left = call.table + a * call.table_stride, *right = call.table + b * call.table_stride;
        return (int)(std::mismatch(left, left + most, right).first - left);
    }

    // Makes the parts of the sequences from b on that are read together. Returns how many sequences these are.
    int share_from(int b) {
        // One more sequence is taken in as long as no fewer blocks are saved by it.
        int sequences = 1, blocks = call.batch > 1 ? columns_up_to(call, call.limits[b], false) : 0;
        while (b + sequences < call.batch) {
            const int next = b + sequences;
            const int both = alike(b, next, std::min(blocks, columns_up_to(call, call.limits[next], false)));
            if (both == 0 || both * sequences < blocks * (sequences - 1)) break;
            blocks = both;
            sequences++;
        }
        const int own = sequences > 1 ? blocks : 0;
        for (int i = b; i < b + sequences; i++) {
            parts[i] = part(i, 1, own, columns[i], true);
            if (own) shared[i] = count;
        }
        if (own) parts[count++] = part(b, sequences, 0, own, false);
        return sequences;
    }

    Part part(int b, int sequences, int first, int last, bool exact) const {
        Part made = {b, sequences, first, last, sequences * rows_of_sequence(call), 0, 0, 1, 0, exact, 0};
        made.chunks = (made.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
        made.chunk_rows = padded((made.rows + made.chunks - 1) / made.chunks);
        made.chunks = (made.rows + made.chunk_rows - 1) / made.chunk_rows;
        return made;
    }
    // Rows that share unpacked codes cost about as much as `MAX_ROWS`.
    static int padded(int rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS * MAX_ROWS; }

    // About 16 tasks for every thread, so that none waits long for the last.
    void set_tasks() {
        auto cost = [](const Part& part) { return (int64_t)(part.last - part.first) * padded(part.rows); };
        int64_t all = 0;
        for (int i = 0; i < count; i++) all += cost(parts[i]);
        for (int i = 0; i < count; i++) {
            Part& part = parts[i];
            const int blocks = part.last - part.first, heads = call.kv_heads * part.chunks;
            const int64_t wanted = 16 * std::max(call.threads, 1) * cost(part), each = all * heads;
            const int share = all ? (int)((wanted + each - 1) / each) : 0;
            const int splits = std::max(1, std::min(blocks / 2, share));
            part.blocks = std::max(1, (blocks + splits - 1) / splits);
            part.splits = (blocks + part.blocks - 1) / part.blocks;
            part.first_task = tasks;
            tasks += heads * part.tasks();
            most_rows = std::max(most_rows, std::min(part.rows, part.chunk_rows));
        }
    }
};

// One task by its number.
struct Place {
    const Part& part;
    int g, chunk, split;  // the last split of a part with exact tokens has these

    Place(const Plan& plan, int task) : part(find(plan, task)) {
        const int number = task - part.first_task, head = number / part.tasks();
        g = head / part.chunks;
        chunk = head % part.chunks;
        split = number % part.tasks();
    }
    static const Part& find(const Plan& plan, int task) {
        return *(std::upper_bound(plan.parts, plan.parts + plan.count, task,
                                  [](int number, const Part& part) { return number < part.first_task; }) -
                 1);
    }
    bool exact() const { return split == part.splits; }
    int first_block() const { return part.first + split * part.blocks; }
    int last_block() const { return std::min(first_block() + part.blocks, part.last); }
    int rows() const { return std::min(part.chunk_rows, part.rows - chunk * part.chunk_rows); }
};

}  // namespace
