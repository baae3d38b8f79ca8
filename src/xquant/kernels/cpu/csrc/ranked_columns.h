// The product of a block of ranked states with weights, for columns of one precision: int16 for wide codes, 8 bits for
// narrow ones, of which an instruction takes twice as many. Columns are in the order of their scales.
//
// Some columns in order share one step, so that small ones are not lost beside large ones: with int16 as fine as sums of 32
// bits allow. 8 bits miss the product by some .4%, where narrow codes miss their states by 15% and more.
#pragma once
#include "ranked_reader.h"
#include "turning.h"

namespace {

constexpr int WEIGHT_LIMIT = 8191;  // the highest weight, as in kernels/cpu/ranked.py

// What rows of slow pairs are made of: see turning.h.
struct SlowFactors {
    const int rows, pairs;  // rows: filled up to 16
    const int words;        // of two pairs, of 8 bits
    int32_t* factors;       // [pairs, rows] two int16 each
    float* inverse;         // [rows] what a product of factors and weights is multiplied by to be a weight
    // The same of 8 bits, for narrow codes where bytes are multiplied faster.
    int32_t* bytes;         // [words, rows]
    int32_t* offsets;       // [rows] what sums begin with: weights are stored 128 too high
    float* byte_inverse;    // [rows]

    static int words_of(int pairs) { return FAST_BYTES ? (pairs + 1) / 2 : 0; }
    // Floats and integers of all of it.
    static size_t size(int rows, int pairs) { return (size_t)rows * (pairs + words_of(pairs) + 3); }
    SlowFactors(int rows, int pairs, Workspace& workspace)
        : rows(rows), pairs(pairs), words(words_of(pairs)) {
        factors = workspace.take<int32_t>((size_t)pairs * rows);
        inverse = workspace.take<float>(rows);
        bytes = workspace.take<int32_t>((size_t)words * rows);
        offsets = workspace.take<int32_t>(rows);
        byte_inverse = workspace.take<float>(rows);
    }

    // Sets the factors of row i, of 16 bits in steps of `step`, of which the weights have `highest` for the highest. A
    // product times step / bound is a weight in units of 1 / WEIGHT_LIMIT.
    void set(int i, const int32_t* from, float step, float bound) const {
        for (int j = 0; j < pairs; j++) factors[(size_t)j * rows + i] = from[j];
        inverse[i] = bound > 0 ? step * WEIGHT_LIMIT / bound : 0;
    }

    // Makes those of 8 bits, after all rows are set.
    void narrow_all() const {
        const float top = highest_weight(2 * pairs, SLOW_LIMIT), shrunk = 127 / top;
        const Floats scale = broadcast_float(shrunk / 65536);
        for (int i = 0; i < rows; i += 16) {
            Words total = zero_words();
            for (int w = 0; w < words; w++) {
                Words found[4];
                for (int k = 0; k < 4; k++) {
                    const int j = 2 * w + k / 2;
                    const Words both = j < pairs ? load(factors + (size_t)j * rows + i) : zero_words();
                    const Words high = k % 2 ? both & broadcast(~65535) : shift_left32<16>(both);
                    found[k] = to_nearest(to_floats(high) * scale);
                }
                const Words four = join_bytes(join_words(found[0], found[2]), join_words(found[1], found[3]));
                total = dot8(total, broadcast(0x01010101), four);
                store(bytes + (size_t)w * rows + i, four);
            }
            store_floats(byte_inverse + i, load_floats(inverse + i) * broadcast_float(1 / shrunk));
            store(offsets + i, to_nearest(to_floats(total) * broadcast_float(-128)));
        }
    }
};

// Weights of slow pairs, of one head: of channel c those from c * row on.
struct SlowWeights {
    const int16_t* weights;  // [pairs, 2]
    size_t row;
    const uint8_t* bytes;    // [words, 4], 128 too high
    size_t byte_row;
    const float* units;      // what 1 of `bytes` is in `weights`
    size_t unit_row;
};

// PER_WORD columns lie beside each other in 32 bits.
template <int PER_WORD>
class Columns {
    static constexpr bool QUIET = PER_WORD == 4;
    static constexpr int GROUP = QUIET ? 48 : 96;      // columns that share a step
    static constexpr int SHRUNK = 508;                 // of 2^15: from 16 bits of weights to 8, which end at 127
    static constexpr float STEP = 32768.0f / SHRUNK;   // of these 8 bits
    static constexpr int RUN = QUIET ? 64 : 32;        // columns that are turned at a time

