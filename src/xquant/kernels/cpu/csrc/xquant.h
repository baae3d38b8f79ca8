// The C interface of the native kernels. kernels/cpu/library.py mirrors it name by name.
//
// A function is called `xq_<name>_<isa>` and takes one structure. Pointers are to the memory of torch tensors: a
// function allocates nothing for its caller and keeps no pointer after it returns. Beside these, `xq_read_<isa>`
// (isa.h), `xq_isas`, `xq_interface`, `xq_<name>_size` and `xq_rope_table` (native.cpp) take plain
// arguments.
//
// Letters: B sequences, H query heads, G key/value heads, D head size, C channels of a packed row, n tokens of a
// block. A sequence's blocks are the columns of the block table; a block is an id, its index among the addresses.
//
// The sequences of a batch may differ in length: `limits` says how many packed tokens each has. So a cache, whose
// sequences are of one length, and the pages of an engine are read by the same functions.
#pragma once
#include <stdint.h>

enum { XQ_FLOAT32 = 0, XQ_BFLOAT16 = 1, XQ_FLOAT16 = 2, XQ_BOOL = 3 };

// What a function returns.
enum { XQ_DONE = 0, XQ_FOUND_NAN = 1, XQ_NO_MEMORY = 2 };

// The packed keys or values of one layer, in tiles (docs/format.md): element = code * scale + zero, or with a
// codebook level[code] * scale + zero. Each array of addresses has one address a block.
typedef struct {
    const uint64_t *codes;
    const uint64_t *scale, *zero;  // fp16; null zero, of ranges per token: the zero is `zero_scales` times the scale
    const uint64_t *second;        // fp16, what a token of keys [G, n] or a channel of values [G, D] is multiplied
                                   // with, where keys have ranges per channel and values per token; null: 1
    // Outliers: how many a token has, and for each its residual (fp16) and its channel
    const uint64_t *outlier_count, *outlier_excess, *outlier_channel;  // null: none
    const float *levels;  // [2^bits] of a codebook; null: affine codes
    const float *offset;  // [G * D] added to what is decoded; null: nothing
    int32_t bits;
    int32_t per_token;    // 1: ranges of `group` channels of a token; 0: of `group` tokens of a channel
    int32_t group;
    int32_t offline;      // 1: all blocks have the ranges at scale[0] and zero[0], which calibration found
    int32_t count_bytes;  // of one outlier_count
    float zero_scales;
} xq_operand;

// The unquantized tokens of one sequence.
typedef struct {
    int32_t row;    // which of the rows of all sequences are its own
    int32_t first;  // where its first token lies in them
    int32_t count;  // how many there are
    int32_t start;  // the place of the first in the sequence
} xq_run;

// Tokens that are kept unquantized (sinks, tail, newest): rows [B, count, .] that hold keys and values [G * D].
typedef struct {
    const void *key, *value;
    const float *cos, *sin;  // [B, count, pairs]; null: keys are rotated already
    const int32_t *column;   // [B, count] the token's place in the sequence, -1: no such token; null: `start` + t
    const xq_run *runs;      // [B]; null: {b, 0, count, start} of sequence b
    int64_t batch_stride, token_stride, head_stride;  // elements
    int32_t dtype;
    int32_t count;           // the most of a sequence
    int32_t start;
    int32_t causal;          // 1: token t is seen by queries from t on
    int32_t capacity;        // of a ring, whose first token follows its last; 0: there is no end
    int32_t pairs;           // RoPE rotates channels c and c + pairs
} xq_exact;

