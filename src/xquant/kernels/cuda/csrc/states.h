// States, masks and the online softmax. STATE is the dtype of what is not packed.
//
// A row is a query of a query head; a key/value head has as many as query heads times queries. Of each row there
// are a running maximum m of scores s, the total l of exp(s - m), and the sums o of exp(s - m) v.
#pragma once
#include "arguments.h"

#define STATE_FLOAT 0
#define STATE_BFLOAT 1
#define STATE_HALF 2

constexpr int PAIRS = HEAD / 2;
constexpr float LOG2E = 1.4426950408889634f;

DEVICE float state_at(const void* data, int64 at) {
#if STATE == STATE_FLOAT
    return ((const float*)data)[at];
#elif STATE == STATE_BFLOAT
    return as_float((word)((const unsigned short*)data)[at] << 16);
#else
    return low_of(((const unsigned short*)data)[at]);
#endif
}
DEVICE void put_state(const void* data, int64 at, float x) {
#if STATE == STATE_FLOAT
    ((float*)data)[at] = x;
#elif STATE == STATE_BFLOAT
    ((unsigned short*)data)[at] = (unsigned short)bfloat_of(x);
#else
    ((unsigned short*)data)[at] = (unsigned short)(to_halves(x, 0) & 0xffff);
#endif
}

struct Row {  // of the call
    bool there;
    int head, place;  // its query head, and which of the newest tokens it is the query of
};
DEVICE Row row_of(const Arguments& a, int head, int number) {
    return {number < a.group_heads * a.queries, head * a.group_heads + number / a.queries, number % a.queries};
}

struct Run {  // of exact tokens: in which row, from which place, how many, and where the first stands
    int row, first, count, start;
};
DEVICE Run run_of(const int* runs, int b, int count, int start) {
    if (PAGED) return {runs[4 * b], runs[4 * b + 1], runs[4 * b + 2], runs[4 * b + 3]};
    return {b, 0, count, start};
}

DEVICE float capped(const Arguments& a, float score) {
    return a.softcap > 0 ? a.softcap * tanh_of(score * a.softcap_inverse) : score;
}

DEVICE float masked(const Arguments& a, int64 row, int column, float score) {
    const int64 at = row + column * a.mask_token;
    switch (a.mask_kind) {
        case BOOLS: return ((const unsigned char*)a.mask)[at] ? score : NOTHING;
        case FLOATS: return score + ((const float*)a.mask)[at];
        case BFLOATS: return score + as_float((word)((const unsigned short*)a.mask)[at] << 16);
        case HALVES: return score + low_of(((const unsigned short*)a.mask)[at]);
        default: return score;
    }
}

// exp((a - b)), of a number b and of a that may be -infinity
DEVICE float exp_of(float a, float b) { return exp2_of((a - b) * LOG2E); }

// Where a split leaves what it found of a row, and where a row of the call begins in that.
DEVICE int64 split_row(const Arguments& a, int split, int row) {
    return ((int64)split * programs(1) + program(1)) * (a.group_heads * a.queries) + row;
}
