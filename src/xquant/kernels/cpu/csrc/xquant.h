// The C interface of the kernels. Pointers are to memory of torch tensors; nothing is allocated for the
// caller and nothing is kept. Mirrored by xquant/kernels/native.py.
#pragma once
#include <stdint.h>

enum { XQ_FLOAT32 = 0, XQ_BFLOAT16 = 1, XQ_FLOAT16 = 2, XQ_BOOL = 3 };

// Keys or values of one layer, packed in tiles (docs/format.md). Addresses are one a block of the pool.
typedef struct {
    const uint64_t *codes;
    const uint64_t *scale, *zero;  // fp16
    const uint64_t *outlier_count, *outlier_excess, *outlier_channel;  // null: none
    const float *levels;           // [2^bits], null: affine codes
    const float *offset;           // [G * D] added to what is decoded, null: nothing
    int32_t bits;
    int32_t per_token;  // 1: ranges of `group` channels of a token; 0: of `group` tokens of a channel
    int32_t group;
    int32_t fixed;        // 1: the ranges of all blocks are the ones at scale[0] and zero[0]
    int32_t count_bytes;  // of an entry of outlier_count
    int32_t unused;
} xq_side;

// Tokens kept as they are: rows [B, T, .] with keys and values [G * D] at the two pointers.
typedef struct {
    const void *key, *value;
    const float *cos, *sin;  // [B, T, D / 2], null: keys are rotated already
    const int32_t *column;   // [B, T] columns of the mask, -1: not there; null: `start` + t
    int64_t batch_stride, token_stride, head_stride;  // elements
    int32_t dtype, count, start, causal;  // causal: token t is seen by queries from t on
} xq_exact;

typedef struct {
    xq_side key, value;
    // where the blocks are
    const int64_t *table;    // [B, columns]
    const int32_t *lengths;  // [columns]
    int32_t batch, columns, limit;  // limit: sealed tokens to attend to
    int32_t block;                  // tokens of a block
    // shape
    int32_t kv_heads, head_size, group_heads, queries;  // H = kv_heads * group_heads
    // rotary embedding of packed keys, null: they are rotated already
    const int16_t *turn;                   // by 0 .. block - 1 positions, see xq_turn
    const float *start_cos, *start_sin;    // [B, columns, D / 2]
    // query [B, H, queries, D] and output [B, queries, H, D], contiguous in D
    const void *query;
    void *out;
    int64_t query_batch, query_head, query_token;
    int64_t out_batch, out_token, out_head;
    int32_t dtype, mask_dtype;
    const void *mask;  // [B or 1, queries or 1, tokens], null: all
    int64_t mask_batch, mask_query, mask_token;
    float scaling, softcap;
    xq_exact exact[3];  // sinks, tail, newest
    int32_t exact_count, threads;
} xq_attend;

// Blocks of affine codes, to be sealed or decoded (docs/format.md).
typedef struct {
    void *rows;             // [N, n, C], contiguous in C: read by sealing, written by decoding
    const uint8_t *hidden;  // bools [N, n]: tokens that do not count in ranges of tokens; null: none
    uint8_t *codes;
    uint16_t *scale, *zero;  // fp16
    int64_t block_stride, token_stride;  // of rows, in elements
    int32_t blocks, tokens, channels, dtype;  // N, n, C
    int32_t bits;
    int32_t per_token;      // 1: ranges of `group` channels of a token; 0: of `group` tokens of a channel
    int32_t group;
    int32_t head;           // channels of a head where codes are in tiles; 0: codes are in rows
    int32_t channel_lanes;  // the lanes of a tile are 1: channels, 0: tokens
    int32_t threads;
    float zero_shift, scale_share;  // eta * (2^bits - 1) and 1 - 2 eta; decoding does not read them
} xq_blocks;

