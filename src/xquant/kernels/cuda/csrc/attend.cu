// Attention of a few queries over packed keys and values: one launch for a layer.
//
// Grid: splits, sequences times key/value heads, runs of ROWS rows. The first split of a head reads the tokens that
// are kept as they are, each of the others a run of blocks. The last of them to end combines all:
//
//     m = max m_i     l = sum exp(m_i - m) l_i     out = sum exp(m_i - m) o_i / l
//
// and 0 where no token was seen. A learned sink s of a query head adds exp(s - m) to l.
//
// It is compiled for HEAD, BLOCK, KEY_BITS, VALUE_BITS, KEY_PER_TOKEN, ROTATE (keys are kept before RoPE), STATE,
// TILES (of four rows), PAGED, and PLAIN (no mask, no sinks, no soft-capping). The reference is attention over what the store decodes, from which it differs by roundings of
// keys and of levels to fp16.
constexpr int WARPS = 8, ROWS = 4 * TILES, STAGES = 2;
#include "blocks.h"
#include "exact.h"

constexpr int JOINT_BYTES = WARPS * ROWS * (HEAD + 4) * 4;
constexpr int NEEDED_BYTES = sizeof(Working) > JOINT_BYTES ? sizeof(Working) : JOINT_BYTES;
EXPORTED int working_bytes = NEEDED_BYTES;  // of shared memory, that a launch has to give

// Queries over their largest pair, so that halves hold them, and these: by one warp for all.
DEVICE void scale_queries(const Arguments& a, const Place& at, Scaled& to) {
    const int sequence = PAGED ? a.newest[4 * at.b] : at.b;
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        const Row row = row_of(a, at.head, at.first_row + 4 * k + at.g / 2);
        const int64 from = sequence * a.query.batch + row.head * a.query.head + row.place * a.query.token;
        float unit = 0, all = 0, low[QUADS][4], high[QUADS][4];
#pragma unroll
        for (int e = 0; e < QUADS; e++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int64 c = from + channel_of(e, at.t) + i;
                const float x = low[e][i] = row.there ? state_at(a.query.data, c) * a.scaling : 0;
                const float y = high[e][i] = row.there ? state_at(a.query.data, c + PAIRS) * a.scaling : 0;
                unit = larger(unit, x * x + y * y);
                all += x + y;
            }
        for (int mask = 1; mask < 4; mask *= 2) {
            unit = larger(unit, from_other(unit, mask));
            all += from_other(all, mask);
        }
        unit = root(unit);
        const float share = unit > 0 ? 1 / unit : 0;
#pragma unroll
        for (int e = 0; e < QUADS; e++) {
            floats4* query = &to.query[k][e][0][at.lane];
            query[0] = {low[e][0] * share, low[e][1] * share, low[e][2] * share, low[e][3] * share};
            query[32] = {high[e][0] * share, high[e][1] * share, high[e][2] * share, high[e][3] * share};
        }
        if (at.t == 0 && at.g % 2 == 0) to.unit[k][at.g / 2] = unit, to.sum[k][at.g / 2] = all;
    }
}

