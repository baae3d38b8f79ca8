// Rows to packed ranked codes and back: x[t, c] = level[t, c] * scale_c * gain_t. Scales and gains are powers of
// 2^(1/3), kept as 4 bits. A token's gain is the one nearest to the root mean square of its channels, each over its own
// root mean square in the block; a channel's scale the one nearest to its root mean square after that. The channels
// with the largest scales get the widest codes (ranking.h), those after the last width get none and decode to 0.
//
// Encoding equals `quant.ranked.Ranked.encode` and decoding `Ranked.decode`, bit for bit. So sums are taken in its
// order: the second half is added to the first until one is left.
#pragma once
#include <cfloat>

#include "ranking.h"
#include "trellis.h"

namespace {

// Decodes one block.
class RankedDecoding {
  public:
    static size_t bytes(const xq_ranked_blocks& call) {
        return Ranking::bytes(call.channels) + (size_t)call.tokens * row_of(call.channels) + 64;
    }
    RankedDecoding(const xq_ranked_blocks& call, Workspace& workspace) : call(call), ranks(call.channels, workspace) {
        windows = workspace.take<uint8_t>((size_t)call.tokens * row_of(call.channels));
    }

    bool run(int number) {
        rank(number);
        const uint8_t* packed = call.codes + (size_t)number * call.code_bytes;
        const uint8_t* gains = call.gain + (size_t)number * ((call.tokens + 1) / 2);
        int first = 0;
        for (int i = ALL_WIDTHS - 1; i >= 0; i--) {
            const int count = call.counts[i];
            if (!count) continue;
            const Width& width = WIDTHS[i];
            packed = unpack(packed, width, count);
            codes_to_windows(width, call.tokens / width.tokens, row_of(count), windows);
            for (int t = 0; t < call.tokens; t++)
                write(number, t, first, count, windows + (size_t)(t / width.tokens) * row_of(count),
                      call.levels + i * TABLE_SIZE + t % width.tokens * WINDOWS,
                      size_of(call.sizes, nibble_at(gains, call.tokens, t) - UNIT_GAIN_PLACE));
            first += count;
        }
        for (int t = 0; t < call.tokens; t++)
            for (int i = first; i < call.channels; i++) put(number, t, ranks.order[i], 0);
        return true;
    }

  private:
    const xq_ranked_blocks& call;
    Ranking ranks;
    uint8_t* windows;  // [codes, row_of(count)] of one width

    static int row_of(int channels) { return (channels + 63) / 64 * 64; }

    void rank(int number) {
        ranks.read(call.scale + (size_t)number * ((call.channels + 1) / 2), call.usual, call.sizes);
    }

    // Unpacks the codes of `count` channels into rows of windows. Returns where the next width begins.
    const uint8_t* unpack(const uint8_t* packed, const Width& width, int count) {
        const int codes = call.tokens / width.tokens, stride = row_of(count);
        int shift = 0;
        for (int plane = 8; plane >= 1; plane /= 2) {
            if (!(width.code & plane)) continue;
            const int rows = codes * plane / 8, mask = (1 << plane) - 1;
            for (int run = 0; run < 8 / plane; run++)
                for (int i = 0; i < rows; i++) {
                    const uint8_t* from = packed + (size_t)i * count;
                    uint8_t* to = windows + (size_t)(i + run * rows) * stride;
                    for (int c = 0; c < count; c++) {
                        const uint8_t code = (from[c] >> (run * plane) & mask) << shift;
                        to[c] = shift ? to[c] | code : code;
                    }
                }
            packed += (size_t)rows * count;
            shift += plane;
        }
        return packed;
    }

    void write(int number, int t, int first, int count, const uint8_t* row, const float* table, float gain) {
        for (int i = 0; i < count; i++) {
            const int channel = ranks.order[first + i];
            put(number, t, channel, table[row[i]] * ranks.sizes[channel] * gain);
        }
    }

    void put(int number, int t, int channel, float x) {
        const int64_t at = number * call.block_stride + t * call.token_stride + channel;
        if (call.dtype == XQ_FLOAT32)
            ((float*)call.rows)[at] = x;
        else
            store_element(call.rows, call.dtype, at, x);
    }
};

// Runs Work on every block.
template <class Work>
int for_each_ranked_block(const xq_ranked_blocks& call) {
    int failed = 0, nan = 0;
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed, nan)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(Work::bytes(call));
        failed += !ready;
#pragma omp for schedule(static)
        for (int number = 0; number < call.blocks; number++) {
            if (!ready) continue;
            workspace.next = workspace.base;
            nan += !Work(call, workspace).run(number);
        }
    }
    return failed ? XQ_NO_MEMORY : nan ? XQ_FOUND_NAN : XQ_DONE;
}

// xq_ranked_decode.
inline int ranked_decode(const xq_ranked_blocks& call) { return for_each_ranked_block<RankedDecoding>(call); }

