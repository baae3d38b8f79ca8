// Rows to affine codes: ranges, codes, tiles and planes in one go, bit for bit what quant/affine.py and
// quant/pack.py make of them (but for the sign of a zero, which they leave to the order of their sums).
#pragma once
#include "packing.h"

namespace {

template <int DTYPE>
struct Sealing : Block {
    Floats levels() const { return broadcast_float((float)((1 << call.bits) - 1)); }
    bool hidden(int t) const {
        return !call.per_token && call.hidden && call.hidden[number * call.tokens + t];
    }

    // Ranges of all tokens for 64 channels, or of all channels for 16 tokens. True: there was NaN.
    static int range_parts(const Layout& layout) {
        const int strips = (layout.call.channels + STRIP - 1) / STRIP;
        return layout.call.per_token ? layout.width / 16 : layout.ranges * strips;
    }
    bool do_ranges(int part) const {
        Floats poison = broadcast_float(0);
        if (call.per_token) {
            for (int range = 0; range < layout.ranges; range++) of_channels(range, part * 16, poison);
        } else {
            const int strips = (call.channels + STRIP - 1) / STRIP;
            of_tokens(part / strips, part % strips * STRIP, poison);
        }
        const float nothing = sum(poison);
        return nothing != nothing;
    }

    void of_channels(int range, int t, Floats& poison) const {
        alignas(64) float low[16] = {}, high[16] = {};
        const int count = std::min(16, call.tokens - t);
        const int start = range * call.group, stop = std::min(start + call.group, call.channels);
        for (int i = 0; i < count; i++) {
            Floats least = broadcast_float(INFINITY), most = broadcast_float(-INFINITY);
            for (int c = start; c < stop; c += 16) {
                // The last 16 of a range may be met twice.
                const int from = stop - start >= 16 ? std::min(c, stop - 16) : c;
                see(load_as<DTYPE>(call.rows, layout.element(number, t + i, from), stop - from), least, most, poison);
            }
            low[i] = lowest(least);
            high[i] = highest(most);
        }
        finish(load_floats(low), load_floats(high), range, t, count);
    }

    void of_tokens(int range, int c, Floats& poison) const {
        Floats low[4], high[4];
        const int start = range * call.group, stop = std::min(start + call.group, call.tokens);
        const int lanes = std::min(STRIP, call.channels - c);
        for (int j = 0; j < 4; j++) low[j] = broadcast_float(INFINITY), high[j] = broadcast_float(-INFINITY);
        for (int t = start; t < stop; t++) {
            if (hidden(t)) continue;
            for (int j = 0; j < 4 && j * 16 < lanes; j++)
                see(load_as<DTYPE>(call.rows, layout.element(number, t, c + j * 16), lanes - j * 16), low[j], high[j],
                    poison);
        }
        for (int j = 0; j < 4 && j * 16 < lanes; j++)
            finish(low[j], high[j], range, c + j * 16, std::min(16, lanes - j * 16));
    }

    // Poison becomes NaN once it meets NaN, and stays 0 until then.
    static void see(Floats x, Floats& low, Floats& high, Floats& poison) {
        x = within_halves(x);
        low = minimum(low, x);
        high = maximum(high, x);
        poison = fma(x, broadcast_float(0), poison);
    }

    // Scale and zero of `count` ranges that are neighbours in the tables, from their ends.
    void finish(Floats low, Floats high, int range, int at, int count) const {
        alignas(64) uint16_t zero_halves[16], scale_halves[16];
        alignas(64) float divisor[16];
        const Floats none = low;  // where all is hidden the lowest is above the highest, and both become 0
        low = zero_below(low, high, none);
        high = zero_below(high, high, none);
        store_halves(zero_halves, low);
        Floats zero = load_halves(zero_halves);
        Floats scale = maximum(high - zero, broadcast_float(0)) / levels();
        store_halves(scale_halves, minimum(scale, broadcast_float(HALF_MAX)));
        scale = load_halves(scale_halves);
        store_floats(divisor, scale);
        for (int i = 0; i < 16; i++) divisor[i] = divisor[i] == 0 ? INFINITY : divisor[i];  // code 0
        store_floats(zeros + range * layout.width + at, zero);
        store_floats(scales + range * layout.width + at, load_floats(divisor));
        if (call.zero_shift != 0) {  // codes do not depend on it
            store_halves(zero_halves, zero + broadcast_float(call.zero_shift) * scale);
            store_halves(scale_halves, broadcast_float(call.scale_share) * scale);
        }
        const int64_t to = layout.stored(number, range, at);
        for (int i = 0; i < count; i++) {
            call.zero[to + i * layout.stored_step()] = zero_halves[i];
            call.scale[to + i * layout.stored_step()] = scale_halves[i];
        }
    }

    // Codes of channels c to c + 15 of a token; only `count` are there.
    Words codes(int t, int c, int count) const {
        Floats x = broadcast_float(0);
        if (!hidden(t)) x = within_halves(load_as<DTYPE>(call.rows, layout.element(number, t, c), count));
        x = (x - layout.entries(zeros, t, c)) / layout.entries(scales, t, c);
        return to_nearest(minimum(maximum(x, broadcast_float(0)), levels()));
    }

    void do_strip(int strip, uint8_t* scratch) const {
        std::memset(scratch + (size_t)layout.length * STRIP, 0, 7 * STRIP);
        quantize(strip, scratch);
        pick_pack_strip(call.bits)(scratch, layout.length, layout.packed(number, strip), layout.stride(),
                                   layout.bytes_of(strip));
    }

    // Puts the codes of a strip to `scratch` [length][64].
    void quantize(int strip, uint8_t* scratch) const {
        if (!call.head) {
            const int c = strip * STRIP, lanes = std::min(STRIP, call.channels - c);
            for (int t = 0; t < call.tokens; t++)
                for (int j = 0; j < lanes; j += 16)
                    store_bytes(scratch + (size_t)t * STRIP + j, codes(t, c + j, lanes - j));
        } else if (call.channel_lanes) {
            for (int t = 0; t < call.tokens; t += 4) {
                Words quad = codes(t, strip * 16, 16);
                quad = quad | shift_left32<8>(codes(t + 1, strip * 16, 16));
                quad = quad | shift_left32<16>(codes(t + 2, strip * 16, 16));
                store(scratch + t * 16, quad | shift_left32<24>(codes(t + 3, strip * 16, 16)));
            }
        } else {
            const int tiles = call.tokens / 16, c = strip / tiles * call.head, t = strip % tiles * 16;
            for (int lane = 0; lane < 16; lane++)
                for (int k = 0; k < call.head; k += 16) {
                    uint8_t bytes[16];
                    store_bytes(bytes, codes(t + lane, c + k, 16));
                    for (int i = 0; i < 4; i++)
                        std::memcpy(scratch + (k / 4 + i) * STRIP + lane * 4, bytes + i * 4, 4);
                }
        }
    }
};

inline int seal(const xq_blocks& call) { return work<Sealing>(call); }

}  // namespace
