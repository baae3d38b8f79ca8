// Rows to packed codes of a codebook, outliers apart. Over a range of a token or of a channel,
//
//     zero = (low + high) / 2,   scale = max(high - zero, zero - low),   code = the level nearest to (x - zero) / scale,
//
// with zero and scale rounded to fp16 before the codes are computed. Elements outside of [low, high] are outliers: a
// vector's lowest and highest, found here, or what is outside of thresholds. Their residual to what their codes decode
// to is stored, token by token. It equals `quant.nonuniform.Codebook.encode`, bit for bit but for the sign of a zero.
#pragma once
#include "block_layout.h"

namespace {

// The `count` lowest numbers of 16 lanes, rising.
struct Lowest {
    float* held;  // [count, 16]
    int count;

    void clear() const { std::fill_n(held, count * 16, INFINITY); }
    void take(Floats x) const {
        for (int i = 0; i < count; i++) {
            const Floats before = load_floats(held + i * 16);
            store_floats(held + i * 16, minimum(before, x));
            x = maximum(before, x);
        }
    }
    float at(int place, int lane) const { return held[place * 16 + lane]; }
};

class CodebookEncoding {
  public:
    static int most_outliers(const xq_codebook_blocks& call) {
        return call.lowest ? 0 : std::max(call.outliers, call.last_outliers);
    }
    static size_t bytes(const xq_codebook_blocks& call, const BlockLayout& layout) {
        const size_t n = call.blocks.tokens, row = whole_vectors(call.blocks.channels);
        const size_t turned = call.blocks.per_token ? row * layout.width : 0;
        const size_t lists = 2 * 16 * (most_outliers(call) + 1);
        return 4 * (n * row + turned + 4 * layout.table() + lists + 4 * row + 7 * 16) + layout.scratch() + 16 * 64;
    }
    CodebookEncoding(const xq_codebook_blocks& call, const BlockLayout& layout, Workspace& workspace)
        : call(call), layout(layout), n(call.blocks.tokens), C(call.blocks.channels), stride(whole_vectors(C)) {
        const size_t table = layout.table() + 16;  // the last 16 entries may begin anywhere
        rows = workspace.take<float>((size_t)n * stride + 16);
        turned = workspace.take<float>(call.blocks.per_token ? (size_t)stride * layout.width : 0);
        for (float** each : {&zeros, &divisors, &lows, &highs}) *each = workspace.take<float>(table);
        for (Lowest* each : {&smallest, &negated}) each->held = workspace.take<float>(16 * (most_outliers(call) + 1));
        for (float** each : {&lower, &upper, &beyond}) *each = workspace.take<float>(stride + 16);
        listed = workspace.take<int32_t>(stride);
        scratch = workspace.take<uint8_t>(layout.scratch());
        if (call.lowest) {
            std::copy_n(call.lowest, C, lower);
            std::copy_n(call.highest, C, upper);
        }
    }

    // False: there is NaN in the block.
    bool run(int block) {
        number = block;
        if (!load()) return false;
        if (call.offline_scale)
            take_offline_ranges();
        else
            find_ranges();
        for (int strip = 0; strip < layout.strips; strip++)
            layout.pack(number, strip, scratch, [&](int t, int c, int) { return codes(t, c); });
        if (call.outlier_count) put_outliers_away();
        return true;
    }

  private:
    const xq_codebook_blocks& call;
    const BlockLayout& layout;
    const int n, C, stride;
    int number;
    float *rows;               // [n, stride]
    float *turned;             // [C, width of the tables] the same by channel, where ranges are of a token
    float *zeros, *divisors;   // tables (block_layout.h)
    float *lows, *highs;       // the same of the ends of ranges
    float *lower, *upper;      // [C] thresholds
    float *beyond;             // [C] how far the elements of a token are outside
    int32_t *listed;           // [C] its outliers
    Lowest smallest, negated;  // numbers, and those times -1
    uint8_t *scratch;

    bool is_excluded(int t) const { return call.blocks.excluded && call.blocks.excluded[(size_t)number * n + t]; }

