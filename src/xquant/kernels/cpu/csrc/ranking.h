// The order of the channels of a block of ranked codes: by falling scale, of equal scales the lower channel first,
// as `quant.ranked.Ranked` sorts them. Scales are powers of 2^(1/3), so the order is that of whole numbers, and two
// counting sorts find it in linear time.
#pragma once
#include <algorithm>

#include "workspace.h"

namespace {

constexpr int USUAL_PLACE = 10;     // a channel's usual scale has this of the places 0 to 15
constexpr int UNIT_GAIN_PLACE = 8;  // a gain of 1 has this of the places 0 to 15
constexpr int FARTHEST = 400;       // steps from 0 to each end of the table of sizes

// Entry i of `count` packed numbers of 4 bits: byte i has number i in its low bits and number i + half above.
inline int nibble_at(const uint8_t* packed, int count, int i) {
    const int half = (count + 1) / 2;
    return i < half ? packed[i] & 15 : packed[i - half] >> 4;
}

// All of them.
inline void unpack_nibbles(const uint8_t* packed, int count, int* out) {
    const int half = (count + 1) / 2;
    for (int i = 0; i < half; i++) out[i] = packed[i] & 15;
    for (int i = half; i < count; i++) out[i] = packed[i - half] >> 4;
}

// 2^(steps / 3), from a table that points to the entry of 0 steps.
inline float size_of(const float* sizes, int steps) { return sizes[std::min(std::max(steps, -FARTHEST), FARTHEST)]; }

class Ranking {
  public:
    int* order;    // [C] channels
    float* sizes;  // [C] scales, by channel

    static size_t bytes(int channels) { return 4 * (sizeof(int) * (size_t)channels + 64); }
    Ranking(int channels, Workspace& workspace) : channels(channels) {
        order = workspace.take<int>(channels);
        sizes = workspace.take<float>(channels);
        keys = workspace.take<int>(channels);
        spare = workspace.take<int>(channels);
    }

    void read(const uint8_t* places, const int16_t* usual, const float* table) {
        const int C = channels;  // a copy, which nothing written to can change
        int highest = INT16_MIN, lowest = INT16_MAX, *powers = keys, *to = order;
        unpack_nibbles(places, C, powers);
        for (int c = 0; c < C; c++) {
            powers[c] += usual[c] - USUAL_PLACE;
            highest = std::max(highest, powers[c]);
            lowest = std::min(lowest, powers[c]);
        }
        for (int c = 0; c < C; c++) sizes[c] = size_of(table, powers[c]);
        for (int c = 0; c < C; c++) {
            to[c] = c;
            powers[c] = highest - powers[c];
        }
        // Most often all are near enough to each other for one digit.
        for (int shift = 0, range; (range = (highest - lowest) >> shift) > 0; shift += DIGIT) {
            std::swap(order, spare);
            sort(shift, std::min(range + 1, 1 << DIGIT), spare, order);
        }
    }

  private:
    static constexpr int DIGIT = 9;  // bits
    const int channels;
    int *keys, *spare;

    // Sorts channels by one of `digits` digits of their keys. Those with the same digit keep their order.
    void sort(int shift, int digits, const int* from, int* to) const {
        int next[1 << DIGIT];
        std::fill_n(next, digits, 0);
        for (int c = 0; c < channels; c++) next[digit(c, shift)]++;
        for (int i = 0, start = 0; i < digits; i++) {
            const int count = next[i];
            next[i] = start;
            start += count;
        }
        for (int i = 0; i < channels; i++) to[next[digit(from[i], shift)]++] = from[i];
    }
    int digit(int channel, int shift) const { return keys[channel] >> shift & ((1 << DIGIT) - 1); }
};

}  // namespace
