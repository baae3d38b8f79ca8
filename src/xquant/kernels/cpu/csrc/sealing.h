// Rows to packed affine codes and back. Over a range of a token or of a channel,
//
//     zero = min x,   scale = (max x - zero) / (2^bits - 1),   code = round((x - zero) / scale),
//
// with zero and scale rounded to fp16 before the codes are computed. Ranges, codes, tiles and planes of a block are
// made while it is in the cache. It equals `quant.affine.quantize`, `quant.pack.Tile.arrange` and
// `quant.pack.pack`, bit for bit but for the sign of a zero, which depends on the order in which a minimum is found.
//
// Decoding is code * scale + zero in fp32, as `quant.affine.dequantize`. The product of a code and an fp16 scale is
// exact in fp32, so this rounds once, as torch does whether or not it fuses the two.
#pragma once
#include "block_layout.h"

namespace {

// One block that is worked on, `number` of all, with two tables of its own.
struct BlockTask {
    const BlockLayout& layout;
    const xq_affine_blocks& call;
    int64_t number;
    float *zeros, *scales;
};

// Runs Work on all blocks: first on the ranges of a block, in jobs, then on its strips. It takes as many blocks at a
// time as there are threads, so that the second pass finds the rows in the cache. Threads share a single block too.
template <class Work>
int for_each_block(const xq_affine_blocks& call) {
    static thread_local Workspace shared;
    BlockLayout layout(call);
    const int threads = layout.threads(), wave = std::min(threads, call.blocks);
    const size_t table = layout.table();
    const size_t floats = 2 * wave * table + 16;  // the last 16 entries may begin anywhere in a table
    if (!shared.reserve(sizeof(float) * floats + sizeof(int32_t) * layout.entry_count() + 64))
        return XQ_NO_MEMORY;
    float* tables = shared.take<float>(floats);
    layout.set_entries(shared.take<int32_t>(layout.entry_count()));
    int failed = 0, nan = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed, nan)
    {
        static thread_local Workspace workspace;
        const bool ready = workspace.reserve(layout.scratch());
        failed += !ready;
        for (int from = 0; from < call.blocks; from += wave) {
            const int count = std::min(wave, call.blocks - from), jobs = Work::range_jobs(layout);
            auto block = [&](int i) {
                float* zeros = tables + 2 * i * table;
                return Work{{layout, call, from + i, zeros, zeros + table}};
            };
#pragma omp for schedule(static) collapse(2)
            for (int i = 0; i < count; i++)
                for (int job = 0; job < jobs; job++) nan += block(i).set_ranges(job);
#pragma omp for schedule(static) collapse(2)
            for (int i = 0; i < count; i++)
                for (int strip = 0; strip < layout.strips; strip++)
                    if (ready) block(i).convert_strip(strip, workspace.base);
        }
    }
    return failed ? XQ_NO_MEMORY : nan ? XQ_FOUND_NAN : XQ_DONE;
}

template <template <int> class Work>
int for_each_block(const xq_affine_blocks& call) {
    switch (call.dtype) {
        case XQ_FLOAT32: return for_each_block<Work<XQ_FLOAT32>>(call);
        case XQ_BFLOAT16: return for_each_block<Work<XQ_BFLOAT16>>(call);
        default: return for_each_block<Work<XQ_FLOAT16>>(call);
    }
}

// Encodes one block of rows of DTYPE.
template <int DTYPE>
struct AffineEncoding : BlockTask {
    Floats levels() const { return broadcast_float((float)((1 << call.bits) - 1)); }
    bool is_excluded(int t) const {
        return !call.per_token && call.excluded && call.excluded[number * call.tokens + t];
    }

