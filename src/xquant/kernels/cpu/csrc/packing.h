// Blocks [n, C] between rows of floats and packed codes: what sealing and decoding share.
//
// Codes are packed in strips, matrices [length][64] packed along their length. Where codes are in tiles a
// strip is a tile, [K / 4][16][4]; in rows it is 64 channels of all tokens.
#pragma once
#include "elements.h"

namespace {

constexpr float HALF_MAX = 65504;
constexpr int STRIP = 64;

template <int DTYPE>
inline Floats load_as(const void* p, int64_t i) {
    if constexpr (DTYPE == XQ_FLOAT32) return load_floats((const float*)p + i);
    if constexpr (DTYPE == XQ_BFLOAT16) return load_brains((const uint16_t*)p + i);
    if constexpr (DTYPE == XQ_FLOAT16) return load_halves((const uint16_t*)p + i);
}
// The first repeated, where there are fewer than 16.
template <int DTYPE>
inline Floats load_as(const void* p, int64_t i, int count) {
    if (count >= 16) return load_as<DTYPE>(p, i);
    alignas(64) float x[16];
    for (int j = 0; j < 16; j++) x[j] = get(p, DTYPE, i + (j < count ? j : 0));
    return load_floats(x);
}
template <int DTYPE>
inline void store_as(void* p, int64_t i, Floats a, int count) {
    if (count >= 16) {
        if constexpr (DTYPE == XQ_FLOAT32) store_floats((float*)p + i, a);
        if constexpr (DTYPE == XQ_BFLOAT16) store_brains((uint16_t*)p + i, a);
        if constexpr (DTYPE == XQ_FLOAT16) store_halves((uint16_t*)p + i, a);
        return;
    }
    alignas(64) float x[16];
    store_floats(x, a);
    for (int j = 0; j < count; j++) put(p, DTYPE, i + j, x[j]);
}

// NaN stays: both instructions give their second operand where one is NaN.
inline Floats within_halves(Floats x) {
    return minimum(broadcast_float(HALF_MAX), maximum(broadcast_float(-HALF_MAX), x));
}

// Codes of a strip to its planes: row i of a plane of w bits holds rows i + j * rows, j < 8 / w. Rows from
// `length` on, up to 7, are zeros. `width` bytes of a row are written, and rows are `stride` apart.
template <int BITS, int SHIFT = 0>
void pack_strip(const uint8_t* codes, int length, uint8_t* out, ptrdiff_t stride, int width) {
    constexpr int WIDTH = lowest_plane(BITS);
    const int rows = (length * WIDTH + 7) / 8;
    const Words mask = broadcast16((int16_t)(((1 << WIDTH) - 1) * 0x0101));
    for (int i = 0; i < rows; i++, out += stride) {
        Words byte = zero_words();
        repeat<8 / WIDTH>([&](auto j) {
            const Words code = load(codes + (size_t)(i + j * rows) * STRIP);
            byte = byte | shift_left16<j * WIDTH>(shift_right16<SHIFT>(code) & mask);
        });
        if (width == STRIP) {
            store(out, byte);
        } else {
            uint8_t bytes[STRIP];
            store(bytes, byte);
            std::memcpy(out, bytes, width);
        }
    }
    if constexpr (BITS > WIDTH) pack_strip<BITS - WIDTH, SHIFT + WIDTH>(codes, length, out, stride, width);
}

// The inverse; up to 7 rows from `length` on are written too.
template <int BITS, int SHIFT = 0>
void unpack_strip(const uint8_t* packed, int length, uint8_t* codes, ptrdiff_t stride, int width) {
    constexpr int WIDTH = lowest_plane(BITS);
    const int rows = (length * WIDTH + 7) / 8;
    const Words mask = broadcast16((int16_t)(((1 << WIDTH) - 1) * 0x0101));
    for (int i = 0; i < rows; i++, packed += stride) {
        Words byte;
        if (width == STRIP) {
            byte = load(packed);
        } else {
            uint8_t bytes[STRIP] = {};
            std::memcpy(bytes, packed, width);
            byte = load(bytes);
        }
        repeat<8 / WIDTH>([&](auto j) {
            uint8_t* at = codes + (size_t)(i + j * rows) * STRIP;
            Words code = shift_left16<SHIFT>(shift_right16<j * WIDTH>(byte) & mask);
            if (SHIFT > 0) code = code | load(at);
            store(at, code);
        });
    }
    if constexpr (BITS > WIDTH) unpack_strip<BITS - WIDTH, SHIFT + WIDTH>(packed, length, codes, stride, width);
}

using PackStrip = void (*)(const uint8_t*, int, uint8_t*, ptrdiff_t, int);
template <int... B>
PackStrip pick_pack_strip(int bits, std::integer_sequence<int, B...>) {
    static constexpr PackStrip all[] = {pack_strip<B + 1>...};
    return all[bits - 1];
}
template <int... B>
PackStrip pick_unpack_strip(int bits, std::integer_sequence<int, B...>) {
    static constexpr PackStrip all[] = {unpack_strip<B + 1>...};
    return all[bits - 1];
}
inline PackStrip pick_pack_strip(int bits) { return pick_pack_strip(bits, std::make_integer_sequence<int, 8>()); }
inline PackStrip pick_unpack_strip(int bits) { return pick_unpack_strip(bits, std::make_integer_sequence<int, 8>()); }

// Where things are in a block. Numbers of its ranges are at hand in tables of floats [ranges][width]: by
// token where ranges are of channels, by channel where they are of tokens.
struct Layout {
    const xq_blocks& call;
    int across, ranges, width;  // width: `across` rounded up to 16
    int strips, length;
    size_t strip_bytes, block_bytes;  // packed; strip_bytes: from a strip to the next
    int32_t* first;  // entry of a table of each token, or of each 16 channels; -1: several ranges meet there

