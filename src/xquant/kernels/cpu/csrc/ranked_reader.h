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
// `end`: what is beyond the channels is of no use, and does no harm. Where there are 32 channels at most, a vector has
// them twice: beside each code of the first four eighths, the one four eighths later.
struct PackedStrip {
    static constexpr int HALF = STRIP / 2;

    const uint8_t* packed;
    ptrdiff_t stride;
    const uint8_t* end;
    int part;  // an eighth of the codes of a channel: the bytes of a plane of 1 bit

    template <class Load>
    Words row(const uint8_t* planes, int i, int size, Load load_from) const {
        const uint8_t* at = planes + i * stride;
        if (at + size <= end) return load_from(at);
        uint8_t bytes[STRIP] = {};
        std::memcpy(bytes, at, end - at);
        return load_from(bytes);
    }
    // The bytes with code i of an eighth in a plane of W bits, to be shifted by as much in both halves.
    template <int W, int EIGHTH, bool TWICE>
    Words bytes(const uint8_t* planes, int i) const {
        i += EIGHTH % W * part;
        if constexpr (!TWICE) return row(planes, i, STRIP, [](const uint8_t* at) { return load(at); });
        else if constexpr (W < 8) return high_half_down4(row(planes, i, HALF, load_twice));
        else return join_halves(row(planes, i, HALF, load_twice), row(planes, i + 4 * part, HALF, load_twice));
    }
    template <int BITS, int EIGHTH, bool TWICE, int SHIFT = 0>
    Words code(const uint8_t* planes, int i) const {
        constexpr int W = lowest_plane(BITS);
        const Words found = codes_of_plane<W, SHIFT, EIGHTH / W * W>(bytes<W, EIGHTH, TWICE>(planes, i));
        if constexpr (BITS == W) return found;
        else return found | code<BITS - W, EIGHTH, TWICE, SHIFT + W>(planes + W * part * stride, i);
    }
    // Writes the windows [8 part][64] of codes of CODE bits; where `TWICE`, of 32 channels.
    template <int CODE, int WINDOW, bool TWICE>
    void windows(uint8_t* out) const {
        constexpr int EIGHTHS = TWICE ? 4 : 8, BEFORE = before(CODE, WINDOW);
        const Words kept = broadcast16((int16_t)((0xFF << CODE & 0xFF) * 0x0101));
        Words window = zero_words();
        const auto add = [&](Words code) {
            window = CODE == WINDOW ? code : (shift_left16<CODE>(window) & kept) | code;
        };
        // Before the first code come the last, and before the later half of codes the earlier.
        unroll<EIGHTHS>([&](auto eighth) {
            for (int i = std::max(0, (EIGHTHS - eighth) * part - BEFORE); i < part; i++) {
                const Words found = code<CODE, eighth, TWICE>(packed, i);
                add(TWICE ? swap_halves(found) : found);
            }
        });
        unroll<EIGHTHS>([&](auto eighth) {
            for (int i = 0; i < part; i++, out += STRIP) {
                add(code<CODE, eighth, TWICE>(packed, i));
                if constexpr (TWICE) store_halves(out, out + (size_t)4 * part * STRIP, window);
                else store(out, window);
            }
        });
    }
    // Codes in a window beside the last.
    static constexpr int before(int code, int window) { return (window - 1) / code; }
};

template <bool TWICE, int... I>
void read_windows(int width, const PackedStrip& strip, uint8_t* out, std::integer_sequence<int, I...>) {
    using Windows = void (PackedStrip::*)(uint8_t*) const;
    static constexpr Windows all[] = {&PackedStrip::windows<WIDTHS[I].code, WIDTHS[I].window, TWICE>...};
    const Windows found = all[width];  // apart: else GCC 12's check of bounds reads an index that it has not set
    (strip.*found)(out);
}

// Writes the windows of up to `count` channels of a strip.
inline void read_windows(int width, const PackedStrip& strip, int count, uint8_t* out) {
    constexpr auto every = std::make_integer_sequence<int, ALL_WIDTHS>();
    const bool near = PackedStrip::before(WIDTHS[width].code, WIDTHS[width].window) <= 4 * strip.part;
    if (count <= PackedStrip::HALF && near) read_windows<true>(width, strip, out, every);
    else read_windows<false>(width, strip, out, every);
}

struct RankedReader {
    const xq_ranked_operand& operand;
    const int n;
    int coded = 0;   // channels that have bits
    int stride;      // of levels, from token to token; vectors are written whole
    Ranking ranks;
    uint8_t* windows;  // [n, 64]
    int* places;       // [n] of gains
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
        return Ranking::bytes(operand.channels) + n * (STRIP + 8 + 2 * stride_of(operand)) + 4 * 64;
    }
    RankedReader(const xq_ranked_operand& operand, Workspace& workspace)
        : operand(operand),
          n(operand.block),
          coded(coded_of(operand)),
          stride(stride_of(operand)),
          ranks(operand.channels, workspace) {
        windows = workspace.take<uint8_t>((size_t)n * STRIP);
        places = workspace.take<int>(n);
        gains = workspace.take<float>(n);
        levels = workspace.take<int16_t>((size_t)n * stride);
    }

    // Reads a block: sorts its channels, and finds gains and levels.
    void read(int64_t id) {
        ranks.read(at_address<uint8_t>(operand.scale[id]), operand.usual, operand.sizes);
        unpack_nibbles(at_address<uint8_t>(operand.gain[id]), n, places);
        for (int t = 0; t < n; t++) gains[t] = size_of(operand.sizes, places[t] - UNIT_GAIN_PLACE);
        read_levels(at_address<uint8_t>(operand.codes[id]));
    }

  private:
    void read_levels(const uint8_t* packed) const {
        const uint8_t* end = packed;
        for (int width = 0; width < ALL_WIDTHS; width++) end += packed_bytes(WIDTHS[width], n) * operand.counts[width];
        int first = 0;
        for (int width = ALL_WIDTHS - 1; width >= 0; width--) {
            const int count = operand.counts[width];
            for (int c = 0; c < count; c += STRIP) {
                const PackedStrip strip{packed + c, count, end, n / WIDTHS[width].tokens / 8};
                read_windows(width, strip, count - c, windows);
                const int channels = std::min(STRIP, count - c);
                if (WIDTHS[width].window <= 6) look_up_strip<64>(width, first + c, channels);
                else look_up_strip<WINDOWS>(width, first + c, channels);
            }
            packed += packed_bytes(WIDTHS[width], n) * count;
            first += count;
        }
    }

    // Windows are below `SIZE`.
    template <int SIZE>
    void look_up_strip(int width, int first, int count) const {
        const int tokens = WIDTHS[width].tokens;
        for (int v = 0; v < tokens; v++) {
            const LargeTable table = load_large_table(operand.levels + width * TABLE_SIZE + v * WINDOWS);
            for (int c = 0; c < count; c += 32) {
                int16_t* to = levels + (size_t)v * stride + first + c;
                for (int i = 0; i < n / tokens; i++, to += (size_t)tokens * stride)
                    store(to, look_up<SIZE>(table, windows + (size_t)i * STRIP + c));
            }
        }
    }
};

}  // namespace