// xq_attend: attention of a few queries over packed and exact tokens (attention.h).
typedef struct {
    xq_operand key, value;
    const int32_t *table;    // [B, .] ids of blocks
    const int32_t *lengths;  // tokens of a block, n or less where the cache was cropped; null: n
    const int32_t *limits;   // [B] packed tokens to attend to
    int64_t table_stride;    // elements, as all strides
    int32_t batch, block;    // B, n
    int32_t kv_heads, head_size, group_heads, queries;  // H = kv_heads * group_heads
    // RoPE of packed keys; null: they are rotated already
    const int16_t *rope_table;           // R(0) .. R(n - 1), made by xq_rope_table
    const float *start_cos, *start_sin;  // [B, columns, D / 2] R(p) of the position that a block starts at
    int64_t start_batch;          // stride; 0: blocks of a column start at the same position in all sequences
    const void *query;            // [B, H, queries, D], contiguous in D
    const void *turned_query;     // what packed keys are multiplied with, with the strides of query; null: query
    const float *value_turn;      // [D, D] of each head, which sums of packed values are multiplied with; null: none
    int64_t value_turn_head;      // stride
    void *out;                    // [B, queries, H, D], contiguous in D
    const int32_t *query_batches; // [B] where a sequence is in query and out; null: b
    const float *sink_logits;     // [H] one more term of a query head's softmax, without a value; null: none
    int64_t query_batch, query_head, query_token;  // strides
    int64_t out_batch, out_token, out_head;
    int32_t dtype, mask_dtype;  // of query and out; of the mask
    const void *mask;   // [B or 1, queries or 1, tokens]; null: all is seen
    int64_t mask_batch, mask_query, mask_token;
    float scaling, softcap;  // softcap 0: none
    xq_exact exact[3];
    int32_t exact_count, threads;
    int32_t append;     // 1: exact[1] has the newest tokens, which are then written into exact[0], a ring, behind its own
    int32_t unused;
} xq_attend;

// xq_weigh: the softmax between scores with packed keys and sums of packed values (weigh.h).
typedef struct {
    xq_attend attend;         // of its packed keys and values only `block`, `lengths` and `limits` are read
    float *scores;            // [B, G, rows, columns * n], rows = group_heads * queries; the weights are written here
    const float *value_bias;  // [G * D], the part of packed values that is not summed; null: none
    int32_t columns, unused;
} xq_weigh;

// xq_affine_encode and xq_affine_decode: blocks of affine codes (sealing.h).
typedef struct {
    void *rows;               // [N, n, C], contiguous in C: encoding reads it, decoding writes it
    const uint8_t *excluded;  // bools [N, n]: tokens that do not widen ranges of tokens; null: none
    uint8_t *codes;
    uint16_t *scale, *zero;   // fp16
    int64_t block_stride, token_stride;       // of rows, in elements
    int32_t blocks, tokens, channels, dtype;  // N, n, C, of rows
    int32_t bits;
    int32_t per_token;        // as in xq_operand
    int32_t group;
    int32_t head;             // channels of a head where codes are in tiles; 0: codes are in rows
    int32_t channel_lanes;    // lanes of a tile are 1: channels, 0: tokens
    int32_t threads;
    float zero_shift, scale_factor;  // eta * (2^bits - 1) and 1 - 2 eta (quant/affine.py); only encoding reads them
} xq_affine_blocks;

// xq_codebook_encode: blocks of codes of a codebook (codebook_sealing.h). A block has no more than n * C outliers; of
// those memory one after the other is written, as far as there are outliers.
typedef struct {
    xq_affine_blocks blocks;  // rows, codes and ranges; its shift and factor are not read
    const float *levels;      // [2^bits]
    const float *edges;       // [2^bits - 1] in the middle of neighbouring levels
    const uint16_t *offline_scale, *offline_zero;  // fp16 [C] of all blocks, per channel; null: they are found and stored
    const float *lowest, *highest;  // [C] what is outside is an outlier; null: so many of a range are, that is the lowest
    int32_t outliers, last_outliers;  // and the highest, and so many of the last range of a vector
    void *outlier_count;      // [N, n]; null: outliers are not stored
    uint16_t *outlier_excess, *outlier_channel;  // [N, n * C]
    int32_t count_bytes, unused;
} xq_codebook_blocks;

