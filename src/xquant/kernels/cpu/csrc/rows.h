// The rows of a task: the query heads of one key/value head times queries, of one sequence or of several next to each
// other. The rows of a sequence follow those of the one before it; within it they are [group heads][queries].
#pragma once
#include "elements.h"
#include "workspace.h"

namespace {

struct Row {
    int32_t b, head, query;  // the sequence, the query head among all, the query
};

struct Rows {
    const Row* of;
    int count;

    static size_t bytes(int count) { return sizeof(Row) * count + 64; }

    // `count` rows of key/value head g from number `first` on, where row 0 is the first of sequence b.
    Rows(const xq_attend& call, int b, int g, int first, int count, Workspace& workspace) : count(count) {
        Row* rows = workspace.take<Row>(count);
        for (int i = 0; i < count; i++) {
            const int head = (first + i) / call.queries;
            rows[i] = {b + head / call.group_heads, g * call.group_heads + head % call.group_heads,
                       (first + i) % call.queries};
        }
        of = rows;
    }
    const Row& operator[](int r) const { return of[r]; }
};

inline int rows_of_sequence(const xq_attend& call) { return call.group_heads * call.queries; }

// Where a sequence is in query and out.
inline int64_t batch_of(const xq_attend& call, int b) { return call.query_batches ? call.query_batches[b] : b; }

// Loads the queries [rows, width], times `scaling`, with zeros behind the channels of a head. `from`: those of all.
inline void load_queries(const xq_attend& call, const void* from, const Rows& rows, int width, float* to) {
    const int D = call.head_size;
    for (int r = 0; r < rows.count; r++) {
        const Row& row = rows[r];
        const int64_t at = batch_of(call, row.b) * call.query_batch + row.head * call.query_head;
        float* query = to + (size_t)r * width;
        load_row(from, call.dtype, at + row.query * call.query_token, D, query);
        std::fill(query + D, query + width, 0.0f);
    }
    for (int i = 0; i < rows.count * width; i++) to[i] *= call.scaling;
}

// What the mask says of the tokens from `start` on to one row.
struct MaskRow {
    const xq_attend& call;
    int64_t at;
    MaskRow(const xq_attend& call, const Row& row, int start)
        : call(call), at(row.b * call.mask_batch + row.query * call.mask_query + start * call.mask_token) {}

    float operator[](int t) const { return mask_at(call.mask, call.mask_dtype, at + t * call.mask_token); }
    // The bools, where they follow each other: then a loop over them takes many at once.
    const uint8_t* bools() const {
        return call.mask_dtype == XQ_BOOL && call.mask_token == 1 ? (const uint8_t*)call.mask + at : nullptr;
    }
    void add_to(float* scores, int count) const {
        if (const uint8_t* seen = bools())
            for (int t = 0; t < count; t++) scores[t] = seen[t] ? scores[t] : -INFINITY;
        else
            for (int t = 0; t < count; t++) scores[t] += (*this)[t];
    }
    bool shows_any(int count) const {
        int found = 0;
        if (const uint8_t* seen = bools())
            for (int t = 0; t < count; t++) found |= seen[t];
        else
            for (int t = 0; t < count && !found; t++) found = (*this)[t] != -INFINITY;
        return found;
    }
};

// Whether any row sees any of `count` tokens from `start` on.
inline bool any_seen(const xq_attend& call, const Rows& rows, int start, int count) {
    bool found = !call.mask;
    for (int r = 0; r < rows.count && !found; r++) found = MaskRow(call, rows[r], start).shows_any(count);
    return found;
}

}  // namespace
