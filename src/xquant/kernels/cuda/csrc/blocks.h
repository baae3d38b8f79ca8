// Attention over packed blocks.
//
// A warp has 16 tokens of a block, and everything of them: keys are decoded in the registers from which the matrix
// units take them, scored, and forgotten; the weights meet the values as they are packed. Warps meet once in eight
// blocks, where each has prepared one of the next eight for all of them, and at the end.
//
//     score = R(-p) q . R(r) (code scale + zero)         of place r of a block that starts at position p
//     sum   = sum (w scale) (code - center) + sum w (zero + center scale)        of values
//
// Codes lie in tiles (docs/format.md): 16 lanes beside each other, and a word has 32 / bits codes of what is summed
// over: its bytes b = 0 .. 3 in fields f, number f RUN + 4 row + b, RUN = SUMMED bits / 8. Bytes 0 and 2, or 1 and 3,
// become a word of two halves by one mask. A query and what rounding leaves of it are two columns of a product, and so
// are a weight and what rounding leaves of it: a thread has both of a row, in the order of columns of the matrix units.
#pragma once
#include "states.h"

constexpr int GROUP = 8;                                  // blocks that are prepared together
constexpr int BLOCK_WARPS = BLOCK / 16;                   // warps that read one block
constexpr int TOGETHER = WARPS / BLOCK_WARPS;             // blocks that are read at a time
constexpr int QUADS = HEAD / 32;                          // of four pairs of channels, of a thread
constexpr int KEY_ROWS = HEAD * KEY_BITS / 32, VALUE_ROWS = BLOCK * VALUE_BITS / 32;  // of words, of a tile
constexpr int KEY_FIELDS = 8 / KEY_BITS, VALUE_FIELDS = 8 / VALUE_BITS;
constexpr int WARP_ROWS = VALUE_BITS > 2 ? VALUE_BITS / 2 : 1;  // of words of values that have a warp's tokens
constexpr int KEY_WORDS = KEY_ROWS * 16, VALUE_WORDS = WARP_ROWS * HEAD;
constexpr float LOW = 2048;  // what rounding leaves of a weight is multiplied with: weights may be small

struct Prepared {  // of one block
    words4 query[TILES][QUADS][32];
    words4 range[2][QUADS][4];  // scales and zeros of keys, where they are of channels
    floats2 value[BLOCK];       // scale, and zero + center scale
    int begin, length;          // its first token, and how many are read
    floats2 key[KEY_PER_TOKEN ? BLOCK : 1];
};
struct Ring {
    word key[KEY_WORDS], value[VALUE_WORDS];
};
struct Scaled {
    floats4 query[TILES][QUADS][2][32];   // over their units: of a thread's row, four channels, and those behind them
    float unit[TILES][4], sum[TILES][4];  // of each row: its largest pair, and the sum of its channels
};

CONSTANT word both(word half) { return half * 0x10001u; }
CONSTANT word half_of(int whole, int exponent) {  // whole 2^exponent, of a normal number that a half has
    const word sign = whole < 0 ? 0x8000u : 0u;
    int size = whole < 0 ? -whole : whole, power = 10;
    while (size < 1024) size *= 2, power--;
    while (size >= 2048) size /= 2, power++;
    return both(sign | (word)(power + exponent + 15) << 10 | (word)(size - 1024));
}

// A quarter of the codes in a field of bytes 0 and 2, which are 1024 + code 2^(field BITS) in halves first.
template <int BITS>
DEVICE word quarter_code(word from, int field) {
    const word mask = both(((1u << BITS) - 1) << (field * BITS));
    return multiply_add(select_or_1024(from, mask), half_of(1, -2 - field * BITS), half_of(-1, 8 - field * BITS));
}
// The same codes, less their middle, of a field that begins at bit AT.
template <int BITS, int AT>
DEVICE word centered_code(word from) {
    constexpr word unit = half_of(1, -AT), less = half_of(-(1024 >> AT) - (1 << (BITS - 1)), 0);
    return multiply_add(select_or_1024(from, both(((1u << BITS) - 1) << AT)), unit, less);
}

