// The arguments of a call. kernels/cuda/arguments.py mirrors this file name by name.
//
// Letters: B sequences, t newest tokens of each, H query heads, G key/value heads of size D, T tokens; n tokens of a
// block. Where PAGED, sequences are an engine's (docs/architecture.md): they have blocks in pages, and lengths of their
// own that lie in the device's memory. Those of a cache have one length, and numbers say it.
#pragma once
#include "device.h"

struct Heads {  // [B, heads, t, D], strides by elements; of an engine rows of all sequences [T, heads, D]
    const void* data;
    int64 batch, head, token;
};

struct Exact {  // keys beside values that are kept as they are: rows [B, t, 2 G D]; of an engine rings, or slots
    const void* data;
    int64 row, token;
    const float *cos, *sin;  // [B, t, D / 2], where keys are kept before RoPE and the cache rotates them
    const int* columns;      // of sinks [B, t]: where each stands, -1 where it is not sealed yet
    const int* runs;         // of an engine [B, 4]: row, first place, how many, place in the sequence
    int capacity;            // places of a ring; 0 for rows that have an end
    int count;               // of a cache: tokens of each sequence
};

struct Arguments {
    Heads query, key, value, out;
    Exact tail, sinks;
    const void* mask;  // [B, 1, t, T], added to scores or bool; null for none
    int64 mask_batch, mask_query, mask_token;
    const int64* addresses;  // [2, FIELDS, B, columns]: keys, then values; of pages [2, FIELDS, 2], at and step
    const int* table;        // of pages [B, .]: the page of each block; null for a cache
    int64 table_stride;
    const int *begins, *lengths;           // [columns]: the first token of each block, and how many it has
    const float *start_cos, *start_sin;    // [B, columns, D / 2]; of pages [columns, D / 2]
    const float *within_cos, *within_sin;  // [n, D / 2]
    const float* key_offset;               // [G D]: the bias of keys, which codes do without; null for none
    const float* sink_logits;              // [H]: learned scores without a value; null for none
    float *sums, *maxima;                  // [splits, B G, rows, D] and [splits, B G, rows, 2]: workspace
    int* arrived;                          // [B G, row programs]: zeros, and left so
    const int *limits, *newest;            // of pages [B]: tokens read from blocks; [B, 4] as `runs`
    int columns, limit;                    // of a cache
    int past;                              // tokens before the newest, of a cache
    int queries, group_heads, kv_heads;    // t, H / G, G
    int key_group, value_group;            // channels of a range of keys or values per token
    int mask_kind;
    float scaling, softcap, softcap_inverse;
};

constexpr int FIELDS = 8, SCALE = 1, ZERO = 2;  // see kernels/addresses.py
constexpr int BOOLS = 1, FLOATS = 2, BFLOATS = 3, HALVES = 4;  // kinds of masks
constexpr float LOWEST = -1e30f;                               // below every score, yet a number
#define NOTHING as_float(0xff800000u)                          // the score of what is not seen: -infinity