// Encodes one block.
class RankedEncoding {
  public:
    static size_t bytes(const xq_ranked_blocks& call) {
        const size_t C = call.channels, n = call.tokens;
        return Ranking::bytes(call.channels) + sizeof(float) * ((n + (n + 1) / 2 + 3) * C) + n * C +
               std::max(n, C) + n + 3 * n * LANES + TrellisSearch::bytes(call.tokens) + 10 * 64;
    }
    RankedEncoding(const xq_ranked_blocks& call, Workspace& workspace)
        : call(call), C(call.channels), n(call.tokens), ranks(C, workspace), search(n, workspace) {
        scaled = workspace.take<float>((size_t)n * C);
        partial_sums = workspace.take<float>((size_t)(n + 1) / 2 * C);
        variance = workspace.take<float>(C);
        row = workspace.take<float>(C);
        places = workspace.take<uint8_t>(std::max(n, C));
        codes = workspace.take<uint8_t>((size_t)n * C);
        weights = workspace.take<uint8_t>(n);
        numbers = workspace.take<int16_t>((size_t)n * LANES);
        found = workspace.take<uint8_t>((size_t)n * LANES);
    }

    // False: there was NaN.
    bool run(int number) {
        excluded = call.excluded ? call.excluded + (size_t)number * n : nullptr;
        for (int t = 0; t < n; t++) {
            const float* x = (const float*)call.rows + number * call.block_stride + t * call.token_stride;
            float* to = scaled + (size_t)t * C;
            // NaN stays NaN.
            for (int c = 0; c < C; c++) to[c] = x[c] < -FP16_MAX ? -FP16_MAX : x[c] > FP16_MAX ? FP16_MAX : x[c];
        }
        measure_channels();
        for (int t = 0; t < n; t++)
            if (!divide_by_gain(t)) return false;
        for (int t = 0; t < n; t++) weights[t] = excluded && excluded[t] ? 0 : call.weights[places[t]];
        pack_places(n, call.gain + (size_t)number * ((n + 1) / 2));
        measure_channels();
        for (int c = 0; c < C; c++) places[c] = place(steps_of(variance[c]) - call.usual[c] + USUAL_PLACE);
        uint8_t* scale = call.scale + (size_t)number * ((C + 1) / 2);
        pack_places(C, scale);
        ranks.read(scale, call.usual, call.sizes);
        encode(call.codes + (size_t)number * call.code_bytes);
        return true;
    }

  private:
    static constexpr int LOWEST = -200;  // steps of a variance below the first border
    const xq_ranked_blocks& call;
    const int C, n;
    Ranking ranks;
    TrellisSearch search;
    const uint8_t* excluded;  // [n], null: none
    float* scaled;            // [n, C] the rows, divided by their gains once these are known
    float* partial_sums;      // [ceil(n / 2), C]
    float* variance;          // [C] mean squares
    float* row;               // [C]
    uint8_t* places;          // [max(n, C)] scales or gains before they are packed
    uint8_t* codes;           // [n, count] of one width
    uint8_t* weights;         // [n] of the errors of tokens
    int16_t* numbers;         // [n, 16] channels in units
    uint8_t* found;           // [n, 16] their codes

    static uint8_t place(int steps) { return (uint8_t)std::min(std::max(steps, 0), 15); }

    int steps_of(float variance) const {
        if (!(variance >= FLT_MIN)) return LOWEST;
        int i = (int)std::floor(std::ilogb(std::min(variance, FLT_MAX)) * 1.5f) - LOWEST - 1;
        while (call.borders[i] < variance) i++;
        return i + LOWEST;
    }

    void measure_channels() const {
        auto seen = [this](int t) { return t < n && !(excluded && excluded[t]); };
        int count = 0;
        for (int t = 0; t < n; t++) count += seen(t);
        const int half = (n + 1) / 2;
        for (int t = 0; t < half; t++) {
            const float *a = scaled + (size_t)t * C, *b = a + (size_t)half * C;
            float* to = partial_sums + (size_t)t * C;
            if (seen(t) && seen(t + half))
                for (int c = 0; c < C; c++) to[c] = a[c] * a[c] + b[c] * b[c];
            else if (seen(t) || seen(t + half))
                for (int c = 0; c < C; c++) to[c] = seen(t) ? a[c] * a[c] : b[c] * b[c];
            else
                std::fill(to, to + C, 0.0f);
        }
        for (int rows = half; rows > 1; rows = (rows + 1) / 2)
            add(partial_sums, partial_sums + (size_t)(rows + 1) / 2 * C, (size_t)rows / 2 * C);
        const float divisor = (float)std::max(count, 1);
        for (int c = 0; c < C; c++) variance[c] = std::max(partial_sums[c] / divisor, FLT_MIN);
    }
    static void add(float* __restrict x, const float* __restrict y, size_t count) {
        for (size_t i = 0; i < count; i++) x[i] += y[i];
    }

