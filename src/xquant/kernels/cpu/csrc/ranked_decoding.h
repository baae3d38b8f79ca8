// Packed ranked codes back to rows: x[t, c] = level[t, c] * scale_c * gain_t. Scales and gains are powers of 2^(1/3),
// kept as 4 bits. The channels with the largest scales have the widest codes (ranking.h), those after the last width
// none: they are 0. Equals `quant.ranked.Ranked.decode`, bit for bit.
#pragma once
#include "ranking.h"
#include "trellis.h"

namespace {

// Decodes one block.
class RankedDecoding {
  public:
    static constexpr int TOGETHER = 1;
    static size_t bytes(const xq_ranked_blocks& call, int) {
        return Ranking::bytes(call.channels) + (size_t)call.tokens * row_of(call.channels) + 64;
    }
    RankedDecoding(const xq_ranked_blocks& call, int, Workspace& workspace)
        : call(call), ranks(call.channels, workspace) {
        windows = workspace.take<uint8_t>((size_t)call.tokens * row_of(call.channels));
    }

    bool run(int number, int) {
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

// Runs Work on all blocks, a few at a time.
template <class Work>
int for_each_ranked_block(const xq_ranked_blocks& call) {
    const int threads = std::max(call.threads, 1);
    const int together = std::max(1, std::min(Work::TOGETHER, (call.blocks + threads - 1) / threads));
    int failed = 0, nan = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed, nan)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(Work::bytes(call, together));
        failed += !ready;
#pragma omp for schedule(static)
        for (int first = 0; first < call.blocks; first += together) {
            if (!ready) continue;
            workspace.next = workspace.base;
            const int count = std::min(together, call.blocks - first);
            nan += !Work(call, together, workspace).run(first, count);
        }
    }
    return failed ? XQ_NO_MEMORY : nan ? XQ_FOUND_NAN : XQ_DONE;
}

// xq_ranked_decode.
inline int ranked_decode(const xq_ranked_blocks& call) { return for_each_ranked_block<RankedDecoding>(call); }

}  // namespace