    explicit Layout(const xq_blocks& call)
        : call(call), across(call.per_token ? call.tokens : call.channels) {
        const int along = call.per_token ? call.channels : call.tokens;
        ranges = (along + call.group - 1) / call.group;
        width = (across + 15) / 16 * 16;
        if (call.head) {
            const int summed = call.channel_lanes ? call.tokens : call.head;
            length = summed / 4;
            strips = (int)((int64_t)call.tokens * call.channels / 16 / summed);
            strip_bytes = tile_bytes(summed, call.bits);
            block_bytes = strips * strip_bytes;
        } else {
            length = call.tokens;
            strips = (call.channels + STRIP - 1) / STRIP;
            strip_bytes = STRIP;
            size_t rows = 0;
            for (int plane = 8; plane; plane /= 2) rows += (call.bits & plane) ? (length * plane + 7) / 8 : 0;
            block_bytes = rows * call.channels;
        }
    }

    int firsts() const { return call.per_token ? (call.channels + 15) / 16 : call.tokens; }
    void set_firsts(int32_t* at) {
        first = at;
        for (int i = 0; i < firsts(); i++) {
            const int from = call.per_token ? i * 16 : i;
            const int last = call.per_token ? std::min(from + 15, call.channels - 1) : i;
            first[i] = from / call.group == last / call.group ? from / call.group * width : -1;
        }
    }
    size_t table() const { return (size_t)ranges * width; }
    size_t scratch() const { return (size_t)(length + 8) * STRIP; }

    // Entries of a table for channels c to c + 15 of a token.
    Floats entries(const float* table, int t, int c) const {
        if (!call.per_token) return load_floats(table + first[t] + c);
        if (first[c / 16] >= 0) return broadcast_float(table[first[c / 16] + t]);
        alignas(64) float each[16];
        for (int i = 0; i < 16; i++) each[i] = table[std::min((c + i) / call.group, ranges - 1) * width + t];
        return load_floats(each);
    }
    int64_t element(int64_t block, int t, int c) const {
        return block * call.block_stride + t * call.token_stride + c;
    }
    // Of a range among the stored: next to tiles all tokens of a range follow each other.
    bool by_range() const { return !call.per_token || call.head; }
    int64_t stored(int64_t block, int range, int at) const {
        return block * ranges * across + (by_range() ? (int64_t)range * across + at : (int64_t)at * ranges + range);
    }
    ptrdiff_t stored_step() const { return by_range() ? 1 : ranges; }

    uint8_t* packed(int64_t block, int strip) const { return call.codes + block * block_bytes + strip * strip_bytes; }
    ptrdiff_t stride() const { return call.head ? STRIP : call.channels; }
    int bytes_of(int strip) const { return call.head ? STRIP : std::min(STRIP, call.channels - strip * STRIP); }
    // Little work is not worth waking threads for.
    int threads() const {
        return (int64_t)call.blocks * call.tokens * call.channels < 32768 ? 1 : std::max(call.threads, 1);
    }
};

// One block at work, `number` of all, with two tables of its own.
struct Block {
    const Layout& layout;
    const xq_blocks& call;
    int64_t number;
    float *zeros, *scales;
};

// What became of it.
enum { DONE = 0, FOUND_NAN = 1, NO_MEMORY = 2 };

// Works on all blocks: first on the ranges of a block, part by part, then on its strips. Few blocks at a time,
// so that the second pass finds the rows in the cache; threads share a single block as they share many.
template <class Work>
int work(const xq_blocks& call) {
    static thread_local Arena shared;
    Layout layout(call);
    const int threads = layout.threads(), wave = std::min(threads, call.blocks);
    const size_t table = layout.table();
    if (!shared.reserve(sizeof(float) * 2 * wave * table + sizeof(int32_t) * layout.firsts() + 64)) return NO_MEMORY;
    float* tables = shared.take<float>(2 * wave * table);
    layout.set_firsts(shared.take<int32_t>(layout.firsts()));
    int failed = 0, nan = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed, nan)
    {
        static thread_local Arena arena;
        const bool ready = arena.reserve(layout.scratch());
        failed += !ready;
        for (int from = 0; from < call.blocks; from += wave) {
            const int count = std::min(wave, call.blocks - from), parts = Work::range_parts(layout);
            auto block = [&](int i) {
                float* zeros = tables + 2 * i * table;
                return Work{{layout, call, from + i, zeros, zeros + table}};
            };
#pragma omp for schedule(static) collapse(2)
            for (int i = 0; i < count; i++)
                for (int part = 0; part < parts; part++) nan += block(i).do_ranges(part);
#pragma omp for schedule(static) collapse(2)
            for (int i = 0; i < count; i++)
                for (int strip = 0; strip < layout.strips; strip++)
                    if (ready) block(i).do_strip(strip, arena.base);
        }
    }
    return failed ? NO_MEMORY : nan ? FOUND_NAN : DONE;
}

template <template <int> class Work>
int work(const xq_blocks& call) {
    switch (call.dtype) {
        case XQ_FLOAT32: return work<Work<XQ_FLOAT32>>(call);
        case XQ_BFLOAT16: return work<Work<XQ_BFLOAT16>>(call);
        default: return work<Work<XQ_FLOAT16>>(call);
    }
}

}  // namespace
