// Scores to probabilities, a block of tokens at a time, with running maxima and sums.
#pragma once

namespace {

// e^x for x <= 0, relative error below 4e-6; 0 far below, and for -infinity.
inline Floats exponential(Floats x) {
    const Floats y = maximum(x * broadcast_float(1.44269504f), broadcast_float(-200));
    const Floats whole = round_to_whole(y), f = y - whole;
    // 2^f = sum of (f ln 2)^i / i!
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

// What has been attended to so far: the output of every row is sums[row] / total[row].
struct Running {
    int rows, width;
    float *top, *total;  // [rows], as all of these with room for whole vectors
    float* latest;       // the highest of the last weights
    float* keep;         // what the last weights made of those before
    float* sums;         // [rows, width]

    static size_t padded(int rows) { return (rows + 15) / 16 * 16; }
    static size_t floats(int rows, int width) { return 4 * padded(rows) + (size_t)(rows * width + 15) / 16 * 16; }
    Running(float* memory, int rows, int width) : rows(rows), width(width) {
        const size_t step = padded(rows);
        top = memory;
        total = top + step;
        latest = total + step;
        keep = latest + step;
        sums = keep + step;
    }

    void clear() {
        std::fill(top, top + padded(rows), -INFINITY);
        std::memset(total, 0, sizeof(float) * (floats(rows, width) - padded(rows)));
    }

    // Turns scores [rows, count] to weights, relative to the new maximum of every row. False: all are masked.
    bool weigh(float* scores, int count) {
        std::fill(latest + rows, latest + padded(rows), -INFINITY);
        for (int r = 0; r < rows; r++) latest[r] = highest_of(scores + (size_t)r * count, count);
        if (highest_of(latest, rows) == -INFINITY) return false;
        for (int r = 0; r < rows; r += 16) {
            const Floats before = load_floats(top + r), here = load_floats(latest + r);
            const Floats now = maximum(before, here);
            // A row that has seen nothing yet gets no weights at all.
            const Floats base = maximum(now, broadcast_float(-1e30f));
            store_floats(keep + r, exponential(before - base));
            store_floats(latest + r, exponential(here - base));
            store_floats(top + r, now);
        }
        for (int r = 0; r < rows; r++) {
            float* s = scores + (size_t)r * count;
            const float base = std::max(top[r], -1e30f);
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
            total[r] = total[r] * keep[r] + sum(added) + rest;
            if (keep[r] == 1) continue;
            float* row = sums + (size_t)r * width;
            for (int c = 0; c < width; c++) row[c] *= keep[r];
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
