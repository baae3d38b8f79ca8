// The order of the channels of a block of ranked codes: by falling scale, of equal ones the first first.
#pragma once
#include <algorithm>

#include "workspace.h"

namespace {

constexpr int USUAL_PLACE = 10;     // the place of a channel's usual scale
constexpr int UNIT_GAIN_PLACE = 8;  // the place of a gain of 1
constexpr int FARTHEST = 400;       // steps in the table of sizes, either way

// Entry i of `count` numbers of 4 bits: byte i has i below and i + half above.
inline int nibble_at(const uint8_t* packed, int count, int i) {
    const int half = (count + 1) / 2;
    return i < half ? packed[i] & 15 : packed[i - half] >> 4;
}

// The number of so many steps, of a table around 0 steps.
inline float size_of(const float* sizes, int steps) { return sizes[std::min(std::max(steps, -FARTHEST), FARTHEST)]; }

class Ranking {
  public:
    int* order;    // [C] channels
    float* sizes;  // [C] of the channels, in their own order

    static size_t bytes(int channels) { return 4 * (sizeof(int) * (size_t)channels + 64); }
    Ranking(int channels, Workspace& workspace) : channels(channels) {
        order = workspace.take<int>(channels);
        sizes = workspace.take<float>(channels);
        keys = workspace.take<int>(channels);
        spare = workspace.take<int>(channels);
    }

    void read(const uint8_t* places, const int16_t* usual, const float* table) {
        for (int c = 0; c < channels; c++) {
            const int power = nibble_at(places, channels, c) + usual[c] - USUAL_PLACE;
            sizes[c] = size_of(table, power);
            keys[c] = HIGHEST - power;
            spare[c] = c;
        }
        sort(0, spare, order);
        sort(DIGIT, order, spare);
        std::swap(order, spare);
    }

  private:
    static constexpr int HIGHEST = 1 << 16, DIGIT = 9;  // keys are positive and have two digits
    const int channels;
    int *keys, *spare;

    // By one digit; numbers of the same digit stay in order.
    void sort(int shift, const int* from, int* to) const {
        int next[1 << DIGIT] = {};
        for (int c = 0; c < channels; c++) next[digit(c, shift)]++;
        for (int i = 0, start = 0; i < 1 << DIGIT; i++) {
            const int count = next[i];
            next[i] = start;
            start += count;
        }
        for (int i = 0; i < channels; i++) to[next[digit(from[i], shift)]++] = from[i];
    }
    int digit(int channel, int shift) const { return keys[channel] >> shift & ((1 << DIGIT) - 1); }
};

}  // namespace