// One split of the rows from `first_row` on, in the memory of the program.
DEVICE void attend_blocks(const Arguments& a, Place& at, char* memory, float* joint, float* stats) {
    Working& working = *(Working*)memory;
    Ring* ring = working.ring[at.warp];
    Raw& raw = working.raw[at.warp];
    Tokens tokens;
    for (int i = 0; i < 2; i++) {
        tokens.place[i] = token_of(at.in_block, at.g + 8 * i);
        tokens.key[i] = key_place(at.t, i, at.g);
    }
    if (ROTATE)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < QUADS; e++) {
                const int from = tokens.place[i] * PAIRS + channel_of(e, at.t);
                const floats4 cos = *(const floats4*)(a.within_cos + from), sin = *(const floats4*)(a.within_sin + from);
                tokens.cos[i][e][0] = to_halves(cos.x, cos.z), tokens.cos[i][e][1] = to_halves(cos.y, cos.w);
                tokens.sin[i][e][0] = to_halves(sin.x, sin.z), tokens.sin[i][e][1] = to_halves(sin.y, sin.w);
            }
    const Copies copies = copies_of(at);
    // The warp's i-th block is number `at.own + i TOGETHER` of the split. Its codes are fetched STAGES - 1 blocks ahead,
    // from addresses that lanes hold for a group: lane l < 8 of the keys of one block, lane l + 8 of its values.
    const int last = at.first + at.count - 1;
    auto within = [&](int column) { return column < last ? column : last; };
    auto codes_from = [&](int start) {
        const int column = at.first + start + (STAGES - 1) * TOGETHER + at.lane % GROUP;
        return block_at(a, at, at.lane / GROUP & 1, within(column)).codes;
    };
    auto column_of = [&](int i) { return at.first + at.own + i * TOGETHER; };
    auto fetch_block = [&](int i, int place, int64 keys, int64 values) {
        if (column_of(i) <= last) fetch(at, copies, keys, values, ring[place]);
        end_of_copies();
    };
    // Scales and all else that is the same for the tokens of a block: of the block that this warp prepares in each group,
    // fetched a group ahead, from addresses that are loaded another group ahead.
    auto mine = [&](int start) { return within(at.first + start + at.warp); };
    auto has_one = [&](int start) { return start + at.warp < at.count; };
    if (at.lane < 2 * GROUP) working.codes[at.warp][at.lane / GROUP][at.lane % GROUP] = codes_from(0);
    fetch_raw(a, at, mine(0), range_at(a, at, mine(0)), raw);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        fetch_block(i, i, block_at(a, at, 0, within(column_of(i))).codes, block_at(a, at, 1, within(column_of(i))).codes);
    int64 range = range_at(a, at, mine(GROUP));
    if (at.warp == 0) scale_queries(a, at, working.scaled);
    wait_for_copies<0>();
    barrier();
    if (has_one(0)) prepare(a, at, working.scaled, raw, mine(0), working.prepared[0][at.warp]);
    warp_barrier();
    if (has_one(GROUP)) fetch_raw(a, at, mine(GROUP), range, raw);
    range = range_at(a, at, mine(2 * GROUP));
    Sums found;
    float factor[TILES], sum_of_query[TILES];
    int64 mask_row[TILES];
