// Ranked codes to rows: level[code] * scale * gain. The channels of a block whose scales are largest have the
// widest codes (docs/format.md).
#pragma once
#include "packing.h"
#include "ranking.h"

namespace {

class RankedDecoding {
  public:
    static size_t bytes(const xq_ranked& call) {
        return Ranking::bytes(call.channels) + (size_t)call.tokens * call.channels + 64;
    }
    RankedDecoding(const xq_ranked& call, Arena& arena) : call(call), ranks(call.channels, arena) {
        codes = arena.take<uint8_t>((size_t)call.tokens * call.channels);
    }

    bool run(int number) {
        rank(number);
        const uint8_t* packed = call.codes + (size_t)number * call.code_bytes;
        const uint8_t* gains = call.gain + (size_t)number * ((call.tokens + 1) / 2);
        const float* levels = call.levels + 2;  // those of 2 bits follow those of 1 bit, and so on
        const float* tables[9] = {nullptr, call.levels};
        for (int bits = 2; bits <= 8; levels += (size_t)1 << bits++) tables[bits] = levels;
        int first = 0;
        for (int bits = 8; bits >= 1; bits--) {
            const int count = call.counts[bits - 1];
            if (!count) continue;
            packed = unpack(packed, bits, count);
            for (int t = 0; t < call.tokens; t++)
                write(number, t, first, count, tables[bits], size_of(call.sizes, nibble(gains, call.tokens, t) - EVEN_GAIN));
            first += count;
        }
        for (int t = 0; t < call.tokens; t++)
            for (int i = first; i < call.channels; i++) put(number, t, ranks.order[i], 0);
        return true;
    }

  private:
    const xq_ranked& call;
    Ranking ranks;
    uint8_t* codes;  // [tokens, count] of one width

    void rank(int number) {
        ranks.read(call.scale + (size_t)number * ((call.channels + 1) / 2), call.usual, call.sizes);
    }

    // The codes of `count` channels; returns where the next run begins.
    const uint8_t* unpack(const uint8_t* packed, int bits, int count) {
        int shift = 0;
        for (int width = 8; width >= 1; width /= 2) {
            if (!(bits & width)) continue;
            const int rows = (call.tokens * width + 7) / 8, mask = (1 << width) - 1;
            for (int run = 0; run < 8 / width; run++)
                for (int i = 0; i < rows && i + run * rows < call.tokens; i++) {
                    const uint8_t* from = packed + (size_t)i * count;
                    uint8_t* to = codes + (size_t)(i + run * rows) * count;
                    for (int c = 0; c < count; c++) {
                        const uint8_t code = (from[c] >> (run * width) & mask) << shift;
                        to[c] = shift ? to[c] | code : code;
                    }
                }
            packed += (size_t)rows * count;
            shift += width;
        }
        return packed;
    }

    void write(int number, int t, int first, int count, const float* table, float gain) {
        const uint8_t* row = codes + (size_t)t * count;
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
            ::put(call.rows, call.dtype, at, x);
    }
};

// Works on every block. 2: not enough memory, 1: there was NaN.
template <class Work>
int each_ranked(const xq_ranked& call) {
    int failed = 0, nan = 0;
#pragma omp parallel num_threads(std::max(call.threads, 1)) reduction(+ : failed, nan)
    {
        static thread_local Arena arena;
        const bool ready = arena.reserve(Work::bytes(call));
        failed += !ready;
#pragma omp for schedule(static)
        for (int number = 0; number < call.blocks; number++) {
            if (!ready) continue;
            arena.next = arena.base;
            nan += !Work(call, arena).run(number);
        }
    }
    return failed ? NO_MEMORY : nan ? FOUND_NAN : DONE;
}

inline int decode_ranked(const xq_ranked& call) { return each_ranked<RankedDecoding>(call); }

}  // namespace
