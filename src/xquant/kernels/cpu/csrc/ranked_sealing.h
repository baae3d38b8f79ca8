// Rows to packed ranked codes (ranked_decoding.h). A token's gain is the one nearest to the root mean square of its
// channels, each over its own root mean square in the block; a channel's scale the one nearest to its root mean square
// after that. The last channels may be rests: what the codes of the first ones leave, where these have no trellis. They
// have the places of these, as their usual scales are as much smaller as a rest is.
//
// Equals `quant.ranked.Ranked.encode`, bit for bit. So sums are taken in its order: the second half is added to the
// first until one is left.
#pragma once
#include <cfloat>

#include "ranked_decoding.h"

namespace {

// Encodes blocks that lie one after the other. The search takes LANES rows at a time, of channels of all of them:
// there are a few channels of each width in a block, and lanes would be left over.
class RankedEncoding {
  public:
    static constexpr int TOGETHER = 4;
    static size_t bytes(const xq_ranked_blocks& call, int together) {
        const size_t C = call.channels, n = call.tokens;
        return Ranking::bytes(call.channels) + together * block_bytes(C, n) +
               sizeof(float) * (((n + 1) / 2 + 1) * C + std::max(n, C) + n + n * LANES) + std::max(n, C) +
               (2 * sizeof(int16_t) + 1) * n * LANES + TrellisSearch::bytes(call.tokens) + 9 * 64;
    }
    RankedEncoding(const xq_ranked_blocks& call, int together, Workspace& workspace)
        : call(call), C(call.channels), measured(C - call.rests), n(call.tokens), ranks(C, workspace),
          search(n, workspace) {
        for (int i = 0; i < together; i++) {
            Block& block = blocks[i];
            block.rows = workspace.take<float>((size_t)n * C);
            block.sizes = workspace.take<float>(C);
            block.order = workspace.take<int>(C);
            block.weights = workspace.take<uint8_t>(n);
            block.codes = workspace.take<uint8_t>((size_t)n * C);
        }
        partial_sums = workspace.take<float>((size_t)(n + 1) / 2 * C);
        variance = workspace.take<float>(C);
        row = workspace.take<float>(std::max(C, n));
        costs = workspace.take<float>(n);
        places = workspace.take<uint8_t>(std::max(n, C));
        gathered = workspace.take<float>((size_t)n * LANES);
        numbers = workspace.take<int16_t>((size_t)n * LANES);
        weights = workspace.take<int16_t>((size_t)n * LANES);
        found = workspace.take<uint8_t>((size_t)n * LANES);
    }

    // False: there was NaN.
    bool run(int first, int count) {
        for (int i = 0; i < count; i++)
            if (!measure(first + i, blocks[i])) return false;
        encode(first, count);
        return true;
    }

  private:
    static constexpr int LOWEST = -200;      // steps of a variance below the first border
    static constexpr int COST_BORDERS = 15;  // between weights
    struct Block {
        float* rows;       // [n, C], divided by their gains once these are known
        float* sizes;      // [C] scales
        int* order;        // [C] channels by falling scale
        uint8_t* weights;  // [n] of the errors of tokens
        uint8_t* codes;    // [n, count] of one width
    };
    const xq_ranked_blocks& call;
    const int C, measured, n;  // channels, those that are no rests, and tokens
    Ranking ranks;
    TrellisSearch search;
    Block blocks[TOGETHER];
    const uint8_t* excluded;  // [n] of the block that is measured, null: none
    float* scaled;            // its rows
    float* partial_sums;      // [ceil(n / 2), C]
    float* variance;          // [C] mean squares
    float* row;               // [max(C, n)]
    float* costs;             // [n] the logarithms of what errors of tokens cost
    uint8_t* places;          // [max(n, C)] scales or gains before they are packed
    float* gathered;          // [n, LANES] channels that are searched together
    int16_t* numbers;         // [n, LANES] the same in units of levels
    int16_t* weights;         // [n, LANES] of their errors
    uint8_t* found;           // [n, LANES] their codes

    static size_t block_bytes(size_t C, size_t n) {
        return sizeof(float) * (n + 2) * C + n + n * C + 5 * 64;
    }

