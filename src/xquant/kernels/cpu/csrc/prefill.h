// Causal attention over states that lie in memory as they are: of the newest tokens of some sequences, as when a prompt
// is read. A sequence's keys and values are packed into panels once for each key/value head (products.h); then threads
// take blocks of its queries. Tokens are read `TOKENS_AT_A_TIME`, in an online softmax. What a query gets depends on
// no other query, and not on how a prompt is cut.
#pragma once
#include <algorithm>

#include "online_softmax.h"
#include "products.h"
#include "workspace.h"

namespace {

constexpr int TOKENS_AT_A_TIME = 256;
constexpr int MOST_ROWS = 48;  // of a block of queries times query heads
constexpr size_t PACKED_BYTES = (size_t)32 << 20;  // of heads that are packed before they are read, unless one has more

inline int up_to_multiple(int size, int of) { return (size + of - 1) / of * of; }

// The states of one sequence and key/value head in panels.
template <class Numbers>
struct PackedStates {
    static constexpr int STEP = Numbers::STEP;
    uint32_t *const keys, *values;
    const int lines, tokens;  // of a panel of keys; whole panels of tokens

    static int channels(const xq_prefill& call) { return whole_vectors(call.head_size); }
    static int lines_of(const xq_prefill& call) { return up_to_multiple(call.head_size, 16 * STEP) / STEP; }
    static int whole_tokens(const xq_chunk& chunk) { return up_to_multiple(chunk.tokens, PANEL_COLUMNS); }
    static size_t bytes(const xq_prefill& call, const xq_chunk& chunk) {
        return (size_t)whole_tokens(chunk) * (lines_of(call) + channels(call) / STEP) * 4;
    }
    PackedStates(const xq_prefill& call, const xq_chunk& chunk, uint8_t* memory)
        : keys((uint32_t*)memory), lines(lines_of(call)), tokens(whole_tokens(chunk)) {
        values = keys + (size_t)tokens * lines;
    }

    // Packs the tokens of one panel.
    template <int DTYPE>
    void pack(const xq_prefill& call, const xq_chunk& chunk, int g, int panel) const {
        const int first = panel * PANEL_COLUMNS, D = call.head_size;
        uint32_t* to = keys + (size_t)first * lines;
        for (int column = 0; column < PANEL_COLUMNS; column += 16)
            for (int line = 0; line < lines; line += 16) {
                Words rows[16];
                for (int i = 0; i < 16; i++) {
                    const int t = first + column + i, c = line * STEP;
                    alignas(64) uint32_t lanes[16] = {};
                    const int64_t at = t * chunk.key_token + g * chunk.key_head + c;
                    if (t < chunk.tokens) Numbers::template lanes<DTYPE>(chunk.key, at, D - c, lanes);
                    rows[i] = load(lanes);
                }
                transpose(rows);
                for (int i = 0; i < 16 && line + i < lines; i++)
                    store(to + (size_t)(line + i) * PANEL_COLUMNS + column, rows[i]);
            }
        for (int from = 0; from < whole_vectors(D); from += PANEL_COLUMNS) {
            const int width = std::min(PANEL_COLUMNS, whole_vectors(D) - from);
            uint32_t* panel_of_values = values + (size_t)from * (tokens / STEP);
            for (int t = first; t < first + PANEL_COLUMNS; t += STEP)
                for (int c = 0; c < width; c += 16) {
                    int64_t rows[STEP];
                    for (int i = 0; i < STEP; i++)
                        rows[i] = t + i < chunk.tokens
                            ? (t + i) * chunk.value_token + g * chunk.value_head + from + c : -1;
                    Numbers::template line<DTYPE>(chunk.value, rows, std::min(16, D - from - c),
                                                  panel_of_values + (size_t)(t / STEP) * width + c);
                }
        }
    }
};

// A block of queries of one sequence with all query heads of a key/value head. Rows are [queries][heads].
template <class Numbers>
struct QueryBlock {
    static constexpr int STEP = Numbers::STEP;
    const xq_prefill& call;
    const xq_chunk& chunk;
    const PackedStates<Numbers>& states;
    const int g, first, queries, rows;  // the first query; rows are filled up to `ROWS_AT_ONCE`
    uint32_t *query, *weights;
    float* scores;
    OnlineSoftmax softmax;

    static int queries_of(const xq_prefill& call) { return std::max(1, MOST_ROWS / call.group_heads); }
    static int most_rows(const xq_prefill& call) {
        return up_to_multiple(queries_of(call) * call.group_heads, ROWS_AT_ONCE);
    }
    static size_t bytes(const xq_prefill& call) {
        const size_t rows = most_rows(call), D = whole_vectors(call.head_size);
        return 4 * rows * (PackedStates<Numbers>::lines_of(call) + 2 * TOKENS_AT_A_TIME) +
               4 * OnlineSoftmax::floats(rows, D) + 4 * 64;
    }

    QueryBlock(const xq_prefill& call, const xq_chunk& chunk, const PackedStates<Numbers>& states, int g, int first,
               Workspace& workspace)
        : call(call), chunk(chunk), states(states), g(g), first(first),
          queries(std::min(queries_of(call), chunk.queries - first)),
          rows(up_to_multiple(queries * call.group_heads, ROWS_AT_ONCE)),
          query(workspace.take<uint32_t>((size_t)rows * states.lines)),
          weights(workspace.take<uint32_t>((size_t)rows * TOKENS_AT_A_TIME)),
          scores(workspace.take<float>((size_t)rows * TOKENS_AT_A_TIME)),
          softmax(workspace.take<float>(OnlineSoftmax::floats(rows, whole_vectors(call.head_size))), rows,
                  whole_vectors(call.head_size)) {
        softmax.clear();
    }