    // A job is one range of tokens for 64 channels, or all ranges of channels for 16 tokens. True: there was NaN.
    static int range_jobs(const BlockLayout& layout) {
        const int strips = (layout.call.channels + STRIP - 1) / STRIP;
        return layout.call.per_token ? layout.width / 16 : layout.ranges * strips;
    }
    bool set_ranges(int job) const {
        Floats nan_probe = broadcast_float(0);
        if (call.per_token) {
            for (int range = 0; range < layout.ranges; range++) range_of_channels(range, job * 16, nan_probe);
        } else {
            const int strips = (call.channels + STRIP - 1) / STRIP;
            range_of_tokens(job / strips, job % strips * STRIP, nan_probe);
        }
        const float nothing = sum(nan_probe);
        return nothing != nothing;
    }

    void range_of_channels(int range, int t, Floats& nan_probe) const {
        alignas(64) float low[16] = {}, high[16] = {};
        const int count = std::min(16, call.tokens - t);
        const int start = range * call.group, stop = std::min(start + call.group, call.channels);
        for (int i = 0; i < count; i++) {
            Floats least = broadcast_float(INFINITY), most = broadcast_float(-INFINITY);
            for (int c = start; c < stop; c += 16) {
                // The last 16 elements of a range may be read twice.
                const int from = stop - start >= 16 ? std::min(c, stop - 16) : c;
                widen(load_as<DTYPE>(call.rows, layout.element(number, t + i, from), stop - from), least, most,
                      nan_probe);
            }
            low[i] = lowest(least);
            high[i] = highest(most);
        }
        store_range(load_floats(low), load_floats(high), range, t, count);
    }

    void range_of_tokens(int range, int c, Floats& nan_probe) const {
        Floats low[4], high[4];
        const int start = range * call.group, stop = std::min(start + call.group, call.tokens);
        const int lanes = std::min(STRIP, call.channels - c);
        for (int j = 0; j < 4; j++) low[j] = broadcast_float(INFINITY), high[j] = broadcast_float(-INFINITY);
        for (int t = start; t < stop; t++) {
            if (is_excluded(t)) continue;
            for (int j = 0; j < 4 && j * 16 < lanes; j++)
                widen(load_as<DTYPE>(call.rows, layout.element(number, t, c + j * 16), lanes - j * 16), low[j], high[j],
                      nan_probe);
        }
        for (int j = 0; j < 4 && j * 16 < lanes; j++)
            store_range(low[j], high[j], range, c + j * 16, std::min(16, lanes - j * 16));
    }

    // Widens a range by x. `nan_probe` is 0 until x is NaN, and NaN from then on.
    static void widen(Floats x, Floats& low, Floats& high, Floats& nan_probe) {
        x = clamp_to_fp16(x);
        low = minimum(low, x);
        high = maximum(high, x);
        nan_probe = fma(x, broadcast_float(0), nan_probe);
    }

    // Computes and stores scale and zero of `count` ranges that follow each other in the tables, from `at` on.
    void store_range(Floats low, Floats high, int range, int at, int count) const {
        alignas(64) uint16_t zero_fp16[16], scale_fp16[16];
        alignas(64) float divisor[16];
        const Floats none = low;  // where all is excluded, low is above high, and both become 0
        low = zero_below(low, high, none);
        high = zero_below(high, high, none);
        store_fp16(zero_fp16, low);
        Floats zero = load_fp16(zero_fp16);
        Floats scale = maximum(high - zero, broadcast_float(0)) / levels();
        store_fp16(scale_fp16, minimum(scale, broadcast_float(FP16_MAX)));
        scale = load_fp16(scale_fp16);
        store_floats(divisor, scale);
        for (int i = 0; i < 16; i++) divisor[i] = divisor[i] == 0 ? INFINITY : divisor[i];  // then all codes are 0
        store_floats(zeros + range * layout.width + at, zero);
        store_floats(scales + range * layout.width + at, load_floats(divisor));
        if (call.zero_shift != 0) {  // codes do not depend on it
            store_fp16(zero_fp16, zero + broadcast_float(call.zero_shift) * scale);
            store_fp16(scale_fp16, broadcast_float(call.scale_factor) * scale);
        }
        const int64_t to = layout.stored(number, range, at);
        for (int i = 0; i < count; i++) {
            call.zero[to + i * layout.stored_step()] = zero_fp16[i];
            call.scale[to + i * layout.stored_step()] = scale_fp16[i];
        }
    }

