// Reads blocks of ranked codes: scales, gains, and levels as integers of 16 bits.
#pragma once
#include "ranking.h"
#include "widths.h"

namespace {

// Codes of a plane of W bits in a row of bytes; see pack_strip.
template <int W, int SHIFT, int BY>
Words codes_of_plane(Words bytes) {
    return shift_left16<SHIFT>(shift_right16<BY>(bytes) & broadcast16((int16_t)(((1 << W) - 1) * 0x0101)));
}

// The packed codes of up to 64 channels of one width. Rows are `stride` bytes apart. Vectors are read whole up to
// `end`: what is beyond the channels is of no use, and does no harm.
struct PackedStrip {
    const uint8_t* packed;
    ptrdiff_t stride;
    const uint8_t* end;
    int part;  // an eighth of the codes of a channel: the bytes of a plane of 1 bit

    Words row(const uint8_t* planes, int i) const {
        const uint8_t* at = planes + i * stride;
        if (at + STRIP <= end) return load(at);
        uint8_t bytes[STRIP] = {};
        std::memcpy(bytes, at, end - at);
        return load(bytes);
    }
    // Code i of an eighth.
    template <int BITS, int EIGHTH, int SHIFT = 0>
    Words code(const uint8_t* planes, int i) const {
        constexpr int W = lowest_plane(BITS);
        const Words found = codes_of_plane<W, SHIFT, EIGHTH / W * W>(row(planes, EIGHTH % W * part + i));
        if constexpr (BITS == W) return found;
        else return found | code<BITS - W, EIGHTH, SHIFT + W>(planes + W * part * stride, i);
    }
    // Writes the windows [8 part][64] of codes of CODE bits.
    template <int CODE, int WINDOW>
    void windows(uint8_t* out) const {
        const Words kept = broadcast16((int16_t)((0xFF << CODE & 0xFF) * 0x0101));
        Words window = zero_words();
        const auto add = [&](Words code) {
            window = CODE == WINDOW ? code : (shift_left16<CODE>(window) & kept) | code;
        };
        // Before the first code come the last.
        constexpr int BEFORE = (WINDOW - 1) / CODE;
        unroll<8>([&](auto eighth) {
            for (int i = std::max(0, (8 - eighth) * part - BEFORE); i < part; i++)
                add(code<CODE, eighth>(packed, i));
        });
        unroll<8>([&](auto eighth) {
            for (int i = 0; i < part; i++, out += STRIP) {
                add(code<CODE, eighth>(packed, i));
                store(out, window);
            }
        });
    }
};

template <int... I>
void read_windows(int width, const PackedStrip& strip, uint8_t* out, std::integer_sequence<int, I...>) {
    using Windows = void (PackedStrip::*)(uint8_t*) const;
    static constexpr Windows all[] = {&PackedStrip::windows<WIDTHS[I].code, WIDTHS[I].window>...};
    const Windows found = all[width];  // apart: else GCC 12's check of bounds reads an index that it has not set
    (strip.*found)(out);
}

struct RankedReader {
    const xq_ranked_operand& operand;
    const int n;
    int coded = 0;   // channels that have bits
    int stride;      // of levels, from token to token; vectors are written whole
    Ranking ranks;
    uint8_t* windows;  // [n, 64]
    float* gains;      // [n]
    int16_t* levels;   // [n, stride] by rank, 32767 is the highest of each width

    static int coded_of(const xq_ranked_operand& operand) {
        int coded = 0;
        for (int count : operand.counts) coded += count;
        return coded;
    }
    static int stride_of(const xq_ranked_operand& operand) {
        // Not a multiple of 4096 bytes, or the rows of a tile would compete for the same lines of the L1 cache.
        const int stride = coded_of(operand) / 32 * 32 + STRIP + 32;
        return stride % 1024 ? stride : stride + 32;
    }
    static size_t bytes(const xq_ranked_operand& operand) {
        const size_t n = operand.block;
        return Ranking::bytes(operand.channels) + n * (STRIP + sizeof(float) + 2 * stride_of(operand)) + 3 * 64;
    }
    RankedReader(const xq_ranked_operand& operand, Workspace& workspace)
        : operand(operand),
          n(operand.block),
          coded(coded_of(operand)),
          stride(stride_of(operand)),
          ranks(operand.channels, workspace) {
        windows = workspace.take<uint8_t>((size_t)n * STRIP);
        gains = workspace.take<float>(n);
        levels = workspace.take<int16_t>((size_t)n * stride);
    }

    // Reads scales and gains of a block and sorts its channels. Returns its codes.
    const uint8_t* open(int64_t id) {
        ranks.read(at_address<uint8_t>(operand.scale[id]), operand.usual, operand.sizes);
        const auto* packed = at_address<uint8_t>(operand.gain[id]);
        for (int t = 0; t < n; t++) gains[t] = size_of(operand.sizes, nibble_at(packed, n, t) - UNIT_GAIN_PLACE);
        return at_address<uint8_t>(operand.codes[id]);
    }

    // Reads the levels of a block.
    void read_levels(const uint8_t* packed) const {
        const uint8_t* end = packed;
        for (int width = 0; width < ALL_WIDTHS; width++) end += packed_bytes(WIDTHS[width], n) * operand.counts[width];
        int first = 0;
        for (int width = ALL_WIDTHS - 1; width >= 0; width--) {
            const int count = operand.counts[width];
            for (int c = 0; c < count; c += STRIP) {
                const PackedStrip strip{packed + c, count, end, n / WIDTHS[width].tokens / 8};
                read_windows(width, strip, windows, std::make_integer_sequence<int, ALL_WIDTHS>());
                look_up_strip(width, first + c, std::min(STRIP, count - c));
            }
            packed += packed_bytes(WIDTHS[width], n) * count;
            first += count;
        }
    }

  private:
    void look_up_strip(int width, int first, int count) const {
        const int tokens = WIDTHS[width].tokens;
        for (int v = 0; v < tokens; v++) {
            const LargeTable table = load_large_table(operand.levels + width * TABLE_SIZE + v * WINDOWS);
            for (int c = 0; c < count; c += 32) {
                int16_t* to = levels + (size_t)v * stride + first + c;
                for (int i = 0; i < n / tokens; i++, to += (size_t)tokens * stride)
                    store(to, look_up(table, windows + (size_t)i * STRIP + c));
            }
        }
    }
};

}  // namespace