    // Finds gains, scales and the order of channels. False: there is NaN in the block.
    bool measure(int number, Block& block) {
        scaled = block.rows;
        excluded = call.excluded ? call.excluded + (size_t)number * n : nullptr;
        for (int t = 0; t < n; t++) {
            const float* x = (const float*)call.rows + number * call.block_stride + t * call.token_stride;
            float* to = scaled + (size_t)t * C;
            // NaN stays NaN.
            for (int c = 0; c < measured; c++)
                to[c] = x[c] < -FP16_MAX ? -FP16_MAX : x[c] > FP16_MAX ? FP16_MAX : x[c];
            std::fill(to + measured, to + C, 0.0f);
        }
        measure_channels();
        for (int t = 0; t < n; t++) {
            costs[t] = cost_of(t);
            if (!divide_by_gain(t)) return false;
            costs[t] += call.gain_costs[places[t]];
        }
        weigh(block.weights);
        pack_places(n, call.gain + (size_t)number * ((n + 1) / 2));
        measure_channels();
        for (int c = 0; c < measured; c++) places[c] = place(steps_of(variance[c]) - call.usual[c] + USUAL_PLACE);
        std::copy(places, places + call.rests, places + measured);
        uint8_t* scale = call.scale + (size_t)number * ((C + 1) / 2);
        pack_places(C, scale);
        ranks.read(scale, call.usual, call.sizes);
        std::copy(ranks.sizes, ranks.sizes + C, block.sizes);
        std::copy(ranks.order, ranks.order + C, block.order);
        return true;
    }

    static uint8_t place(int steps) { return (uint8_t)std::min(std::max(steps, 0), 15); }

    int steps_of(float variance) const {
        if (!(variance >= FLT_MIN)) return LOWEST;
        int i = (int)std::floor(std::ilogb(std::min(variance, FLT_MAX)) * 1.5f) - LOWEST - 1;
        while (call.borders[i] < variance) i++;
        return i + LOWEST;
    }

    // The logarithm of what an error of one unit in a token costs.
    float cost_of(int t) const {
        if (!call.costs) return 0.0f;
        const float* x = scaled + (size_t)t * C;
        for (int c = 0; c < measured; c++) row[c] = x[c] * call.costs[c];
        return sum(row, measured);
    }

    void weigh(uint8_t* weights) const {
        for (int t = 0; t < n; t++) row[t] = seen(t) ? costs[t] : 0.0f;
        const float mean = sum(row, n) / (float)std::max(count_seen(), 1);
        for (int t = 0; t < n; t++) {
            weights[t] = seen(t);
            for (int i = 0; seen(t) && i < COST_BORDERS; i++) weights[t] += call.cost_borders[i] < costs[t] - mean;
        }
    }

    bool seen(int t) const { return t < n && !(excluded && excluded[t]); }
    int count_seen() const {
        int count = 0;
        for (int t = 0; t < n; t++) count += seen(t);
        return count;
    }