    const RankedReader& states;
    const int first, count, lanes, n;
    const int words, filled, groups;  // words of 32 bits with columns; their room
    int16_t* most;      // [filled * PER_WORD] the highest level of a column, in steps of its group
    float* steps;       // [groups]
    Words* levels;      // [n / 16, filled] of 16 tokens
    int32_t* weights;   // [filled, lanes]
    int32_t* offsets;   // [groups, lanes] what sums begin with: levels of 8 bits are stored 128 too high

    static int filled_of(int count) { return (count + RUN - 1) / RUN * RUN / PER_WORD; }
    static int groups_of(int count) { return (count + GROUP - 1) / GROUP; }
    // The channel of a column; past the last any will do, since levels there are 0.
    int channel(int column) const { return states.ranks.order[first + std::min(column, count - 1)]; }
    int32_t* at(int word, int lane) const { return weights + (size_t)word * lanes + lane; }

  public:
    static size_t bytes(int count, int n, int lanes) {
        const size_t filled = filled_of(count), groups = groups_of(count);
        return filled * (2 * PER_WORD + n / 16 * 64 + 4 * (size_t)lanes) + 4 * groups * (1 + lanes) + 5 * 64;
    }
    Columns(const RankedReader& states, int first, int count, int lanes, Workspace& workspace)
        : states(states),
          first(first),
          count(count),
          lanes(lanes),
          n(states.n),
          words((count + PER_WORD - 1) / PER_WORD),
          filled(filled_of(count)),
          groups(groups_of(count)) {
        most = workspace.take<int16_t>((size_t)filled * PER_WORD);
        steps = workspace.take<float>(groups);
        levels = workspace.take<Words>((size_t)n / 16 * filled);
        weights = workspace.take<int32_t>((size_t)filled * lanes);
        offsets = workspace.take<int32_t>((size_t)groups * lanes);
    }

    // Chooses the steps. `highest`: of each column of the block, the highest state times the unit of its weight.
    void set_steps(const float* highest) const {
        std::fill_n(most, (size_t)filled * PER_WORD, 0);
        for (int group = 0; group < groups; group++) {
            const int begin = group * GROUP, end = std::min(count, begin + GROUP);
            float top = 0, total = 0;
            for (int c = begin; c < end; c++) {
                top = std::max(top, highest[first + c]);
                total += highest[first + c];
            }
            // Rounding adds at most 1 to each.
            const float limit = (float)(INT32_MAX / WEIGHT_LIMIT - GROUP) * 0.999f;
            const float step = std::max({QUIET ? top / 127 : std::max(total / limit, top / 32767), 1e-30f});
            for (int c = begin; c < end; c++) most[c] = (int16_t)std::lrintf(highest[first + c] / step);
            steps[group] = QUIET ? step * STEP : step;
        }
    }

    // Brings levels, in steps of their group, into an order with tokens as lanes.
    void turn_levels() const {
        for (int c = 0; c < count; c += RUN)
            for (int t = 0; t < n; t += 16) {
                Words found[16];
                for (int i = 0; i < 16; i++) {
                    const int16_t* from = states.levels + (size_t)(t + i) * states.stride + first + c;
                    found[i] = multiply_q15(load(from), load(most + c));
                    if constexpr (QUIET) {
                        const Words above = multiply_q15(load(from + 32), load(most + c + 32));
                        found[i] = narrow(add16(found[i], broadcast16(128)), add16(above, broadcast16(128)));
                    }
                }
                transpose(found);
                for (int i = 0; i < 16; i++) levels[t / 16 * filled + c / PER_WORD + i] = found[i];
            }
    }

    // Gathers weights [C, .], `row` from channel to channel and of 16 bits, for lanes 0 to `width`, a multiple of 32.
    void gather(const int16_t* from, size_t row, int width) const {
        for (int w = 0; w < words; w++) {
            const int16_t* column[PER_WORD];
            for (int k = 0; k < PER_WORD; k++) column[k] = from + channel(w * PER_WORD + k) * row;
            for (int d = 0; d < width; d += 32) {
                Words weight[PER_WORD];
                for (int k = 0; k < PER_WORD; k++) weight[k] = load(column[k] + d);
                if constexpr (QUIET) {
                    for (Words& each : weight) each = multiply_q15(each, broadcast16(SHRUNK));
                    const Words a = weight[0], b = weight[1], c = weight[2], e = weight[3];
                    store(at(w, d), join_bytes(zip_low16(a, c), zip_low16(b, e)));
                    store(at(w, d + 16), join_bytes(zip_high16(a, c), zip_high16(b, e)));
                } else {
                    store(at(w, d), zip_low16(weight[0], weight[1]));
                    store(at(w, d + 16), zip_high16(weight[0], weight[1]));
                }
            }
        }
    }