#pragma unroll
    for (int k = 0; k < TILES; k++) {
        factor[k] = 4 * working.scaled.unit[k][at.t];
        sum_of_query[k] = working.scaled.sum[k][at.t];
        mask_row[k] = at.b * a.mask_batch + row_of(a, at.head, at.first_row + 4 * k + at.t).place * a.mask_query;
        found.maximum[k] = LOWEST;
        found.total[k] = found.rest[k] = 0;
#pragma unroll
        for (int m = 0; m < HEAD / 16; m++)
            found.values[k][m][0] = found.values[k][m][1] = found.values[k][m][2] = found.values[k][m][3] = 0;
    }
    int place = 0, free = STAGES - 1;  // in the ring: of the block that is read, and of the one that is fetched
    auto behind = [](int place) { return place + 1 == STAGES ? 0 : place + 1; };
    const bool sinks = !PLAIN && a.sinks.data != 0;
    for (int start = 0; start < at.count; start += GROUP) {
        const int half = start / GROUP % 2;
        wait_for_copies<0>();
        warp_barrier();
        barrier();  // these are prepared, and nobody reads the ones before any more
        const int64 next_codes = codes_from(start + GROUP);
        if (has_one(start + GROUP))
            prepare(a, at, working.scaled, raw, mine(start + GROUP), working.prepared[1 - half][at.warp]);
        warp_barrier();
        if (has_one(start + 2 * GROUP)) fetch_raw(a, at, mine(start + 2 * GROUP), range, raw);
        range = range_at(a, at, mine(start + 3 * GROUP));
        for (int i = start / TOGETHER; i < (start + GROUP) / TOGETHER; i++) {
            if (column_of(i) > last) break;
            const int number = column_of(i) - at.first - start;
            fetch_block(i + STAGES - 1, free, working.codes[at.warp][0][number], working.codes[at.warp][1][number]);
            const Prepared& block = working.prepared[half][number];
            const Ring& now = ring[place];
            wait_for_copies<STAGES - 1>();
            warp_barrier();
            float score[TILES][4];
            score_block(at, block, now, tokens, score);
            const floats2 one = block.value[tokens.place[0]], other = block.value[tokens.place[1]];
            word b0[TILES], b1[TILES];
#pragma unroll
            for (int k = 0; k < TILES; k++) {
                float s[2] = {(score[k][0] + score[k][1]) * factor[k], (score[k][2] + score[k][3]) * factor[k]};
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int token = tokens.place[i];
                    if (KEY_PER_TOKEN) s[i] = s[i] * block.key[token].x + sum_of_query[k] * block.key[token].y;
                    if (!PLAIN && token < block.length) {
                        s[i] = masked(a, mask_row[k], block.begin + token, capped(a, s[i]));
                        if (sinks && is_sink(a, at.b, block.begin + token)) s[i] = NOTHING;
                    }
                    if (token >= block.length) s[i] = NOTHING;
                }
                float highest = larger(s[0], s[1]);
                highest = larger(highest, from_other(highest, 4));
                highest = larger(highest, from_other(highest, 8));
                highest = larger(highest, from_other(highest, 16));
                if (any_of(highest > found.maximum[k])) {
                    const float raised = larger(found.maximum[k], highest), shrink = exp_of(found.maximum[k], raised);
                    found.maximum[k] = raised;
                    found.total[k] *= shrink, found.rest[k] *= shrink;
#pragma unroll
                    for (int m = 0; m < HEAD / 16; m++)
#pragma unroll
                        for (int j = 0; j < 4; j++) found.values[k][m][j] *= shrink;
                }
                const float w0 = exp_of(s[0], found.maximum[k]), w1 = exp_of(s[1], found.maximum[k]);
                found.total[k] += w0 + w1;
                found.rest[k] += w0 * one.y + w1 * other.y;
                share_weights(at, w0 * one.x, w1 * other.x, b0[k], b1[k]);
            }
            add_values(at, now, b0, b1, found);
            warp_barrier();  // all have read what is fetched next
            place = behind(place), free = behind(free);
        }
        if (at.lane < 2 * GROUP) working.codes[at.warp][at.lane / GROUP][at.lane % GROUP] = next_codes;
        warp_barrier();
    }
    wait_for_copies<0>();
    barrier();
#pragma unroll
    for (int k = 0; k < TILES; k++) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
            found.total[k] += from_other(found.total[k], mask);
            found.rest[k] += from_other(found.rest[k], mask);
        }
        const int row = at.warp * ROWS + 4 * k + at.t;
        if (at.g == 0) stats[2 * row] = found.maximum[k], stats[2 * row + 1] = found.total[k];
#pragma unroll
        for (int m = 0; m < HEAD / 16; m++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float* sum = &found.values[k][m][2 * j];
                joint[row * HEAD + m * 16 + 2 * at.g + j] = sum[0] + sum[1] / LOW + found.rest[k];
            }
    }
}

// The share of each of `count` partial results in a row, in `shares` a step of ROWS apart, its total behind them, and its
// maximum. `stats` has the maximum and the total of each, a step apart. By one warp.
DEVICE float share_out(const float* stats, int64 step, int count, float* shares, float sink, bool has_sink) {
    const int lane = thread() % 32;
    float maximum = LOWEST, total = 0;
    for (int i = lane; i < count; i += 32) maximum = larger(maximum, stats[i * step]);
    for (int mask = 16; mask; mask /= 2) maximum = larger(maximum, from_other(maximum, mask));
    for (int i = lane; i < count; i += 32) {
        const float share = exp_of(stats[i * step], maximum);
        total += share * stats[i * step + 1];
        shares[i * ROWS] = share;
    }
    for (int mask = 16; mask; mask /= 2) total += from_other(total, mask);
    if (has_sink && total > 0) total += exp_of(sink, maximum);
    if (lane == 0) shares[count * ROWS] = total;
    return maximum;
}
DEVICE float combined(const float* sums, int64 step, const float* shares, int count) {
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++) sum += shares[i * ROWS] * sums[i * step];
    return sum;
}