    // How many tokens a row sees.
    int seen(int row) const { return chunk.tokens - chunk.queries + first + row / call.group_heads + 1; }

    template <int DTYPE>
    void attend() {
        load_queries<DTYPE>();
        const int D = softmax.width, end = std::min(seen(queries * call.group_heads - 1), chunk.tokens);
        for (int from = 0; from < end; from += TOKENS_AT_A_TIME) {
            const int count = up_to_multiple(std::min(TOKENS_AT_A_TIME, end - from), PANEL_COLUMNS);
            multiply<Numbers>(query, states.lines, rows, states.keys + (size_t)from * states.lines,
                              (size_t)PANEL_COLUMNS * states.lines, states.lines, call.scaling, scores, count, count);
            if (call.softcap > 0) soft_cap(scores, rows * count, call.softcap);
            if (from + count > seen(0))
                for (int r = 0; r < rows; r++) hide(r, from, count);
            softmax.update(scores, count);
            uint32_t* lanes = STEP == 1 ? (uint32_t*)scores : weights;
            if (STEP > 1) Numbers::weights(scores, rows * count, lanes);
            const size_t panel_stride = (size_t)PANEL_COLUMNS * (states.tokens / STEP);
            for (int c = 0; c < D; c += PANEL_COLUMNS) {
                const int width = std::min(PANEL_COLUMNS, D - c);
                const uint32_t* panel = states.values + c / PANEL_COLUMNS * panel_stride + (size_t)from / STEP * width;
                multiply<Numbers>(lanes, count / STEP, rows, panel, 0, count / STEP, 0, softmax.sums + c, width, D);
            }
        }
        for (int r = 0; r < queries * call.group_heads; r++) write<DTYPE>(r);
    }

    int head(int row) const { return g * call.group_heads + row % call.group_heads; }
    int64_t token(int row) const { return chunk.first + first + row / call.group_heads; }

    template <int DTYPE>
    void load_queries() {
        for (int r = 0; r < rows; r++) {
            uint32_t* to = query + (size_t)r * states.lines;
            const bool real = r < queries * call.group_heads;
            const int64_t at = real ? token(r) * call.query_token + head(r) * call.query_head : 0;
            for (int line = 0; line < states.lines; line += 16) {
                const int count = real ? call.head_size - line * STEP : 0;
                Numbers::template lanes<DTYPE>(call.query, at + line * STEP, count, to + line);
            }
        }
    }

    void hide(int r, int from, int count) {
        float* row = scores + (size_t)r * count;
        std::fill(row + std::min(std::max(seen(r) - from, 0), count), row + count, -INFINITY);
    }

    template <int DTYPE>
    void write(int r) {
        float total = softmax.running_sum[r];
        if (call.sink_logits) total += std::exp(call.sink_logits[head(r)] - softmax.running_max[r]);
        const Floats inverse = broadcast_float(1 / total);
        const int64_t at = token(r) * call.out_token + head(r) * call.out_head;
        const float* sums = softmax.sums + (size_t)r * softmax.width;
        for (int c = 0; c < call.head_size; c += 16)
            store_as<DTYPE>(call.out, at + c, load_floats(sums + c) * inverse, call.head_size - c);
    }
};

template <class Numbers, int DTYPE>
inline int prefill_as(const xq_prefill& call) {
    using States = PackedStates<Numbers>;
    static thread_local Workspace packed;
    const int heads = call.count * call.kv_heads, each = QueryBlock<Numbers>::queries_of(call);
    int failed = 0;
    for (int first = 0, last; first < heads; first = last) {
        size_t bytes = 0;
        for (last = first; last < heads; last++) {
            const size_t more = States::bytes(call, call.chunks[last / call.kv_heads]);
            if (last > first && bytes + more > PACKED_BYTES) break;
            bytes += more;
        }
        if (!packed.reserve(bytes)) return XQ_NO_MEMORY;
        uint8_t* const base = packed.base;  // of this thread
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed)
        {
            static thread_local Workspace workspace;
            const bool ready = workspace.reserve(QueryBlock<Numbers>::bytes(call));
            failed += !ready;
            for (const bool packing : {true, false}) {
                uint8_t* memory = base;
                for (int number = first; number < last; number++) {
                    const xq_chunk& chunk = call.chunks[number / call.kv_heads];
                    const int g = number % call.kv_heads;
                    const States states(call, chunk, memory);
                    memory += States::bytes(call, chunk);
                    if (packing) {
#pragma omp for schedule(dynamic) nowait
                        for (int panel = 0; panel < states.tokens / PANEL_COLUMNS; panel++)
                            states.template pack<DTYPE>(call, chunk, g, panel);
                    } else {
                        const int blocks = (chunk.queries + each - 1) / each;
                        // The longest first, so that none is waited for.
#pragma omp for schedule(dynamic) nowait
                        for (int i = 0; i < blocks; i++) {
                            if (!ready) continue;
                            workspace.next = workspace.base;
                            QueryBlock<Numbers>(call, chunk, states, g, (blocks - 1 - i) * each, workspace)
                                .template attend<DTYPE>();
                        }
                    }
                }
#pragma omp barrier
            }
        }
    }
    return failed ? XQ_NO_MEMORY : XQ_DONE;
}

// xq_prefill.
inline int prefill(const xq_prefill& call) {
    switch (call.dtype) {
        case XQ_FLOAT32: return prefill_as<Singles, XQ_FLOAT32>(call);
        case XQ_FLOAT16: return prefill_as<Singles, XQ_FLOAT16>(call);
    }
#ifdef XQ_BF16_PAIRS
    if (has_bf16_pairs()) return prefill_as<Pairs, XQ_BFLOAT16>(call);
#endif
    return prefill_as<Singles, XQ_BFLOAT16>(call);
}

}  // namespace