    // Makes rows of slow pairs for the lanes from `lane` on, AT_A_TIME columns at a time.
    void make_slow(const SlowFactors& slow, const SlowWeights& from, int lane) const {
        constexpr int AT_A_TIME = 8;
        constexpr bool BYTES = QUIET && FAST_BYTES;
        const Floats shrunk = broadcast_float(QUIET ? 1 / STEP : 1);
        for (int c = 0; c < count; c += AT_A_TIME) {
            const int16_t* weights[AT_A_TIME];
            const uint8_t* bytes[AT_A_TIME];
            float units[AT_A_TIME];
            for (int k = 0; k < AT_A_TIME; k++) {
                const size_t column = channel(c + k);
                weights[k] = from.weights + column * from.row;
                bytes[k] = from.bytes + column * from.byte_row;
                units[k] = from.units[column * from.unit_row];
            }
            for (int i = 0; i < slow.rows; i += 16) {
                Words sums[AT_A_TIME];
                for (Words& sum : sums) sum = BYTES ? load(slow.offsets + i) : zero_words();
                const int steps = BYTES ? slow.words : slow.pairs;
                for (int j = 0; j < steps; j++) {
                    const Words factor = load((BYTES ? slow.bytes : slow.factors) + (size_t)j * slow.rows + i);
                    for (int k = 0; k < AT_A_TIME; k++) {
                        if constexpr (BYTES) {
                            int32_t four;
                            std::memcpy(&four, bytes[k] + 4 * j, 4);
                            sums[k] = dot8(sums[k], broadcast(four), factor);
                        } else {
                            sums[k] = dot16(sums[k], factor, broadcast(pair_at(weights[k], j)));
                        }
                    }
                }
                const Floats inverse = load_floats((BYTES ? slow.byte_inverse : slow.inverse) + i) * shrunk;
                for (int k = 0; k < AT_A_TIME; k++) {
                    Floats scale = inverse;
                    if constexpr (BYTES) scale = scale * broadcast_float(units[k]);
                    sums[k] = to_nearest(to_floats(sums[k]) * scale);
                }
                for (int k = 0; k < AT_A_TIME; k += PER_WORD) {
                    int32_t* to = at((c + k) / PER_WORD, lane + i);
                    if constexpr (QUIET)
                        store(to, join_bytes(join_words(sums[k], sums[k + 2]), join_words(sums[k + 1], sums[k + 3])));
                    else
                        store(to, join_words(sums[k], sums[k + 1]));
                }
            }
        }
    }

    // Sets what sums begin with, after all weights are there.
    void set_offsets() const {
        if constexpr (QUIET)
            for (int group = 0; group < groups; group++) {
                int32_t* to = offsets + (size_t)group * lanes;
                const int last = std::min((group + 1) * GROUP / PER_WORD, words);
                for (int lane = 0; lane < lanes; lane += 16) {
                    Words total = zero_words();
                    for (int w = group * GROUP / PER_WORD; w < last; w++)
                        total = dot8(total, broadcast(0x01010101), load(at(w, lane)));
                    store(to + lane, total);
                }
                for (int lane = 0; lane < lanes; lane++) to[lane] *= -128;
            }
    }

    // Adds the products of BUILT_ROWS lanes of weights with the levels of 16 T tokens from t on.
    template <int T>
    inline __attribute__((always_inline)) void add(int lane, int t, Floats (&found)[BUILT_ROWS][T]) const {
        const Words* from = levels + t / 16 * filled;
        for (int group = 0; group < groups; group++) {
            Words sums[BUILT_ROWS][T];
            for (int i = 0; i < BUILT_ROWS; i++)
                for (int k = 0; k < T; k++)
                    sums[i][k] = QUIET ? broadcast(offsets[(size_t)group * lanes + lane + i]) : zero_words();
            const int last = std::min((group + 1) * GROUP / PER_WORD, words);
            for (int w = group * GROUP / PER_WORD; w < last; w++) {
                Words level[T];
                for (int k = 0; k < T; k++) level[k] = from[k * filled + w];
                const int32_t* weight = at(w, lane);
                unroll<BUILT_ROWS>([&](auto i) {
                    const Words each = broadcast(weight[i]);
                    for (int k = 0; k < T; k++)
                        sums[i][k] = QUIET ? dot8(sums[i][k], level[k], each) : dot16(sums[i][k], level[k], each);
                });
            }
            const Floats step = broadcast_float(steps[group]);
            for (int i = 0; i < BUILT_ROWS; i++)
                for (int k = 0; k < T; k++) found[i][k] = fma(to_floats(sums[i][k]), step, found[i][k]);
        }
    }
};

}  // namespace