    // The codes of channels c to c + 15 of a token, c a multiple of 4. Of the row, `count` more exist.
    Words codes(int t, int c, int count) const {
        Floats x = broadcast_float(0);
        if (!is_excluded(t)) x = clamp_to_fp16(load_as<DTYPE>(call.rows, layout.element(number, t, c), count));
        x = (x - layout.entries(zeros, t, c)) / layout.entries(scales, t, c);
        return to_nearest(minimum(maximum(x, broadcast_float(0)), levels()));
    }

    void convert_strip(int strip, uint8_t* scratch) const {
        layout.pack(number, strip, scratch, [&](int t, int c, int count) { return codes(t, c, count); });
    }
};

// xq_affine_encode.
inline int affine_encode(const xq_affine_blocks& call) { return for_each_block<AffineEncoding>(call); }

// Decodes one block into rows of DTYPE.
template <int DTYPE>
struct AffineDecoding : BlockTask {
    static int range_jobs(const BlockLayout& layout) { return layout.ranges; }
    bool set_ranges(int range) const {
        const int64_t from = layout.stored(number, range, 0);
        const ptrdiff_t step = layout.stored_step();
        float *zero = zeros + range * layout.width, *scale = scales + range * layout.width;
        for (int i = 0; i < layout.across; i++) {
            zero[i] = fp16_to_float(call.zero[from + i * step]);
            scale[i] = fp16_to_float(call.scale[from + i * step]);
        }
        return false;
    }

    void convert_strip(int strip, uint8_t* scratch) const {
        pick_unpack_strip(call.bits)(layout.packed(number, strip), layout.length_of(strip), scratch, layout.stride(),
                                     layout.bytes_of(strip));
        restore(strip, scratch);
    }

    void put(int t, int c, Words codes, int count) const {
        Floats x = to_floats(codes) * layout.entries(scales, t, c) + layout.entries(zeros, t, c);
        // With a scale that was rounded up, the highest code may decode to more than fp16 holds.
        if (DTYPE == XQ_FLOAT16) x = clamp_to_fp16(x);
        store_as<DTYPE>(call.rows, layout.element(number, t, c), x, count);
    }

    // The inverse of BlockLayout::arrange.
    void restore(int strip, const uint8_t* scratch) const {
        if (!call.head) {
            const int c = strip * STRIP, lanes = std::min(STRIP, call.channels - c);
            for (int t = 0; t < call.tokens; t++)
                for (int j = 0; j < lanes; j += 16)
                    put(t, c + j, load_bytes(scratch + (size_t)t * STRIP + j), lanes - j);
        } else if (call.channel_lanes) {
            const int c = strip * 16, lanes = std::min(16, call.channels - c);
            const Words mask = broadcast(255);
            for (int t = 0; t < call.tokens; t += 4) {
                const Words quad = load(scratch + t * 16);
                put(t, c, quad & mask, lanes);
                put(t + 1, c, shift_right32<8>(quad) & mask, lanes);
                put(t + 2, c, shift_right32<16>(quad) & mask, lanes);
                put(t + 3, c, shift_right32<24>(quad), lanes);
            }
        } else {
            layout.each_run(strip, [&](int t, int c, int quads, int at, int step) {
                if (quads == 4) return put(t, c, load_quads(scratch + at, step), 16);
                alignas(16) uint8_t bytes[16] = {};
                for (int i = 0; i < quads; i++) std::memcpy(bytes + i * 4, scratch + at + i * step, 4);
                put(t, c, load_bytes(bytes), quads * 4);
            });
        }
    }
};

// xq_affine_decode.
inline int affine_decode(const xq_affine_blocks& call) { return for_each_block<AffineDecoding>(call); }

}  // namespace