// Where a warp's tokens stand in a block: i < 4 is a run of four, of one field and row of the words of values.
DEVICE int quad_row(int warp, int i) {
    if (VALUE_BITS == 8) return 4 * warp + i;
    if (VALUE_BITS == 4) return 2 * warp + (i & 1);
    return VALUE_BITS == 2 ? warp : warp / 2;
}
DEVICE int quad_field(int warp, int i) {
    if (VALUE_BITS == 8) return 0;
    if (VALUE_BITS == 4) return i / 2;
    return VALUE_BITS == 2 ? i : 4 * (warp & 1) + i;
}
DEVICE int token_of(int warp, int m) {  // the m-th of 16
    return quad_field(warp, m / 4) * (BLOCK * VALUE_BITS / 8) + 4 * quad_row(warp, m / 4) + m % 4;
}
// The first of four channels that RoPE rotates with those HEAD / 2 behind them: quad e of thread t.
DEVICE int channel_of(int e, int t) {
    constexpr int EACH = KEY_FIELDS > 1 ? KEY_FIELDS / 2 : 1;  // quads of a word
    return e % EACH * (HEAD * KEY_BITS / 8) + 4 * (t + 4 * (e / EACH));
}

struct Place {  // of a program, and of a thread in it
    int b, head, warp, lane, g, t;  // g = lane / 4 and t = lane % 4, as the matrix units count
    int columns, limit, first, count;  // blocks of the sequence; tokens read from them; this split's blocks
    int64 stride;                      // between fields of the table of addresses
    int first_row;
    int own, in_block;  // which of TOGETHER blocks this warp reads, and which part of it
};

struct Addresses {
    int64 codes, scale, zero;
};
DEVICE Addresses block_at(const Arguments& a, const Place& at, int segment, int column) {
    const int64* from = a.addresses + segment * FIELDS * at.stride;
    if (PAGED) {
        const int64 page = a.table[at.b * a.table_stride + column];
        return {from[0] + page * from[1], from[2 * SCALE] + page * from[2 * SCALE + 1],
                from[2 * ZERO] + page * from[2 * ZERO + 1]};
    }
    from += (int64)at.b * at.columns + column;
    return {from[0], from[SCALE * at.stride], from[ZERO * at.stride]};
}


// -- what is the same for all tokens of a block --------------------------------------------------------------

// What is fetched of a block before it is prepared: a part for each quarter of a warp.
struct Raw {
    word start[2][PAIRS];                   // cos and sin of R(p), fp32
    word value[2][BLOCK / 2];               // scales and zeros
    word key[2][KEY_PER_TOKEN ? BLOCK / 2 : HEAD / 2];
};

// Where the scales and zeros of a block lie: lane 0 has those of keys, lane 1 zeros of keys, lanes 2 and 3 those of
// values. A lane knows one address, so that it is there before it is wanted.
DEVICE int64 range_at(const Arguments& a, const Place& at, int column) {
    const Addresses found = block_at(a, at, at.lane >> 1 & 1, column);
    const int per = at.lane & 2 ? a.value_group : a.key_group;
    const int64 first = at.lane & 2 || KEY_PER_TOKEN ? at.head * HEAD / per * BLOCK : at.head * HEAD;
    return (at.lane & 1 ? found.zero : found.scale) + 2 * first;
}
DEVICE void fetch_raw(const Arguments& a, const Place& at, int column, int64 range, Raw& to) {
    const int64 start = (PAGED ? column : (int64)at.b * at.columns + column) * PAIRS;
    if (ROTATE)
        for (int i = at.lane * 4; i < 2 * PAIRS; i += 128)
            copy_ahead(&to.start[0][0] + i, (i < PAIRS ? a.start_cos : a.start_sin - PAIRS) + start + i);
    constexpr int KEYS = sizeof to.key / 8, VALUES = sizeof to.value / 8;  // words of scales, or of zeros
#pragma unroll
    for (int field = 0; field < 4; field++) {
        const int64 from = from_lane(range, field);
        const int words = field < 2 ? KEYS : VALUES;
        if (at.lane * 4 < words)
            copy_ahead((field < 2 ? to.key[field] : to.value[field - 2]) + at.lane * 4, (const word*)from + at.lane * 4);
    }
}