    // Finds the gain of a token and divides by it. False: there is NaN in the token.
    bool divide_by_gain(int t) const {
        float* x = scaled + (size_t)t * C;
        for (int c = 0; c < C; c++) row[c] = x[c] * x[c] / variance[c];
        for (int count = C; count > 1; count = (count + 1) / 2) add(row, row + (count + 1) / 2, count / 2);
        const float mean_square = row[0] / (float)C;
        if (mean_square != mean_square) return false;
        places[t] = place(steps_of(mean_square) + UNIT_GAIN_PLACE);
        const float gain = size_of(call.sizes, places[t] - UNIT_GAIN_PLACE);
        for (int c = 0; c < C; c++) x[c] /= gain;
        return true;
    }

    void pack_places(int count, uint8_t* packed) const {
        const int half = (count + 1) / 2;
        for (int i = 0; i < half; i++)
            packed[i] = (uint8_t)(places[i] | (i + half < count ? places[i + half] << 4 : 0));
    }

    void encode(uint8_t* packed) {
        int first = 0;
        for (int i = ALL_WIDTHS - 1; i >= 0; i--) {
            const int count = call.counts[i];
            if (!count) continue;
            if (i < TRELLIS_WIDTHS)
                search_codes(i, first, count);
            else
                find_nearest(i, first, count);
            packed = pack(packed, WIDTHS[i], count);
            first += count;
        }
    }

    // The codes of channels first, first + 1, ... of the ranks, 16 rows at a time.
    void search_codes(int i, int first, int count) {
        const Width& width = WIDTHS[i];
        for (int c = 0; c < count; c += LANES) {
            const int lanes = std::min(LANES, count - c);
            load_numbers(ranks.order + first + c, lanes, call.units[i], call.ends[i]);
            search.codes(width, call.whole_levels + i * TABLE_SIZE, numbers, weights, found, LANES);
            for (int t = 0; t < n / width.tokens; t++)
                std::copy(found + t * LANES, found + t * LANES + lanes, codes + (size_t)t * count + c);
        }
    }

    // `lanes` channels, divided by their scales, in units. Channels that are missing are 0.
    void load_numbers(const int* channels, int lanes, float unit, float end) const {
        alignas(64) float x[LANES] = {}, sizes[LANES];
        alignas(64) int32_t whole[LANES];
        for (int lane = 0; lane < LANES; lane++) sizes[lane] = lane < lanes ? ranks.sizes[channels[lane]] : 1;
        const Floats size = load_floats(sizes), units = broadcast_float(unit);
        const Floats lowest = broadcast_float(-end), highest = broadcast_float(end);
        for (int t = 0; t < n; t++) {
            const float* row = scaled + (size_t)t * C;
            for (int lane = 0; lane < lanes; lane++) x[lane] = row[channels[lane]];
            store(whole, to_nearest(minimum(maximum(load_floats(x) / size * units, lowest), highest)));
            for (int lane = 0; lane < LANES; lane++) numbers[t * LANES + lane] = (int16_t)whole[lane];
        }
    }

    void find_nearest(int i, int first, int count) const {
        for (int t = 0; t < n; t++)
            for (int c = 0; c < count; c++) {
                const int channel = ranks.order[first + c];
                const float x = scaled[(size_t)t * C + channel] / ranks.sizes[channel];
                codes[(size_t)t * count + c] = nearest(call.edges + i * WINDOWS, WIDTHS[i].code, x);
            }
    }
    static uint8_t nearest(const float* edges, int bits, float x) {
        int found = 0;
        for (int step = 1 << (bits - 1); step; step /= 2) found += edges[found + step - 1] < x ? step : 0;
        return (uint8_t)found;
    }

    // The inverse of RankedDecoding::unpack.
    uint8_t* pack(uint8_t* packed, const Width& width, int count) const {
        int shift = 0;
        for (int plane = 8; plane >= 1; plane /= 2) {
            if (!(width.code & plane)) continue;
            const int rows = n / width.tokens * plane / 8, mask = (1 << plane) - 1;
            std::memset(packed, 0, (size_t)rows * count);
            for (int run = 0; run < 8 / plane; run++)
                for (int i = 0; i < rows; i++) {
                    uint8_t* to = packed + (size_t)i * count;
                    const uint8_t* from = codes + (size_t)(i + run * rows) * count;
                    for (int c = 0; c < count; c++) to[c] |= (from[c] >> shift & mask) << (run * plane);
                }
            packed += (size_t)rows * count;
            shift += plane;
        }
        return packed;
    }
};

// xq_ranked_encode.
inline int ranked_encode(const xq_ranked_blocks& call) { return for_each_ranked_block<RankedEncoding>(call); }

}  // namespace