    void measure_channels() const {
        const int count = count_seen();
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
    // Of numbers that are overwritten.
    static float sum(float* x, int count) {
        for (; count > 1; count = (count + 1) / 2) add(x, x + (count + 1) / 2, count / 2);
        return x[0];
    }
    static void add(float* __restrict x, const float* __restrict y, size_t count) {
        for (size_t i = 0; i < count; i++) x[i] += y[i];
    }

    // Finds the gain of a token and divides by it. False: there is NaN in the token.
    bool divide_by_gain(int t) const {
        float* x = scaled + (size_t)t * C;
        for (int c = 0; c < measured; c++) row[c] = x[c] * x[c] / variance[c];
        const float mean_square = sum(row, measured) / (float)measured;
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

    void encode(int first, int together) {
        int from = 0;
        size_t at = 0;
        for (int i = ALL_WIDTHS - 1; i >= 0; i--) {
            const int count = call.counts[i];
            if (!count) continue;
            if (i < TRELLIS_WIDTHS)
                search_codes(i, from, count, together);
            else
                for (int block = 0; block < together; block++) {
                    find_nearest(i, from, count, blocks[block]);
                    if (call.rests) {
                        leave_rests(i, from, count, blocks[block]);
                        find_nearest(i, from, count, blocks[block]);  // there may be rests of others among them
                    }
                }
            for (int block = 0; block < together; block++)
                pack(call.codes + (size_t)(first + block) * call.code_bytes + at, WIDTHS[i], count,
                     blocks[block].codes);
            at += packed_bytes(WIDTHS[i], n) * count;
            from += count;
        }
    }

    // The codes of channels from, from + 1, ... of the ranks of each block.
    void search_codes(int i, int from, int count, int together) {
        const Width& width = WIDTHS[i];
        const int rows = count * together, steps = n / width.tokens;
        for (int done = 0; done < rows; done += LANES) {
            const int lanes = std::min(LANES, rows - done);
            // Does this to lanes that are of one block: their number, and the first one's rank.
            auto of_each = [&](auto&& act) {
                for (int lane = 0, some; lane < lanes; lane += some) {
                    const int rank = (done + lane) % count;
                    some = std::min(lanes - lane, count - rank);
                    act(blocks[(done + lane) / count], lane, some, rank);
                }
            };
            alignas(64) float sizes[LANES];
            std::fill(sizes, sizes + LANES, 1.0f);
            if (lanes < LANES) {
                std::fill(gathered, gathered + (size_t)n * LANES, 0.0f);
                std::fill(weights, weights + (size_t)n * LANES, (int16_t)0);
            }
            of_each([&](const Block& block, int lane, int some, int rank) {
                const int* channels = block.order + from + rank;
                for (int j = 0; j < some; j++) sizes[lane + j] = block.sizes[channels[j]];
                for (int t = 0; t < n; t++) {
                    const float* x = block.rows + (size_t)t * C;
                    for (int j = 0; j < some; j++) gathered[t * LANES + lane + j] = x[channels[j]];
                    std::fill_n(weights + t * LANES + lane, some, (int16_t)block.weights[t]);
                }
            });
            to_units(sizes, call.units[i], call.ends[i]);
            search.codes(width, call.whole_levels + i * TABLE_SIZE, numbers, weights, found);
            of_each([&](const Block& block, int lane, int some, int rank) {
                for (int t = 0; t < steps; t++)
                    std::copy_n(found + t * LANES + lane, some, block.codes + (size_t)t * count + rank);
            });
        }
    }

    // What was gathered, divided by scales, in units.
    void to_units(const float* sizes, float unit, float end) const {
        alignas(64) int32_t whole[16];
        const Floats units = broadcast_float(unit), lowest = broadcast_float(-end), highest = broadcast_float(end);
        for (int i = 0; i < n * LANES; i += 16) {
            const Floats x = load_floats(gathered + i) / load_floats(sizes + i % LANES) * units;
            store(whole, to_nearest(minimum(maximum(x, lowest), highest)));
            for (int j = 0; j < 16; j++) numbers[i + j] = (int16_t)whole[j];
        }
    }

    // The code of a number is how many of the edges between levels are below it.
    void find_nearest(int i, int from, int count, const Block& block) const {
        const float* edges = call.edges + i * WINDOWS;
        const int edge_count = (1 << WIDTHS[i].code) - 1;
        for (int t = 0; t < n; t++)
            for (int c = 0; c < count; c += 16) {
                const int some = std::min(16, count - c);
                float x[16] = {};
                int below[16] = {};
                for (int j = 0; j < some; j++) {
                    const int channel = block.order[from + c + j];
                    x[j] = block.rows[(size_t)t * C + channel] / block.sizes[channel];
                }
                for (int e = 0; e < edge_count; e++)
                    for (int j = 0; j < 16; j++) below[j] += edges[e] < x[j];
                for (int j = 0; j < some; j++) block.codes[(size_t)t * count + c + j] = (uint8_t)below[j];
            }
    }

    // Puts what codes leave of the channels that have a rest in its place.
    void leave_rests(int i, int from, int count, const Block& block) const {
        const float* levels = call.levels + i * TABLE_SIZE;
        for (int c = 0; c < count; c++) {
            const int channel = block.order[from + c];
            if (channel >= call.rests) continue;
            const float size = block.sizes[channel];
            for (int t = 0; t < n; t++) {
                float* x = block.rows + (size_t)t * C;
                x[measured + channel] = (x[channel] / size - levels[block.codes[(size_t)t * count + c]]) * size;
            }
        }
    }

    // The inverse of RankedDecoding::unpack.
    void pack(uint8_t* packed, const Width& width, int count, const uint8_t* codes) const {
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
    }
};

// xq_ranked_encode.
inline int ranked_encode(const xq_ranked_blocks& call) { return for_each_ranked_block<RankedEncoding>(call); }

}  // namespace