DEVICE void prepare(const Arguments& a, const Place& at, const Scaled& scaled, const Raw& raw, int column, Prepared& to) {
    const int t = at.t, lane = at.lane;
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int e = 0; e < QUADS; e++) {
            const floats4 first = scaled.query[k][e][0][lane], behind = scaled.query[k][e][1][lane];
            float low[4] = {first.x, first.y, first.z, first.w}, high[4] = {behind.x, behind.y, behind.z, behind.w};
            if (ROTATE) {
                const floats4 cos = *(const floats4*)(raw.start[0] + channel_of(e, t));
                const floats4 sin = *(const floats4*)(raw.start[1] + channel_of(e, t));
                const float cosine[4] = {cos.x, cos.y, cos.z, cos.w}, sine[4] = {sin.x, sin.y, sin.z, sin.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float x = low[i], y = high[i];
                    low[i] = x * cosine[i] + y * sine[i];
                    high[i] = y * cosine[i] - x * sine[i];
                }
            }
            words4 made = {to_halves(low[0], low[2]), to_halves(high[0], high[2]), to_halves(low[1], low[3]),
                           to_halves(high[1], high[3])};
            if (at.g & 1)  // what rounding leaves
                made = {to_halves(low[0] - low_of(made.x), low[2] - high_of(made.x)),
                        to_halves(high[0] - low_of(made.y), high[2] - high_of(made.y)),
                        to_halves(low[1] - low_of(made.z), low[3] - high_of(made.z)),
                        to_halves(high[1] - low_of(made.w), high[3] - high_of(made.w))};
            to.query[k][e][lane] = made;
        }
    if (!KEY_PER_TOKEN)
        for (int i = lane; i < 2 * QUADS * 4; i += 32) {
            const int which = i / (QUADS * 4), e = i / 4 % QUADS, c = channel_of(e, i % 4);
            const words2 low = *(const words2*)(raw.key[which] + c / 2), high = *(const words2*)(raw.key[which] + (c + PAIRS) / 2);
            word made[4] = {bytes(low.x, low.y, 0x5410), bytes(high.x, high.y, 0x5410), bytes(low.x, low.y, 0x7632),
                            bytes(high.x, high.y, 0x7632)};
            if (which)
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    if (a.key_offset) {
                        const float* more = a.key_offset + at.head * HEAD + c + k / 2 + k % 2 * PAIRS;
                        made[k] = to_halves(low_of(made[k]) + more[0], high_of(made[k]) + more[2]);
                    }
                    made[k] = multiply(made[k], half_of(1, -2));
                }
            to.range[which][e][i % 4] = {made[0], made[1], made[2], made[3]};
        }
    for (int i = lane; i < BLOCK / 2; i += 32) {
        const word scale = raw.value[0][i], zero = raw.value[1][i];
        constexpr float center = 1 << (VALUE_BITS - 1);
        to.value[2 * i] = {low_of(scale), low_of(zero) + center * low_of(scale)};
        to.value[2 * i + 1] = {high_of(scale), high_of(zero) + center * high_of(scale)};
        if (KEY_PER_TOKEN) {
            to.key[2 * i] = {low_of(raw.key[0][i]), low_of(raw.key[1][i])};
            to.key[2 * i + 1] = {high_of(raw.key[0][i]), high_of(raw.key[1][i])};
        }
    }
    if (lane == 0) {
        const int begin = PAGED ? column * BLOCK : a.begins[column];
        const int own = PAGED ? BLOCK : a.lengths[column], left = at.limit - begin;
        to.begin = begin, to.length = own < left ? own : left;
    }
}

// Where a word of keys lies in a ring: those of runs 0 and 1 of the tokens, then of 2 and 3, so that threads that read
// at once find them in different banks.
DEVICE int key_place(int row, int half, int lane) { return row * 16 + ((half * 8 + lane) ^ (row & 2 ? 8 : 0)); }

