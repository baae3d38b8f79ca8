// Products of a few rows with the weight of a linear layer, packed in 4 or 8 bits in groups of 32 channels
// (linear/grouped.py has the layout). Reading the weight takes most of the time of one row, so it is read in order,
// once, and unpacked for all rows of a block.
//
// Rows are rounded to 15 bits of each group's highest, and products of integers are exact.
#pragma once
#include "xquant.h"
#include "elements.h"
#include "workspace.h"

namespace {

constexpr int WEIGHT_GROUP = 32, WEIGHT_LANES = 16;
constexpr int WEIGHTS_AHEAD = 4096;  // bytes that are asked for before they are read

// Rows in int16 [rows, C], with the scale and the sum of each group [rows, C / 32].
struct RoundedRows {
    int16_t* codes;
    float *scale, *sum;
    int channels, groups;
    static size_t bytes(int rows, int channels) {
        return (size_t)rows * channels * 2 + (size_t)rows * (channels / WEIGHT_GROUP) * 8 + 192;
    }
    RoundedRows(Workspace& workspace, int rows, int channels)
        : channels(channels), groups(channels / WEIGHT_GROUP) {
        codes = workspace.take<int16_t>((size_t)rows * channels);
        scale = workspace.take<float>((size_t)rows * groups);
        sum = workspace.take<float>((size_t)rows * groups);
    }
};

template <int DTYPE>
inline void round_row(const void* x, int r, const RoundedRows& out) {
    for (int g = 0; g < out.groups; g++) {
        const int64_t at = (int64_t)r * out.channels + g * WEIGHT_GROUP;
        const Floats low = load_as<DTYPE>(x, at), high = load_as<DTYPE>(x, at + 16);
        const float top = highest(maximum(absolute(low), absolute(high)));
        const float inverse = top > 0 ? 32767 / top : 0;
        const Words codes[2] = {to_nearest(low * broadcast_float(inverse)), to_nearest(high * broadcast_float(inverse))};
        store_low_words(out.codes + at, codes[0]);
        store_low_words(out.codes + at + 16, codes[1]);
        const size_t group = (size_t)r * out.groups + g;
        out.scale[group] = top / 32767;
        // Of what the codes are, so that the middle of a group's numbers adds no error; NaN and infinity stay.
        out.sum[group] = sum(to_floats(codes[0]) + to_floats(codes[1])) * (top / 32767) + 0 * sum(low + high);
    }
}

// The products of ROWS rows, from row `first` on, with 16 outputs.
template <int BITS, int ROWS>
inline void multiply_tile(const uint8_t* packed, const RoundedRows& x, int first, Floats (&y)[ROWS]) {
    constexpr int PAIRS = 16 / BITS, VECTORS = WEIGHT_GROUP / (2 * PAIRS);  // pairs of channels in a lane
    constexpr int RANGES = BITS == 4 ? 2 : 1;
    constexpr int SIZE = 64 * VECTORS + 2 * WEIGHT_LANES * RANGES;
    constexpr int CHAINS = ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;  // sums side by side, as none waits for the one before
    const Words mask = broadcast(((1 << BITS) - 1) * 0x00010001);
    for (int g = 0; g < x.groups; g++, packed += SIZE) {
        for (int line = 0; line < SIZE; line += 64) prefetch(packed + WEIGHTS_AHEAD + line);
        Words sums[ROWS][CHAINS];
        for (auto& row : sums)
            for (auto& chain : row) chain = zero_words();
        const int16_t* codes = x.codes + (size_t)first * x.channels + g * WEIGHT_GROUP;
        const auto add = [&](Words pair, int i) {
            for (int r = 0; r < ROWS; r++) {
                int32_t both;
                std::memcpy(&both, codes + (size_t)r * x.channels + 2 * i, 4);
                sums[r][i % CHAINS] = dot16(sums[r][i % CHAINS], pair, broadcast(both));
            }
        };
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const Words lane = load(packed + 64 * v);
            add(lane & mask, v * PAIRS);
            add(shift_right32<BITS>(lane) & mask, v * PAIRS + 1);
            if constexpr (PAIRS == 4) {
                add(shift_right32<2 * BITS>(lane) & mask, v * PAIRS + 2);
                add(shift_right32<3 * BITS>(lane) & mask, v * PAIRS + 3);
            }
        }
        const auto ranges = (const uint16_t*)(packed + 64 * VECTORS);
        const Floats scale = load_fp16(ranges);
        const Floats zero = RANGES == 2 ? load_fp16(ranges + WEIGHT_LANES) : scale * broadcast_float(-128);
        for (int r = 0; r < ROWS; r++) {
            Floats whole = to_floats(sums[r][0]);
            for (int chain = 1; chain < CHAINS; chain++) whole = whole + to_floats(sums[r][chain]);
            const size_t at = (size_t)(first + r) * x.groups + g;
            y[r] = fma(whole * broadcast_float(x.scale[at]), scale, y[r]);
            y[r] = fma(zero, broadcast_float(x.sum[at]), y[r]);
        }
    }
}