KERNEL(WARPS, TILES == 1 ? 2 : 1) attend(ARGUMENT Arguments a) {
    SHARED_MEMORY(memory);
    Place at;
    at.b = program(1) / a.kv_heads, at.head = program(1) % a.kv_heads, at.first_row = program(2) * ROWS;
    at.warp = thread() / 32, at.lane = thread() % 32, at.g = at.lane / 4, at.t = at.lane % 4;
    at.own = at.warp / BLOCK_WARPS, at.in_block = at.warp % BLOCK_WARPS;
    at.limit = PAGED ? a.limits[at.b] : a.limit;
    at.columns = PAGED ? (at.limit + BLOCK - 1) / BLOCK : a.columns;
    at.stride = PAGED ? 2 : (int64)(programs(1) / a.kv_heads) * a.columns;
    const int split = program(0), others = programs(0) > 1 ? programs(0) - 1 : 1;
    int each = (at.columns + others - 1) / others;
    if (each < 1) each = 1;
    at.first = (split - 1) * each;
    at.count = at.columns - at.first < each ? at.columns - at.first : each;
    const int splits = 1 + (at.columns + each - 1) / each;
    if (split >= splits) return;
    float *joint = (float*)memory, *stats = joint + WARPS * ROWS * HEAD, *shares = stats + 2 * WARPS * ROWS;
    if (split == 0)
        attend_exact(a, at.b, at.head, at.first_row, at.limit, joint, stats);
    else
        attend_blocks(a, at, memory, joint, stats);
    barrier();
    const int rows = a.group_heads * a.queries;
    if (at.warp < ROWS && at.first_row + at.warp < rows) {
        const float maximum = share_out(stats + 2 * at.warp, 2 * ROWS, WARPS, shares + at.warp, 0, false);
        float* to = a.maxima + 2 * split_row(a, split, at.first_row + at.warp);
        if (at.lane == 0) to[0] = maximum, to[1] = shares[WARPS * ROWS + at.warp];
    }
    barrier();
    for (int i = thread(); i < ROWS * HEAD; i += 32 * WARPS) {
        const int row = i / HEAD;
        if (at.first_row + row >= rows) break;
        const float sum = combined(joint + i, ROWS * HEAD, shares + row, WARPS);
        a.sums[split_row(a, split, at.first_row + row) * HEAD + i % HEAD] = sum;
    }
    // The last program of these rows combines what all have left.
    int* counter = a.arrived + program(1) * programs(2) + program(2);
    int* before = (int*)memory;
    barrier();
    if (thread() == 0) *before = arrive(counter);
    barrier();
    if (*before != splits - 1) return;
    see_others();
    if (PAGED && program(2) == 0) append(a, at.b, at.head);
    const int sequence = PAGED ? a.newest[4 * at.b] : at.b;
    const int64 step = (int64)programs(1) * rows;
    shares = joint + 4;
    if (at.warp < ROWS && at.first_row + at.warp < rows) {
        const Row row = row_of(a, at.head, at.first_row + at.warp);
        const float sink = a.sink_logits ? a.sink_logits[row.head] : 0;
        share_out(a.maxima + 2 * split_row(a, 0, at.first_row + at.warp), 2 * step, splits, shares + at.warp, sink,
                  a.sink_logits != 0);
    }
    barrier();
    for (int i = thread(); i < ROWS * HEAD; i += 32 * WARPS) {
        const int c = i % HEAD, number = i / HEAD;
        const Row row = row_of(a, at.head, at.first_row + number);
        if (!row.there) break;
        const float* from = a.sums + split_row(a, 0, at.first_row + number) * HEAD + c;
        const float total = shares[splits * ROWS + number];
        const float sum = total > 0 ? combined(from, step * HEAD, shares + number, splits) / total : 0;
        put_state(a.out.data, sequence * a.out.batch + row.head * a.out.head + row.place * a.out.token + c, sum);
    }
    if (thread() == 0) *counter = 0;
}
