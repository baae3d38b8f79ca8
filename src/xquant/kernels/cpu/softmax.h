// Scores to probabilities, a block of tokens at a time, with running maxima and sums.
#pragma once

namespace {

// e^x for x <= 0, relative error below 3e-7; 0 below -87.
inline Floats exponential(Floats x) {
    const Floats least = broadcast_float(-87.0f);
    Floats clipped = maximum(x, least);
    Words n = to_nearest(clipped * broadcast_float(1.44269504f));
    Floats whole = to_floats(n);
    Floats f = fma(whole, broadcast_float(-0.693359375f), clipped);
    f = fma(whole, broadcast_float(2.12194440e-4f), f);
    const float factors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    Floats y = broadcast_float(factors[0]);
    for (int i = 1; i < 7; i++) y = fma(y, f, broadcast_float(factors[i]));
    return y * power_of_two(n);
}

// What has been attended to so far: the output of every row is sums[row] / total[row].
struct Running {
    int rows, width;
    float *top, *total;  // [rows]
    float* latest;       // [rows] the highest of the last weights
    float *sums;         // [rows, width]

    void clear() {
        for (int n = 0; n < rows; n++) {
            top[n] = -INFINITY;
            total[n] = 0;
        }
        std::memset(sums, 0, sizeof(float) * (size_t)rows * width);
    }

    // Turns the scores [count] of a row to weights, relative to its new maximum. False: all are masked.
    bool weigh(int row, float* scores, int count) {
        float now = -INFINITY;
        int i = 0;
        if (count >= 16) {
            Floats high = broadcast_float(-INFINITY);
            for (; i + 16 <= count; i += 16) high = maximum(high, load_floats(scores + i));
            now = std::fmax(now, highest(high));
        }
        for (; i < count; i++) now = std::fmax(now, scores[i]);
        latest[row] = 0;
        if (now == -INFINITY) return false;
        const float here = now;
        now = std::max(now, top[row]);
        latest[row] = std::exp(here - now);
        float keep = top[row] == -INFINITY ? 0 : std::exp(top[row] - now);
        top[row] = now;
        Floats added = broadcast_float(0), shift = broadcast_float(now), least = broadcast_float(-87.0f);
        float rest = 0;
        for (i = 0; i + 16 <= count; i += 16) {
            Floats x = load_floats(scores + i) - shift;
            Floats p = zero_below(exponential(x), x, least);
            store_floats(scores + i, p);
            added = added + p;
        }
        for (; i < count; i++) rest += scores[i] = std::exp(scores[i] - now);
        total[row] = total[row] * keep + sum(added) + rest;
        if (keep != 1) {
            float* s = sums + (size_t)row * width;
            for (int c = 0; c < width; c++) s[c] *= keep;
        }
        return true;
    }

    // Adds what another has attended to.
    void merge(const Running& other) {
        for (int n = 0; n < rows; n++) {
            if (other.top[n] == -INFINITY) continue;
            float now = std::fmax(top[n], other.top[n]);
            float mine = top[n] == -INFINITY ? 0 : std::exp(top[n] - now);
            float theirs = std::exp(other.top[n] - now);
            top[n] = now;
            total[n] = total[n] * mine + other.total[n] * theirs;
            for (int c = 0; c < width; c++) {
                size_t at = (size_t)n * width + c;
                sums[at] = sums[at] * mine + other.sums[at] * theirs;
            }
        }
    }
};

inline void soft_cap(float* scores, int count, float cap) {
    for (int i = 0; i < count; i++) scores[i] = cap * std::tanh(scores[i] / cap);
}

}  // namespace
