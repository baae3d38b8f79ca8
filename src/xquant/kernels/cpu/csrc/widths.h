// The widths of ranked codes (quant/trellis.py). A code of `code` bits is for one or two tokens. With the codes before
// it, the first code being preceded by the last, it makes a window of `window` bits, which selects the levels of its
// tokens from a table [2][256].
#pragma once
#include "packing.h"

namespace {

struct Width {
    int code, tokens, window;
};
constexpr int TRELLIS_WIDTHS = 7;  // those whose windows hold more than one code; the narrowest first, as all
constexpr int ALL_WIDTHS = 11;
constexpr Width WIDTHS[ALL_WIDTHS] = {{1, 2, 8}, {1, 1, 8}, {3, 2, 8}, {2, 1, 8}, {5, 2, 8}, {3, 1, 8},
                                      {4, 1, 8}, {5, 1, 5}, {6, 1, 6}, {7, 1, 7}, {8, 1, 8}};
constexpr int WINDOWS = 256;
constexpr int TABLE_SIZE = 2 * WINDOWS;

// Bytes of the packed codes of a channel, for a block of `tokens`, a multiple of 16.
inline size_t packed_bytes(const Width& width, int tokens) { return (size_t)tokens / width.tokens * width.code / 8; }

// Makes windows of codes [count][stride] of 8 bits each, `stride` a multiple of 64.
inline void codes_to_windows(const Width& width, int count, int stride, uint8_t* codes) {
    if (width.window == width.code) return;
    const int before = (width.window - 1) / width.code;  // codes in a window beside the last
    const Words kept = broadcast16((int16_t)((0xFF << width.code & 0xFF) * 0x0101));
    for (int c = 0; c < stride; c += 64) {
        Words window = zero_words();
        for (int i = -before; i < count; i++) {
            uint8_t* at = codes + (size_t)(i < 0 ? count + i : i) * stride + c;
            window = (shift_left16_by(window, width.code) & kept) | load(at);
            if (i >= 0) store(at, window);
        }
    }
}

}  // namespace