    bool load() const {
        switch (call.blocks.dtype) {
            case XQ_FLOAT32: return load_rows<XQ_FLOAT32>();
            case XQ_BFLOAT16: return load_rows<XQ_BFLOAT16>();
            default: return load_rows<XQ_FLOAT16>();
        }
    }
    template <int DTYPE>
    bool load_rows() const {
        Floats nan_probe = broadcast_float(0);
        for (int t = 0; t < n; t++)
            for (int c = 0; c < C; c += 16) {
                const int64_t at = layout.element(number, t, c);
                const Floats x = clamp_to_fp16(load_as<DTYPE>(call.blocks.rows, at, C - c));
                nan_probe = fma(x, broadcast_float(0), nan_probe);
                store_floats(rows + (size_t)t * stride + c, x);
            }
        const float nothing = sum(nan_probe);
        return nothing == nothing;
    }

    void take_offline_ranges() const {
        for (int c = 0; c < C; c++) {
            const float scale = fp16_to_float(call.offline_scale[c]);
            zeros[c] = fp16_to_float(call.offline_zero[c]);
            divisors[c] = scale == 0 ? INFINITY : scale;
        }
    }

    void turn() const {
        for (int from = 0; from < n; from += 16)
            for (int c = 0; c < C; c++)
                for (int t = from; t < std::min(from + 16, n); t++)
                    turned[(size_t)c * layout.width + t] = rows[(size_t)t * stride + c];
    }

    void find_ranges() {
        if (call.blocks.per_token) turn();
        const int group = call.blocks.group, along = call.blocks.per_token ? C : n;
        for (int range = 0; range < layout.ranges; range++) {
            const int outliers = call.lowest ? 0 : range + 1 < layout.ranges ? call.outliers : call.last_outliers;
            smallest.count = negated.count = outliers - outliers / 2 + 1;
            for (int at = 0; at < layout.across; at += 16) {
                see(range * group, std::min((range + 1) * group, along), at);
                store_range(outliers, range, at);
            }
        }
    }

    // Finds the lowest and the highest of elements `start` to `stop` - 1 for 16 tokens or channels.
    void see(int start, int stop, int at) const {
        smallest.clear();
        negated.clear();
        const bool per_token = call.blocks.per_token;
        alignas(64) float never[16] = {};
        if (per_token)
            for (int i = 0; i < 16 && at + i < n; i++) never[i] = is_excluded(at + i) ? INFINITY : 0;
        for (int i = start; i < stop; i++) {
            if (!per_token && is_excluded(i)) continue;
            const size_t row = per_token ? layout.width : stride;
            const Floats x = load_floats((per_token ? turned : rows) + i * row + at);
            Floats apart = load_floats(never);  // 0, or infinity of what does not count
            if (call.lowest) {
                const Floats low = per_token ? broadcast_float(lower[i]) : load_floats(lower + at);
                const Floats high = per_token ? broadcast_float(upper[i]) : load_floats(upper + at);
                const Floats one = broadcast_float(1), inside = zero_below(zero_below(one, x, low), high, x);
                apart = apart + (one / inside - one);
            }
            smallest.take(x + apart);
            negated.take(apart - x);
        }
    }

    // Cuts the ends of 16 ranges off that leave so many outliers outside, half of them at each end, an odd one where
    // the range becomes narrower; computes and stores scales and zeros. Where nothing counts, both are 0.
    void store_range(int outliers, int range, int at) const {
        const int fewer = outliers / 2, more = outliers - fewer;
        alignas(64) float low[16], high[16], middle[16], reach[16];
        alignas(64) uint16_t zero[16], scale[16];
        for (int i = 0; i < 16; i++) {
            low[i] = smallest.at(fewer, i);
            high[i] = -negated.at(more, i);
            const float other_low = smallest.at(more, i), other_high = -negated.at(fewer, i);
            if (!(high[i] - low[i] <= other_high - other_low)) low[i] = other_low, high[i] = other_high;
        }
        const size_t to = (size_t)range * layout.width + at;
        std::copy_n(low, 16, lows + to);
        std::copy_n(high, 16, highs + to);
        for (int i = 0; i < 16; i++) {
            if (low[i] > high[i]) low[i] = high[i] = 0;
            middle[i] = (low[i] + high[i]) / 2;
        }
        store_fp16(zero, load_floats(middle));
        store_floats(middle, load_fp16(zero));
        for (int i = 0; i < 16; i++) {
            const float wide = std::max(std::max(high[i] - middle[i], middle[i] - low[i]), 0.0f);
            reach[i] = std::min(wide, FP16_MAX);
        }
        store_fp16(scale, load_floats(reach));
        store_floats(reach, load_fp16(scale));
        for (int i = 0; i < 16; i++) reach[i] = reach[i] == 0 ? INFINITY : reach[i];
        store_floats(zeros + to, load_floats(middle));
        store_floats(divisors + to, load_floats(reach));
        const int64_t stored = layout.stored(number, range, at);
        for (int i = 0; i < 16 && at + i < layout.across; i++) {
            call.blocks.zero[stored + i * layout.stored_step()] = zero[i];
            call.blocks.scale[stored + i * layout.stored_step()] = scale[i];
        }
    }

