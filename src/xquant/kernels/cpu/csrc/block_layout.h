// How a block of codes with a scale and a zero per range lies in memory, and how its codes are packed.
#pragma once
#include "packing.h"
#include "workspace.h"

namespace {

// Where things are in a block. Scales and zeros of its ranges are in tables of floats [ranges][width]: an entry of a
// row is for a token where ranges are of channels, and for a channel where they are of tokens.
struct BlockLayout {
    const xq_affine_blocks& call;
    int across;          // tokens, or channels: each has `ranges` ranges
    int ranges, width;   // width: `across` rounded up to 16
    int strips, length;  // of a strip: [length][64]
    int of_head;         // strips of a head whose lanes are tokens: tiles, then their rest (tiles.h) if there is one
    size_t strip_bytes;  // from a packed strip to the next
    size_t head_bytes;   // from those of a head to the next
    size_t block_bytes;  // packed
    int32_t* entry_at;   // where the range of a token, or of 16 channels from every 4th on, begins in a table; -1: several

    explicit BlockLayout(const xq_affine_blocks& call)
        : call(call), across(call.per_token ? call.tokens : call.channels) {
        const int along = call.per_token ? call.channels : call.tokens;
        ranges = (along + call.group - 1) / call.group;
        width = (across + 15) / 16 * 16;
        of_head = 1;
        if (call.head && call.channel_lanes) {
            length = call.tokens / 4;
            strips = (call.channels + 15) / 16;
            head_bytes = strip_bytes = tile_bytes(call.tokens, call.bits);
            block_bytes = strips * strip_bytes;
        } else if (call.head) {
            const int heads = call.channels / call.head;
            length = call.head / 32 * 8;
            of_head = call.tokens / 16 + (rest_quads(call.head) > 0);
            strips = heads * of_head;
            strip_bytes = tile_bytes(call.head, call.bits);
            head_bytes = tiles_bytes(call.head, call.tokens, call.bits);
            block_bytes = heads * head_bytes;
        } else {
            length = call.tokens;
            strips = (call.channels + STRIP - 1) / STRIP;
            head_bytes = strip_bytes = STRIP;
            size_t rows = 0;
            for (int plane = 8; plane; plane /= 2) rows += (call.bits & plane) ? (length * plane + 7) / 8 : 0;
            block_bytes = rows * call.channels;
        }
    }

    int entry_count() const { return call.per_token ? (call.channels + 3) / 4 : call.tokens; }
    void set_entries(int32_t* at) {
        entry_at = at;
        for (int i = 0; i < entry_count(); i++) {
            const int from = call.per_token ? i * 4 : i;
            const int last = call.per_token ? std::min(from + 15, call.channels - 1) : i;
            entry_at[i] = from / call.group == last / call.group ? from / call.group * width : -1;
        }
    }
    size_t table() const { return (size_t)ranges * width; }
    int length_of(int strip) const { return is_rest(strip) ? call.tokens / 16 * rest_quads(call.head) : length; }
    bool is_rest(int strip) const { return of_head > 1 && strip % of_head == call.tokens / 16; }
    size_t scratch() const {
        const int rest = of_head > 1 ? call.tokens / 16 * rest_quads(call.head) : 0;
        return (size_t)(std::max(length, rest) + 8) * STRIP;
    }

    // The entries of a table for channels c to c + 15 of a token, c a multiple of 4.
    Floats entries(const float* table, int t, int c) const {
        if (!call.per_token) return load_floats(table + entry_at[t] + c);
        if (entry_at[c / 4] >= 0) return broadcast_float(table[entry_at[c / 4] + t]);
        alignas(64) float each[16];
        for (int i = 0; i < 16; i++) each[i] = table[std::min((c + i) / call.group, ranges - 1) * width + t];
        return load_floats(each);
    }
    int64_t element(int64_t block, int t, int c) const { return block * call.block_stride + t * call.token_stride + c; }
    // Where scale and zero are stored. Ranges of channels lie range by range where codes are in tiles, and token by
    // token where they are in rows.
    bool by_range() const { return !call.per_token || call.head; }
    int64_t stored(int64_t block, int range, int at) const {
        return block * ranges * across + (by_range() ? (int64_t)range * across + at : (int64_t)at * ranges + range);
    }
    ptrdiff_t stored_step() const { return by_range() ? 1 : ranges; }