struct Copies {  // of this thread, 16 bytes each: the first from and to where, by words; the others follow
    int key_from, key_to, value_from, value_to;
};
DEVICE Copies copies_of(const Place& at) {
    constexpr int EACH = WARP_ROWS * 16;  // words of 16 channels
    const int row = at.lane / 4, quad = at.lane % 4, token = token_of(at.in_block, 4 * quad);
    return {at.head * (HEAD * BLOCK * KEY_BITS / 32) + token / 16 * KEY_WORDS + row * 16 + token % 16,
            key_place(row, quad / 2, quad % 2 * 4),
            at.head * (HEAD * BLOCK * VALUE_BITS / 32) + at.lane * 4 / EACH * (VALUE_ROWS * 16) +
                quad_row(at.in_block, 0) * 16 + at.lane * 4 % EACH,
            at.lane * 4};
}
DEVICE void fetch(const Place& at, const Copies& of, int64 key_codes, int64 value_codes, Ring& to) {
    const word* keys = (const word*)key_codes + of.key_from;
    const word* values = (const word*)value_codes + of.value_from;
    constexpr int STEP = 128 / (WARP_ROWS * 16) * (VALUE_ROWS * 16);
#pragma unroll
    for (int i = 0; i < KEY_WORDS; i += 128)
        if (KEY_WORDS >= 128 || at.lane * 4 < KEY_WORDS) copy_ahead(&to.key[of.key_to + i], keys + i);
#pragma unroll
    for (int i = 0; i < VALUE_WORDS; i += 128)
        if (VALUE_WORDS >= 128 || at.lane * 4 < VALUE_WORDS)
            copy_ahead(&to.value[of.value_to + i], values + i / 128 * STEP);
}

// -- a block -------------------------------------------------------------------------------------------------

struct Sums {  // of one warp
    float maximum[TILES], total[TILES], rest[TILES], values[TILES][HEAD / 16][4];
};

struct Tokens {  // the two of this thread
    int place[2], key[2];                     // in a block, and where the first words of their keys lie in a ring
    word cos[2][QUADS][2], sin[2][QUADS][2];  // R(r) of pairs 0 and 2, 1 and 3 of each quad
};

// A quarter of the scores of a thread's two tokens: [0] and [2] of a query, [1] and [3] of what rounding left of it.
DEVICE void score_block(const Place& at, const Prepared& block, const Ring& now, const Tokens& tokens, float (&score)[TILES][4]) {
    const int t = at.t;
    float more[TILES][4];  // of every other product, so that they need not wait for each other
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) score[k][j] = more[k][j] = 0;
#pragma unroll
    for (int e = 0; e < QUADS; e++) {
        constexpr int EACH = KEY_FIELDS > 1 ? KEY_FIELDS / 2 : 1;
        const int field = e % EACH, step = e / EACH * 64;  // four rows of words
        const words4 scale = KEY_PER_TOKEN ? words4{0, 0, 0, 0} : block.range[0][e][t];
        const words4 zero = KEY_PER_TOKEN ? words4{0, 0, 0, 0} : block.range[1][e][t];
        word key[2][4];  // of both tokens: pairs 0 and 2 and those HEAD / 2 behind them, pairs 1 and 3 and theirs
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const word from = now.key[tokens.key[i] + step];
            const word behind = KEY_FIELDS > 1 ? from : now.key[tokens.key[i] + step + KEY_ROWS / 2 * 16];
            constexpr int LATER = KEY_FIELDS > 1 ? KEY_FIELDS / 2 : 0;
            word made[4] = {quarter_code<KEY_BITS>(from, field), quarter_code<KEY_BITS>(behind, field + LATER),
                            quarter_code<KEY_BITS>(from >> 8, field), quarter_code<KEY_BITS>(behind >> 8, field + LATER)};
            if (!KEY_PER_TOKEN) {
                made[0] = multiply_add(made[0], scale.x, zero.x);
                made[1] = multiply_add(made[1], scale.y, zero.y);
                made[2] = multiply_add(made[2], scale.z, zero.z);
                made[3] = multiply_add(made[3], scale.w, zero.w);
            }
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const word low = made[2 * p], high = made[2 * p + 1];
                key[i][2 * p] = low;
                key[i][2 * p + 1] = high;
                if (ROTATE) {
                    const word cos = tokens.cos[i][e][p], sin = tokens.sin[i][e][p];
                    key[i][2 * p] = multiply_add(low, cos, negative(multiply(high, sin)));
                    key[i][2 * p + 1] = multiply_add(high, cos, multiply(low, sin));
                }
            }
        }