    int edge_count() const { return (1 << call.blocks.bits) - 1; }

    // Of channels c to c + 15 of a token: how many of the edges between levels are below.
    Words codes(int t, int c) const {
        Floats x = load_floats(rows + (size_t)t * stride + c);
        x = (x - layout.entries(zeros, t, c)) / layout.entries(divisors, t, c);
        const Floats one = broadcast_float(1);
        Floats code = broadcast_float((float)edge_count());
        for (int i = 0; i < edge_count(); i++) code = code - zero_below(one, broadcast_float(call.edges[i]), x);
        return to_nearest(code);
    }

    void put_outliers_away() const {
        const size_t room = (size_t)number * n * C;
        int64_t found = 0;
        for (int t = 0; t < n; t++) {
            const int count = is_excluded(t) ? 0 : list_outliers(t);
            for (int i = 0; i < count; i++, found++) {
                call.outlier_channel[room + found] = (uint16_t)listed[i];
                const float residual = rows[(size_t)t * stride + listed[i]] - decoded(t, listed[i]);
                call.outlier_excess[room + found] = float_to_fp16(std::min(std::max(residual, -FP16_MAX), FP16_MAX));
            }
            const size_t at = (size_t)number * n + t;
            if (call.count_bytes == 1)
                ((uint8_t*)call.outlier_count)[at] = (uint8_t)count;
            else
                ((uint16_t*)call.outlier_count)[at] = (uint16_t)count;
        }
    }

    int list_outliers(int t) const {
        for (int c = 0; c < C; c += 16) {
            const Floats x = load_floats(rows + (size_t)t * stride + c);
            const Floats low = call.lowest ? load_floats(lower + c) : layout.entries(lows, t, c);
            const Floats high = call.lowest ? load_floats(upper + c) : layout.entries(highs, t, c);
            store_floats(beyond + c, maximum(low - x, x - high));
        }
        int count = 0;
        for (int c = 0; c < C; c++) {
            listed[count] = c;
            count += beyond[c] > 0;
        }
        return count;
    }

    // What the code of an element decodes to. The product of two fp16 numbers is exact in fp32.
    float decoded(int t, int c) const {
        const bool per_token = call.blocks.per_token;
        const size_t at = (size_t)((per_token ? c : t) / call.blocks.group) * layout.width + (per_token ? t : c);
        const float x = (rows[(size_t)t * stride + c] - zeros[at]) / divisors[at];
        int code = 0;
        for (int i = 0; i < edge_count(); i++) code += x > call.edges[i];
        return call.levels[code] * (divisors[at] == INFINITY ? 0 : divisors[at]) + zeros[at];
    }
};

// xq_codebook_encode.
inline int codebook_encode(const xq_codebook_blocks& call) {
    static thread_local Workspace shared;
    BlockLayout layout(call.blocks);
    if (!shared.reserve(sizeof(int32_t) * layout.entry_count() + 64)) return XQ_NO_MEMORY;
    layout.set_entries(shared.take<int32_t>(layout.entry_count()));
    int failed = 0, nan = 0;
#pragma omp parallel num_threads(layout.threads()) reduction(+ : failed, nan)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(CodebookEncoding::bytes(call, layout));
        failed += !ready;
#pragma omp for schedule(static)
        for (int block = 0; block < call.blocks.blocks; block++) {
            if (!ready) continue;
            workspace.next = workspace.base;
            nan += !CodebookEncoding(call, layout, workspace).run(block);
        }
    }
    return failed ? XQ_NO_MEMORY : nan ? XQ_FOUND_NAN : XQ_DONE;
}

}  // namespace