// Where a part's outputs go: from the column `first` on.
struct Outputs {
    void* rows;
    int64_t stride, first;
};

template <int BITS, int DTYPE, int ROWS>
inline void multiply_rows(
    const xq_linear_part& part, const Outputs& out, const RoundedRows& x, int tile, int first
) {
    const int start = tile * WEIGHT_LANES, count = std::min(WEIGHT_LANES, (int)part.outputs - start);
    const size_t size = (size_t)x.groups * (BITS == 4 ? 320 : 544);
    Floats y[ROWS];
    for (auto& row : y) row = part.bias ? load_as<DTYPE>(part.bias, start, count) : broadcast_float(0);
    multiply_tile<BITS, ROWS>(part.packed + tile * size, x, first, y);
    for (int r = 0; r < ROWS; r++) store_as<DTYPE>(out.rows, (first + r) * out.stride + out.first + start, y[r], count);
}

template <int BITS, int DTYPE>
inline int multiply_all(const xq_linear& call) {
    static thread_local Workspace workspace;
    if (!workspace.reserve(RoundedRows::bytes(call.rows, call.channels))) return XQ_NO_MEMORY;
    const RoundedRows x(workspace, call.rows, call.channels);
    const int threads = std::max(call.threads, 1);
    int ends[XQ_LINEAR_PARTS], tiles = 0;
    int64_t columns[XQ_LINEAR_PARTS], stride = 0;
    for (int i = 0; i < call.count; i++) {
        ends[i] = tiles += (int)(call.parts[i].outputs + WEIGHT_LANES - 1) / WEIGHT_LANES;
        columns[i] = stride;
        stride += call.parts[i].outputs;
    }
#pragma omp parallel for num_threads(threads) schedule(static) if (call.rows > 8)
    for (int r = 0; r < call.rows; r++) round_row<DTYPE>(call.x, r, x);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int number = 0; number < tiles; number++) {
        int i = 0;
        while (number >= ends[i]) i++;
        const xq_linear_part& part = call.parts[i];
        const Outputs out{call.out, stride, columns[i]};
        const int tile = number - (i ? ends[i - 1] : 0);
        int r = 0;
        for (; r + MAX_ROWS <= call.rows; r += MAX_ROWS) multiply_rows<BITS, DTYPE, MAX_ROWS>(part, out, x, tile, r);
        for (; r + 2 <= call.rows; r += 2) multiply_rows<BITS, DTYPE, 2>(part, out, x, tile, r);
        for (; r < call.rows; r++) multiply_rows<BITS, DTYPE, 1>(part, out, x, tile, r);
    }
    return XQ_DONE;
}

// xq_linear.
inline int linear(const xq_linear& call) {
    const auto with = [&](auto bits) {
        constexpr int BITS = decltype(bits)::value;
        switch (call.dtype) {
            case XQ_FLOAT32: return multiply_all<BITS, XQ_FLOAT32>(call);
            case XQ_BFLOAT16: return multiply_all<BITS, XQ_BFLOAT16>(call);
            default: return multiply_all<BITS, XQ_FLOAT16>(call);
        }
    };
    return call.bits == 4 ? with(std::integral_constant<int, 4>()) : with(std::integral_constant<int, 8>());
}

}  // namespace