#pragma unroll
        for (int k = 0; k < TILES; k++) {
            const words4 query = block.query[k][e][at.lane];
            add_product(score[k], key[0][0], key[1][0], key[0][1], key[1][1], query.x, query.y);
            add_product(more[k], key[0][2], key[1][2], key[0][3], key[1][3], query.z, query.w);
        }
    }
#pragma unroll
    for (int k = 0; k < TILES; k++)
#pragma unroll
        for (int j = 0; j < 4; j++) score[k][j] += more[k][j];
}

// Weights of a thread's two tokens as the right side of a product: of tokens that its part of the left side has.
DEVICE void share_weights(const Place& at, float first, float second, word& b0, word& b1) {
    const word high = to_halves(first, second);
    const word low = to_halves((first - low_of(high)) * LOW, (second - high_of(high)) * LOW);
    const word one = bytes(high, low, 0x5410), other = bytes(high, low, 0x7632);
    const int from = 4 * (4 * (at.t >> 1) + (at.t & 1)) + (at.g >> 1), pick = at.g & 1 ? 0x7632 : 0x5410;
    b0 = bytes(from_lane(one, from), from_lane(one, from + 8), pick);
    b1 = bytes(from_lane(other, from), from_lane(other, from + 8), pick);
}

DEVICE void add_values(const Place& at, const Ring& now, const word (&b0)[TILES], const word (&b1)[TILES], Sums& found) {
    constexpr int AT = VALUE_BITS == 8 ? 0 : VALUE_BITS == 1 ? 2 : 4;  // of the second field, once shifted
    const int t = at.t, row = VALUE_BITS == 4 || VALUE_BITS == 8 ? t >> 1 : 0;
    const int field = VALUE_BITS == 2 ? t >> 1 : VALUE_BITS == 1 ? 4 * (at.in_block & 1) + (t >> 1) : 0;
    const int shift = 8 * (t & 1) + field * VALUE_BITS;
#pragma unroll
    for (int m = 0; m < HEAD / 16; m++) {
        const words2* from = (const words2*)&now.value[(m * WARP_ROWS + row) * 16 + 2 * at.g];
        const word x = from->x >> shift, y = from->y >> shift;  // two channels that are neighbours
        const words2 more = VALUE_BITS == 8 ? from[16] : *from;
        const word x2 = VALUE_BITS == 8 ? more.x >> shift : x, y2 = VALUE_BITS == 8 ? more.y >> shift : y;
        const word a0 = centered_code<VALUE_BITS, 0>(x), a1 = centered_code<VALUE_BITS, 0>(y);
        const word a2 = centered_code<VALUE_BITS, AT>(x2), a3 = centered_code<VALUE_BITS, AT>(y2);
#pragma unroll
        for (int k = 0; k < TILES; k++) add_product(found.values[k][m], a0, a1, a2, a3, b0[k], b1[k]);
    }
}

DEVICE bool is_sink(const Arguments& a, int b, int column) {
    if (PAGED) return column < a.sinks.runs[4 * b + 2];
    for (int i = 0; i < a.sinks.count; i++)
        if (a.sinks.columns[b * a.sinks.count + i] == column) return true;
    return false;
}

struct Working {  // the memory of a program that reads blocks
    Prepared prepared[2][GROUP];
    Scaled scaled;
    Raw raw[WARPS];
    int64 codes[WARPS][2][GROUP];  // where a group's keys and values lie
    Ring ring[WARPS][STAGES];
};
