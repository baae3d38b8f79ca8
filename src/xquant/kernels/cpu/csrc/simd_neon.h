// Vectors of sixteen 32-bit lanes as four registers of NEON, as every AArch64 CPU has them. simd_avx512.h has the same
// names and says what they do. Sums are in the order of simd_avx2.h, and where a number is NaN, maximum and minimum
// give what x86 gives: so that results are the same bits.
#pragma once
#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr bool FAST_BYTES = false;  // whether dot8 takes less time than two dot16

constexpr int TILES = 1;
constexpr int PANEL = 1;
#ifndef XQ_MAX_ROWS
#define XQ_MAX_ROWS 4
#endif
constexpr int MAX_ROWS = XQ_MAX_ROWS;

inline float fp16_to_float(uint16_t h) {
    __fp16 x;
    std::memcpy(&x, &h, 2);
    return x;
}
inline uint16_t float_to_fp16(float f) {
    const __fp16 x = f;
    uint16_t h;
    std::memcpy(&h, &x, 2);
    return h;
}

struct Words {
    uint16x8_t v[4];
};
struct Floats {
    float32x4_t v[4];
};
// What `of` gives for each register.
template <class F>
inline __attribute__((always_inline)) Words each_word(F of) {
    return {of(0), of(1), of(2), of(3)};
}
template <class F>
inline __attribute__((always_inline)) Floats each_float(F of) {
    return {of(0), of(1), of(2), of(3)};
}

inline int16x8_t shorts(uint16x8_t a) { return vreinterpretq_s16_u16(a); }
inline int32x4_t ints(uint16x8_t a) { return vreinterpretq_s32_u16(a); }
inline uint8x16_t bytes(uint16x8_t a) { return vreinterpretq_u8_u16(a); }
inline uint16x8_t words(int16x8_t a) { return vreinterpretq_u16_s16(a); }
inline uint16x8_t words(int32x4_t a) { return vreinterpretq_u16_s32(a); }
inline uint16x8_t words(uint32x4_t a) { return vreinterpretq_u16_u32(a); }
inline uint16x8_t words(uint8x16_t a) { return vreinterpretq_u16_u8(a); }

inline uint16x8_t load_register(const void* p) { return words(vld1q_u8((const uint8_t*)p)); }
inline void store_register(void* p, uint16x8_t a) { vst1q_u8((uint8_t*)p, bytes(a)); }
inline Words load(const void* p) {
    return each_word([=](int i) { return load_register((const uint8_t*)p + 16 * i); });
}
inline void store(void* p, Words a) {
    for (int i = 0; i < 4; i++) store_register((uint8_t*)p + 16 * i, a.v[i]);
}
inline Words broadcast16(int16_t x) {
    return each_word([=](int) { return vdupq_n_u16((uint16_t)x); });
}
inline Words zero_words() { return broadcast16(0); }
inline Words broadcast(int32_t x) {
    return each_word([=](int) { return words(vdupq_n_s32(x)); });
}
inline Words broadcast_quad(const int16_t* p) {
    int64_t quad;
    std::memcpy(&quad, p, 8);
    return each_word([=](int) { return vreinterpretq_u16_s64(vdupq_n_s64(quad)); });
}
inline Words operator&(Words a, Words b) {
    return each_word([=](int i) { return vandq_u16(a.v[i], b.v[i]); });
}
inline Words operator|(Words a, Words b) {
    return each_word([=](int i) { return vorrq_u16(a.v[i], b.v[i]); });
}
// NEON has no immediate shift to the right by 0.
template <int N>
inline Words shift_right16(Words a) {
    if constexpr (N == 0) return a;
    else return each_word([=](int i) { return vshrq_n_u16(a.v[i], N); });
}
template <int N>
inline Words shift_left16(Words a) {
    return each_word([=](int i) { return vshlq_n_u16(a.v[i], N); });
}
template <int N>
inline Words shift_right32(Words a) {
    if constexpr (N == 0) return a;
    else return each_word([=](int i) { return words(vshrq_n_u32(vreinterpretq_u32_u16(a.v[i]), N)); });
}
template <int N>
inline Words shift_left32(Words a) {
    return each_word([=](int i) { return words(vshlq_n_s32(ints(a.v[i]), N)); });
}
inline Words shift_left16_by(Words a, int n) {
    return each_word([=](int i) { return vshlq_u16(a.v[i], vdupq_n_s16((int16_t)n)); });
}
inline Words add16(Words a, Words b) {
    return each_word([=](int i) { return vaddq_u16(a.v[i], b.v[i]); });
}
inline Words sub16(Words a, Words b) {
    return each_word([=](int i) { return vsubq_u16(a.v[i], b.v[i]); });
}
// Of -2^15 and -2^15 this is 2^15 - 1, and -2^15 on x86. Nobody asks for it.
inline Words multiply_q15(Words a, Words b) {
    return each_word([=](int i) { return words(vqrdmulhq_s16(shorts(a.v[i]), shorts(b.v[i]))); });
}
inline int32x4_t dot16(int32x4_t sum, int16x8_t a, int16x8_t b) {
    const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b)), high = vmull_high_s16(a, b);
    return vaddq_s32(sum, vpaddq_s32(low, high));
}
inline Words dot16(Words sum, Words a, Words b) {
    return each_word([=](int i) { return words(dot16(ints(sum.v[i]), shorts(a.v[i]), shorts(b.v[i]))); });
}

