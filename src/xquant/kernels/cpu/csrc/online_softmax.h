// Online softmax: attention weights from the scores of some tokens at a time. Of every row, a query head times a
// query, it keeps the running maximum m, the running sum l and the weighted sum o of values. Scores s of more tokens
// change them to
//
//     m' = max(m, max s),   p = exp(s - m'),   l' = l exp(m - m') + sum p,   o' = o exp(m - m') + p V
//
// and after the last the output is o / l, which is softmax(s) V over all tokens. So nothing grows with the context,
// and states of different tokens can be combined. The callers add p V.
#pragma once

namespace {

// exp(x) for x <= 0, with a relative error below 4e-6. It is 0 far below 0, and at -infinity.
inline Floats exponential(Floats x) {
    const Floats y = maximum(x * broadcast_float(1.44269504f), broadcast_float(-200));
    const Floats whole = round_to_whole(y), f = y - whole;
    // 2^f is the sum of (f ln 2)^i / i!, up to i = 5.
    const float factors[] = {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 0.240226507f, 0.693147181f, 1.0f};
    Floats sum = broadcast_float(factors[0]);
    for (int i = 1; i < 6; i++) sum = fma(sum, f, broadcast_float(factors[i]));
    return times_power_of_two(sum, whole);
}

inline float highest_of(const float* x, int count) {
    Floats high = broadcast_float(-INFINITY);
    int i = 0;
    for (; i + 16 <= count; i += 16) high = maximum(high, load_floats(x + i));
    float found = i ? highest(high) : -INFINITY;
    for (; i < count; i++) found = std::max(found, x[i]);
    return found;
}

// The state of `rows` rows after some tokens. It does not own its memory.
struct OnlineSoftmax {
    int rows, width;
    float *running_max, *running_sum;  // [rows] m and l; these four arrays are padded to whole vectors
    float* largest_weight;             // [rows] the highest p of the last update
    float* rescale;                    // [rows] exp(m - m') of the last update
    float* sums;                       // [rows, width] o

    static size_t padded(int rows) { return (rows + 15) / 16 * 16; }
    static size_t floats(int rows, int width) { return 4 * padded(rows) + (size_t)(rows * width + 15) / 16 * 16; }
    OnlineSoftmax(float* memory, int rows, int width) : rows(rows), width(width) {
        const size_t step = padded(rows);
        running_max = memory;
        running_sum = running_max + step;
        largest_weight = running_sum + step;
        rescale = largest_weight + step;
        sums = rescale + step;
    }

    void clear() {
        std::fill(running_max, running_max + padded(rows), -INFINITY);
        std::memset(running_sum, 0, sizeof(float) * (floats(rows, width) - padded(rows)));
    }

    // Turns scores [rows, count] into weights p, and updates all but p V. False: all scores are masked, and
    // scores, m, l and o stay as they are.
    bool update(float* scores, int count) {
        std::fill(largest_weight + rows, largest_weight + padded(rows), -INFINITY);
        for (int r = 0; r < rows; r++) largest_weight[r] = highest_of(scores + (size_t)r * count, count);
        if (highest_of(largest_weight, rows) == -INFINITY) return false;
        for (int r = 0; r < rows; r += 16) {
            const Floats before = load_floats(running_max + r), here = load_floats(largest_weight + r);
            const Floats now = maximum(before, here);
            // Where a row is masked so far, this makes its weights 0 and not NaN.
            const Floats base = maximum(now, broadcast_float(-1e30f));
            store_floats(rescale + r, exponential(before - base));
            store_floats(largest_weight + r, exponential(here - base));
            store_floats(running_max + r, now);
        }
        for (int r = 0; r < rows; r++) {
            float* s = scores + (size_t)r * count;
            const float base = std::max(running_max[r], -1e30f);
            const Floats shift = broadcast_float(base);
            Floats added = broadcast_float(0);
            int i = 0;
            for (; i + 16 <= count; i += 16) {
                const Floats p = exponential(load_floats(s + i) - shift);
                store_floats(s + i, p);
                added = added + p;
            }
            float rest = 0;
            for (; i < count; i++) rest += s[i] = std::exp(s[i] - base);
            running_sum[r] = running_sum[r] * rescale[r] + sum(added) + rest;
            if (rescale[r] == 1) continue;
            float* row = sums + (size_t)r * width;
            for (int c = 0; c < width; c++) row[c] *= rescale[r];
        }
        return true;
    }
};

inline void soft_cap(float* scores, int count, float cap) {
    for (int i = 0; i < count; i++) scores[i] = cap * std::tanh(scores[i] / cap);
}

}  // namespace