// xq_ranked_encode and xq_ranked_decode: blocks of ranked codes (ranked_sealing.h).
typedef struct {
    void *rows;               // [N, n, C], contiguous in C; encoding wants fp32
    const uint8_t *excluded;  // bools [N, n]: tokens that do not count in scales; null: none; only for encoding
    uint8_t *scale, *gain;    // [N, ceil(C / 2)], [N, ceil(n / 2)]
    uint8_t *codes;           // [N, code_bytes]
    const int16_t *usual;     // [C] the logarithm of a channel's usual scale
    const float *sizes;       // 2^(i / 3) at i = -400 .. 400
    const float *levels;      // [11, 2, 256] of every width's windows (widths.h)
    const float *edges;       // [11, 256] between the levels of widths without a trellis; this and what follows only
    const int16_t *whole_levels;  // [7, 2, 256] of widths with a trellis, in units;                  for encoding
    const float *units;       // [7] of 1
    const float *ends;        // [7] what numbers in units end at
    const float *borders;     // [400] between the variances of -200, -199, ... steps
    const float *costs;       // [C - rests] what channels add to the logarithm of what an error costs; null: nothing
    const float *gain_costs;  // [16] what each gain adds
    const float *cost_borders;  // [15] between the logarithms of costs that count 1, 2, ...
    int64_t block_stride, token_stride;  // of rows, in elements
    int64_t code_bytes;
    int32_t counts[11];       // channels of each width
    int32_t blocks, tokens, channels, dtype, threads;
    int32_t rests;            // the first so many channels have a rest, which is one of the last; only for encoding
    int32_t unused;
} xq_ranked_blocks;

// How RoPE turns keys that are rebuilt (turning.h). Channels of a head are in the order of their pairs.
typedef struct {
    // By pair: [B, rotary_pairs, .] of every token, or with `start_cos` [rotary_pairs, n] of the places of a block
    const float *cos, *sin;
    const float *start_cos, *start_sin;  // [B, columns, rotary_pairs] of the positions that blocks start at; null: none
    // Of slow pairs, those of channels `built` to D; `width`: their number, filled up to the next multiple of 16
    const float *wave, *wave_cos, *wave_sin;      // [waves, n] by place, [waves, width]
    int64_t rope_batch, rope_channel, start_batch;  // of cos and sin, start, in elements
    int32_t rotary_pairs;  // RoPE rotates channels c and c + rotary_pairs
    int32_t built, waves;  // channels of a head that are built, a multiple of 8: all, or those of pairs that are not slow
    int32_t unused;
} xq_turning;

// xq_rebuild_scores: scores of queries with keys that are rebuilt from packed states [T, C] (rebuild.h).
typedef struct {
    xq_operand key;        // codes of states, in tiles of all channels or of those of one range of a token
    const int32_t *table;  // [B, columns]
    const int32_t *limits; // [B] tokens to score, those after their block are not written; null: all
    // The weight [G * D, C] of keys is weights * weight_scale [G * D] and, with ranges per channel,
    // * channel_scale [C], else 1. Rows of a head are in the order of their pairs, also in what follows;
    // kernels/cpu/rebuild.py puts them in the order of the tiles.
    const int16_t *weights;
    const float *weight_scale, *channel_scale;
    const float *weight_sums;  // [G * D, ranges of a token] of the weight, over each range; with ranges per token
    const float *bias;         // [G * D]; null: 0
    xq_turning turning;
    // Of slow pairs: weights [G, pairs, C, 2] * slow_scale [G, 2, width] * channel_scale, filled up with zeros, C to a
    // multiple of 32
    const int16_t *slow_weights;
    const float *slow_scale, *slow_bias;  // [G, 2, width]
    const float *query;        // [B, G, rows, D], scaled, its channels as the model has them
    float *scores;             // [B, G, rows, columns * n]
    int64_t table_stride;      // elements
    int32_t batch, columns, block, channels;
    int32_t kv_heads, head_size, rows, threads;
} xq_rebuild_scores;

