// Affine codes to rows: code * scale + zero in fp32. The product of a code and an fp16 scale is exact in
// fp32, so this rounds once, as torch does whether or not it fuses the two.
#pragma once
#include "packing.h"

namespace {

template <int DTYPE>
struct Decoding : Block {
    static int range_parts(const Layout& layout) { return layout.ranges; }
    bool do_ranges(int range) const {
        const int64_t from = layout.stored(number, range, 0);
        const ptrdiff_t step = layout.stored_step();
        float *zero = zeros + range * layout.width, *scale = scales + range * layout.width;
        for (int i = 0; i < layout.across; i++) {
            zero[i] = half_to_float(call.zero[from + i * step]);
            scale[i] = half_to_float(call.scale[from + i * step]);
        }
        return false;
    }

    void do_strip(int strip, uint8_t* scratch) const {
        pick_unpack_strip(call.bits)(layout.packed(number, strip), layout.length, scratch, layout.stride(),
                                     layout.bytes_of(strip));
        restore(strip, scratch);
    }

    void put(int t, int c, Words codes, int count) const {
        Floats x = to_floats(codes) * layout.entries(scales, t, c) + layout.entries(zeros, t, c);
        // The top code of a rounded-up scale may lie past fp16.
        if (DTYPE == XQ_FLOAT16) x = within_halves(x);
        store_as<DTYPE>(call.rows, layout.element(number, t, c), x, count);
    }

    // The inverse of Sealing::quantize.
    void restore(int strip, const uint8_t* scratch) const {
        if (!call.head) {
            const int c = strip * STRIP, lanes = std::min(STRIP, call.channels - c);
            for (int t = 0; t < call.tokens; t++)
                for (int j = 0; j < lanes; j += 16)
                    put(t, c + j, load_bytes(scratch + (size_t)t * STRIP + j), lanes - j);
        } else if (call.channel_lanes) {
            const Words mask = broadcast(255);
            for (int t = 0; t < call.tokens; t += 4) {
                const Words quad = load(scratch + t * 16);
                put(t, strip * 16, quad & mask, 16);
                put(t + 1, strip * 16, shift_right32<8>(quad) & mask, 16);
                put(t + 2, strip * 16, shift_right32<16>(quad) & mask, 16);
                put(t + 3, strip * 16, shift_right32<24>(quad), 16);
            }
        } else {
            const int tiles = call.tokens / 16, c = strip / tiles * call.head, t = strip % tiles * 16;
            for (int lane = 0; lane < 16; lane++)
                for (int k = 0; k < call.head; k += 16)
                    put(t + lane, c + k, load_quads(scratch + k / 4 * STRIP + lane * 4, STRIP), 16);
        }
    }
};

inline int decode(const xq_blocks& call) { return work<Decoding>(call); }

}  // namespace