// Blocks of ranked codes, to be sealed or decoded (docs/format.md, ranked_seal.h, ranked.h).
typedef struct {
    void *rows;             // [N, n, C], contiguous in C; sealing: fp32
    const uint8_t *hidden;  // bools [N, n]: tokens that do not count in scales, null: none; only for sealing
    uint8_t *scale, *gain;  // [N, ceil(C / 2)], [N, ceil(n / 2)]
    uint8_t *codes;         // [N, code_bytes]
    const int16_t *usual;   // [C]
    const float *sizes;     // of 0 steps; those of -400 to 400 around it
    const float *levels;    // of 1 bit, of 2 bits, ... of 8 bits, one after the other; sealing: the edges between
    const float *borders;   // [400] between the variances of -200, -199, ... steps; only for sealing
    int64_t block_stride, token_stride;  // of rows, in elements
    int64_t code_bytes;
    int32_t counts[8];                   // channels with 1, 2, ... 8 bits
    int32_t blocks, tokens, channels, dtype, threads, unused;
} xq_ranked;

// Scores of queries with keys that are built of packed states [T, C] and turned (rebuild.h).
typedef struct {
    xq_side key;           // codes in tiles of all channels, or of each range of a token
    const int64_t *table;  // [B, columns]
    // weights [G * D, C] of a key: int16 in the order of the tiles (rebuilt.py), times a unit [G * D], and
    // where ranges are per channel times a column [C]
    const int16_t *weights;
    const float *unit, *column;
    const float *totals;     // [G * D, ranges of a token]: sums of the weights of each, where ranges are per token
    const float *bias;       // [G * D], null: 0
    const float *cos, *sin;  // [B, turned, .]
    const float *query;      // [B, G, rows, D]
    float *scores;           // [B, G, rows, columns * block]
    int64_t table_stride, angle_batch, angle_channel;  // elements
    int32_t batch, columns, block, channels;
    int32_t kv_heads, head_size, rows, turned;  // turned: pairs of channels that RoPE turns
    int32_t threads, unused;
} xq_rebuild;

// Sums of packed values by weights that are not negative (rebuild.h).
typedef struct {
    xq_side value;          // codes in tiles of all channels
    const int64_t *table;   // [B, columns]
    const float *weights;   // [B, rows, columns * block]
    float *out;             // [B, rows, channels]
    int64_t table_stride;   // elements
    int32_t batch, columns, block, channels, rows, threads;
} xq_sum;

// Ranked codes of one layer (docs/format.md, ranked.h). Addresses are one a block of the pool.
typedef struct {
    const uint64_t *codes, *scale, *gain;
    const int16_t *usual;   // [C]
    const float *sizes;     // of 0 steps; those of -400 to 400 around it
    const int16_t *levels;  // of 1 bit, of 2 bits, ... of 8 bits, one after the other; 32767 is the highest of each
    const float *reach;     // [8] what the highest is
    int32_t counts[8];      // channels with 1, 2, ... 8 bits
    int32_t block, channels;
} xq_ranks;

// Scores of queries with keys that are built of ranked states and turned (ranked_attend.h). A head has `width`
// channels, D filled up with zeros to a multiple of 32.
typedef struct {
    xq_ranks key;
    const int64_t *table;    // [B, columns]
    const int16_t *weights;  // [C, G, width] of keys, each times the unit [C]; in runs of 32 zipped (ranked_products.py)
    const float *unit;
    const float *mean;       // [G, width], added to keys
    const float *cos, *sin;  // [B, columns * block, .], the first `turned` of each
    const float *query;      // [B, G, rows, width]
    float *scores;           // [B, G, rows, columns * block]
    int64_t table_stride, angle_batch, angle_token;  // elements
    int32_t batch, columns, kv_heads, width;
    int32_t rows, turned;  // turned: pairs of channels that RoPE turns
    int32_t threads, unused;
} xq_ranked_scores;

// Sums of ranked states by weights (ranked_attend.h).
typedef struct {
    xq_ranks value;
    const int64_t *table;   // [B, columns]
    const float *weights;   // [B, rows, columns * block]
    float *out;             // [B, rows, C]
    int64_t table_stride;   // elements
    int32_t batch, columns, rows, threads;
} xq_ranked_sum;