// xq_rebuild_sum: sums of packed states by weights that are not negative (rebuild.h).
typedef struct {
    xq_operand value;      // codes in tiles of all channels
    const int32_t *table;  // [B, columns]
    const int32_t *limits; // [B] tokens to sum, the weights of those after their block are not read; null: all
    const float *weights;  // [B, rows, columns * n]
    float *out;            // [B, rows, C]
    int64_t table_stride;  // elements
    int32_t batch, columns, block, channels, rows, threads;
} xq_rebuild_sum;

// Ranked codes of one layer (docs/format.md): element = level * scale * gain.
typedef struct {
    const uint64_t *codes, *scale, *gain;  // one address a block
    const int16_t *usual;         // as in xq_ranked_blocks
    const float *sizes;
    const int16_t *levels;        // [11, 2, 256] of every width's windows (widths.h); 32767 is the highest of each width
    const float *highest_level;   // [11] what that is
    int32_t counts[11];           // channels of each width
    int32_t block, channels, unused;
} xq_ranked_operand;

// xq_ranked_attend: attention of a few queries over packed tokens whose keys and values are products of ranked states,
// and over exact tokens (ranked.h). P: slow pairs of a head.
typedef struct {
    xq_attend attend;            // but for its packed keys and values and their turning
    xq_ranked_operand states;
    xq_ranked_operand more;      // further states, of which only values are products; 0 channels: none
    xq_turning turning;
    // The weight of keys is weights [C, G, .] * weight_scale [C], of a head those channels that are built, 32 of them and
    // more in the order of kernels/cpu/ranked.py
    const int16_t *weights;
    const float *weight_scale;
    const float *mean;           // [G, built] added to keys
    const int16_t *slow_weights; // [C, G, P, 2] those of slow pairs * weight_scale
    const uint8_t *slow_bytes;   // [C, G, (P + 1) / 2, 4] the same of 8 bits: (byte - 128) * slow_units [C, G]
    const float *slow_units;
    const float *slow_norm;      // [G] the highest norm over the channels of slow_weights
    const float *slow_mean;      // [G, 2, width]
    const void *value_weight;    // [G * D, C], C the channels of all states
    const float *value_mean;     // [G * D] added to values
    int32_t value_dtype, unused;
} xq_ranked_attend;

// xq_prefill: causal attention of the newest tokens of some sequences over states as they are (prefill.h).
typedef struct {
    const void *key, *value;  // [tokens, G, D], contiguous in D
    int64_t key_token, key_head, value_token, value_head;  // strides
    int32_t tokens, queries;  // the last `queries` of the tokens attend
    int32_t first, unused;    // where the first of these is in query and out
} xq_chunk;
typedef struct {
    const xq_chunk *chunks;
    const void *query;        // [t, H, D], contiguous in D
    void *out;                // the same
    const float *sink_logits; // as in xq_attend
    int64_t query_token, query_head, out_token, out_head;   // strides
    float scaling, softcap;   // softcap 0: none
    int32_t count, kv_heads, group_heads, head_size;        // of chunks; H = kv_heads * group_heads
    int32_t dtype, threads;   // of states, query and out
} xq_prefill;

// xq_linear: products of rows with packed weights (linear.h, linear/grouped.py).
enum { XQ_LINEAR_PARTS = 4 };
typedef struct {
    const uint8_t *packed;
    const void *bias;  // [outputs]; null: none
    int64_t outputs;
} xq_linear_part;
typedef struct {
    const void *x;     // [rows, channels]
    int32_t rows, channels, bits;   // of codes, 4 or 8
    int32_t dtype, threads, count;  // of x, biases and outputs; of parts
    void *out;                      // [rows, outputs of all parts after each other]
    xq_linear_part parts[XQ_LINEAR_PARTS];
} xq_linear;