    uint8_t* packed(int64_t block, int strip) const {
        return call.codes + block * block_bytes + strip / of_head * head_bytes + strip % of_head * strip_bytes;
    }
    ptrdiff_t stride() const { return call.head ? STRIP : call.channels; }
    int bytes_of(int strip) const { return call.head ? STRIP : std::min(STRIP, call.channels - strip * STRIP); }
    // Of a strip whose lanes are tokens: calls found(token, channel, quads, at, step) for up to 4 quads of channels that
    // follow each other. Their codes lie in the strip from `at` on, `step` apart.
    template <class Found>
    void each_run(int strip, Found found) const {
        const int tiles = call.tokens / 16, first = strip / of_head * call.head, half = call.head / 2;
        const int in_units = call.head / 32 * 16;  // channels of a half
        if (!is_rest(strip)) {
            for (int lane = 0; lane < 16; lane++)
                for (int k = 0; k < 2 * in_units; k += 16) {
                    const int c = k < in_units ? k : k - in_units + half;
                    found(strip % of_head * 16 + lane, first + c, 4, k / 4 * STRIP + lane * 4, STRIP);
                }
            return;
        }
        const int quads = (half - in_units) / 4;
        for (int t = 0; t < tiles * 16; t++)
            for (int upper = 0; upper < 2; upper++)
                found(t, first + in_units + upper * half, quads, (t / 16 * 2 * quads + upper) * STRIP + t % 16 * 4,
                      2 * STRIP);
    }
    // Packs the codes of a strip, of which found(t, c, count) gives those of channels c to c + 15 of a token, c a
    // multiple of 4; of the row, `count` more exist. `scratch` has scratch() bytes.
    template <class Found>
    void pack(int64_t block, int strip, uint8_t* scratch, Found found) const {
        const int length = length_of(strip);
        std::memset(scratch + (size_t)length * STRIP, 0, 7 * STRIP);
        arrange(strip, scratch, found);
        pick_pack_strip(call.bits)(scratch, length, packed(block, strip), stride(), bytes_of(strip));
    }
    // The same as rows [length][64].
    template <class Found>
    void arrange(int strip, uint8_t* scratch, Found found) const {
        if (!call.head) {
            const int c = strip * STRIP, lanes = std::min(STRIP, call.channels - c);
            for (int t = 0; t < call.tokens; t++)
                for (int j = 0; j < lanes; j += 16)
                    store_bytes(scratch + (size_t)t * STRIP + j, found(t, c + j, lanes - j));
        } else if (call.channel_lanes) {
            const int c = strip * 16, lanes = std::min(16, call.channels - c);
            for (int t = 0; t < call.tokens; t += 4) {
                Words quad = found(t, c, lanes);
                quad = quad | shift_left32<8>(found(t + 1, c, lanes));
                quad = quad | shift_left32<16>(found(t + 2, c, lanes));
                store(scratch + t * 16, quad | shift_left32<24>(found(t + 3, c, lanes)));
                std::memset(scratch + t * 16 + lanes * 4, 0, STRIP - lanes * 4);
            }
        } else {
            each_run(strip, [&](int t, int c, int quads, int at, int step) {
                uint8_t bytes[16];
                store_bytes(bytes, found(t, c, std::min(16, call.channels - c)));
                for (int i = 0; i < quads; i++) std::memcpy(scratch + at + i * step, bytes + i * 4, 4);
            });
        }
    }
    // Small blocks are not worth waking threads for.
    int threads() const {
        return (int64_t)call.blocks * call.tokens * call.channels < 32768 ? 1 : std::max(call.threads, 1);
    }
};

}  // namespace