// A product of a byte without a sign and one with a sign fits 16 bits.
inline int32x4_t dot8(int32x4_t sum, uint8x16_t a, int8x16_t b) {
    const int16x8_t low = vmulq_s16(shorts(vmovl_u8(vget_low_u8(a))), vmovl_s8(vget_low_s8(b)));
    const int16x8_t high = vmulq_s16(shorts(vmovl_high_u8(a)), vmovl_high_s8(b));
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
inline Words dot8(Words sum, Words a, Words b) {
    return each_word([=](int i) {
        return words(dot8(ints(sum.v[i]), bytes(a.v[i]), vreinterpretq_s8_u16(b.v[i])));
    });
}

struct Table {
    uint8x16x2_t bytes;
};
inline Table load_table(const int16_t* entries) {
    return {{{vld1q_u8((const uint8_t*)entries), vld1q_u8((const uint8_t*)(entries + 8))}}};
}
// The bytes 2 c and 2 c + 1 of the table for code c.
inline Words look_up(Table table, Words codes) {
    return each_word([=](int i) {
        const uint16x8_t at = vorrq_u16(vmulq_n_u16(codes.v[i], 0x0202), vdupq_n_u16(0x0100));
        return words(vqtbl2q_u8(table.bytes, bytes(at)));
    });
}

struct LargeTable {
    const int16_t* entries;
};
inline LargeTable load_large_table(const int16_t* entries) { return {entries}; }
template <int SIZE>
inline Words look_up(const LargeTable& table, const uint8_t* p) {
    alignas(16) int16_t found[32];
    for (int i = 0; i < 32; i++) found[i] = table.entries[p[i]];
    return load(found);
}

inline Floats load_floats(const float* p) {
    return each_float([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store_floats(float* p, Floats a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
inline Floats broadcast_float(float x) {
    return each_float([=](int) { return vdupq_n_f32(x); });
}
inline Floats operator+(Floats a, Floats b) {
    return each_float([=](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline Floats operator-(Floats a, Floats b) {
    return each_float([=](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline Floats operator*(Floats a, Floats b) {
    return each_float([=](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline Floats operator/(Floats a, Floats b) {
    return each_float([=](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline Floats fma(Floats a, Floats b, Floats c) {
    return each_float([=](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline Floats maximum(Floats a, Floats b) {
    return each_float([=](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline Floats minimum(Floats a, Floats b) {
    return each_float([=](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
inline Floats absolute(Floats a) {
    return each_float([=](int i) { return vabsq_f32(a.v[i]); });
}
inline float sum(Floats a) {
    const float32x4_t t = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t s = vadd_f32(vget_low_f32(t), vget_high_f32(t));
    return vget_lane_f32(s, 0) + vget_lane_f32(s, 1);
}
inline float highest(Floats a) {
    return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a.v[0], a.v[1]), vmaxnmq_f32(a.v[2], a.v[3])));
}
inline float lowest(Floats a) {
    return vminnmvq_f32(vminnmq_f32(vminnmq_f32(a.v[0], a.v[1]), vminnmq_f32(a.v[2], a.v[3])));
}
inline Floats to_floats(Words a) {
    return each_float([=](int i) { return vcvtq_f32_s32(ints(a.v[i])); });
}
inline Floats as_floats(Words a) {
    return each_float([=](int i) { return vreinterpretq_f32_u16(a.v[i]); });
}
inline Words as_words(Floats a) {
    return each_word([=](int i) { return vreinterpretq_u16_f32(a.v[i]); });
}
inline Words to_nearest(Floats a) {
    return each_word([=](int i) { return words(vcvtnq_s32_f32(a.v[i])); });
}
inline Floats load_fp16(const uint16_t* p) {
    return each_float([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline Floats zero_below(Floats a, Floats x, Floats least) {
    return each_float([=](int i) {
        return vbslq_f32(vcgeq_f32(x.v[i], least.v[i]), a.v[i], vdupq_n_f32(0));
    });
}
inline void store_fp16(uint16_t* p, Floats a) {
    for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
inline Floats load_bf16(const uint16_t* p) {
    return each_float([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline void store_bf16(uint16_t* p, Floats a) {
    for (int i = 0; i < 4; i++) {
        const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        vst1_u16(p + 4 * i, vshrn_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd), 16));
    }
}
inline Words load_bytes(const uint8_t* p) {
    const uint8x16_t all = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_high_u8(all);
    return {words(vmovl_u16(vget_low_u16(low))), words(vmovl_high_u16(low)), words(vmovl_u16(vget_low_u16(high))),
            words(vmovl_high_u16(high))};
}
// Of two registers the even ones of the bytes, words or 32-bit lanes.
inline uint16x8_t even_bytes(uint16x8_t a, uint16x8_t b) { return words(vuzp1q_u8(bytes(a), bytes(b))); }
inline uint16x8_t even_words(uint16x8_t a, uint16x8_t b) { return vuzp1q_u16(a, b); }
inline Words narrow(Words a, Words b) {
    return {even_bytes(a.v[0], a.v[1]), even_bytes(a.v[2], a.v[3]), even_bytes(b.v[0], b.v[1]),
            even_bytes(b.v[2], b.v[3])};
}
inline Words load_twice(const uint8_t* p) {
    const uint16x8_t low = load_register(p), high = load_register(p + 16);
    return {low, high, low, high};
}
inline Words join_halves(Words a, Words b) { return {a.v[0], a.v[1], b.v[2], b.v[3]}; }
inline Words swap_halves(Words a) { return {a.v[2], a.v[3], a.v[0], a.v[1]}; }
inline Words high_half_down4(Words a) {
    return {a.v[0], a.v[1], vshrq_n_u16(a.v[2], 4), vshrq_n_u16(a.v[3], 4)};
}
inline void store_halves(uint8_t* low, uint8_t* high, Words a) {
    store_register(low, a.v[0]);
    store_register(low + 16, a.v[1]);
    store_register(high, a.v[2]);
    store_register(high + 16, a.v[3]);
}
inline void store_low_words(int16_t* p, Words a) {
    store_register(p, even_words(a.v[0], a.v[1]));
    store_register(p + 8, even_words(a.v[2], a.v[3]));
}
inline Words join_bytes(Words a, Words b) { return (a & broadcast16(255)) | shift_left16<8>(b); }
inline Words join_words(Words a, Words b) { return (a & broadcast(65535)) | shift_left32<16>(b); }
inline void transpose(Words (&rows)[16]) {
    Words found[16];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const auto row = [&](int k) { return ints(rows[4 * i + k].v[j]); };
            const auto join = [](int32x4_t a, int32x4_t b, bool high) {
                const int64x2_t x = vreinterpretq_s64_s32(a), y = vreinterpretq_s64_s32(b);
                return vreinterpretq_u16_s64(high ? vzip2q_s64(x, y) : vzip1q_s64(x, y));
            };
            const int32x4_t even_01 = vtrn1q_s32(row(0), row(1)), odd_01 = vtrn2q_s32(row(0), row(1));
            const int32x4_t even_23 = vtrn1q_s32(row(2), row(3)), odd_23 = vtrn2q_s32(row(2), row(3));
            for (int k = 0; k < 4; k++)
                found[4 * j + k].v[i] = join(k % 2 ? odd_01 : even_01, k % 2 ? odd_23 : even_23, k > 1);
        }
    for (int i = 0; i < 16; i++) rows[i] = found[i];
}
inline Words zip_low16(Words a, Words b) {
    return each_word([=](int i) { return vzip1q_u16(a.v[i], b.v[i]); });
}
inline Words zip_high16(Words a, Words b) {
    return each_word([=](int i) { return vzip2q_u16(a.v[i], b.v[i]); });
}
inline Words load_quads(const uint8_t* p, ptrdiff_t stride) {
    alignas(16) uint8_t quads[16];
    for (int i = 0; i < 4; i++) std::memcpy(quads + 4 * i, p + i * stride, 4);
    return load_bytes(quads);
}
inline void store_bytes(uint8_t* p, Words a) {
    store_register(p, even_bytes(even_words(a.v[0], a.v[1]), even_words(a.v[2], a.v[3])));
}
inline void store_paired16(int16_t* p, Words a) {
    store_low_words(p, each_word([=](int i) {
        const int32x4_t x = ints(a.v[i]);
        return words(vzip1q_s32(x, vextq_s32(x, x, 2)));
    }));
}
inline int list_between(const uint16_t* x, int count, int first, int size, int32_t* out) {
    int listed = 0;
    for (int i = 0; i < count; i++) {
        out[listed] = i;
        listed += (unsigned)(x[i] - first) < (unsigned)size;
    }
    return listed;
}
inline Floats round_to_whole(Floats a) {
    return each_float([=](int i) { return vrndnq_f32(a.v[i]); });
}
inline Floats times_power_of_two(Floats a, Floats n) {
    const Words biased = to_nearest(maximum(n, broadcast_float(-127)) + broadcast_float(127));
    return each_float([=](int i) {
        return vmulq_f32(a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(ints(biased.v[i]), 23)));
    });
}

constexpr int LANES = 16;
struct Shorts {
    uint16x8_t lo, hi;
};
inline Shorts load_shorts(const void* p) { return {load_register(p), load_register((const uint8_t*)p + 16)}; }
inline void store_shorts(void* p, Shorts a) {
    store_register(p, a.lo);
    store_register((uint8_t*)p + 16, a.hi);
}
inline Shorts broadcast_short(int16_t x) { return {vdupq_n_u16((uint16_t)x), vdupq_n_u16((uint16_t)x)}; }
inline Shorts least(Shorts a, Shorts b) { return {vminq_u16(a.lo, b.lo), vminq_u16(a.hi, b.hi)}; }
inline Shorts where_equal(Shorts x, Shorts y, Shorts a, Shorts b) {
    return {vbslq_u16(vceqq_u16(x.lo, y.lo), a.lo, b.lo), vbslq_u16(vceqq_u16(x.hi, y.hi), a.hi, b.hi)};
}
inline Shorts subtract(Shorts a, Shorts b) { return {vsubq_u16(a.lo, b.lo), vsubq_u16(a.hi, b.hi)}; }
inline Shorts add_up_to_limit(Shorts a, Shorts b) { return {vqaddq_u16(a.lo, b.lo), vqaddq_u16(a.hi, b.hi)}; }
// Of a difference of -2^15 the square is 2^15 - 1, and 2^15 on x86.
inline uint16x8_t scaled_square(uint16x8_t a, uint16x8_t b) {
    const int16x8_t difference = vqsubq_s16(shorts(a), shorts(b));
    return words(vqrdmulhq_s16(difference, difference));
}
inline Shorts scaled_square(Shorts a, Shorts b) { return {scaled_square(a.lo, b.lo), scaled_square(a.hi, b.hi)}; }
inline Shorts multiply(Shorts a, Shorts b) { return {vmulq_u16(a.lo, b.lo), vmulq_u16(a.hi, b.hi)}; }
inline void store_low_bytes(uint8_t* p, Shorts a) { store_register(p, even_bytes(a.lo, a.hi)); }

}  // namespace
