// Vectors of sixteen 32-bit lanes with AVX-512 (F, BW, VL, VNNI). simd_avx2.h has the same names, without the comments.
#pragma once
// GCC 12 takes the undefined registers inside its own AVX-512 intrinsics for mistakes of their callers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr bool FAST_BYTES = true;  // whether dot8 takes less time than two dot16

constexpr int TILES = 2;  // tiles of 16 lanes that share a broadcast weight
constexpr int PANEL = 4;  // vectors whose sums of six rows fit into registers, with these vectors
#ifndef XQ_MAX_ROWS
#define XQ_MAX_ROWS 8
#endif
constexpr int MAX_ROWS = XQ_MAX_ROWS;  // query rows that share unpacked codes

// One number of fp16.
inline float fp16_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_fp16(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

struct Words {  // 16 x int32, or 32 x int16
    __m512i v;
};
struct Floats {  // 16 x float
    __m512 v;
};

inline Words load(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store(void* p, Words a) { _mm512_storeu_si512(p, a.v); }
inline Words zero_words() { return {_mm512_setzero_si512()}; }
inline Words broadcast(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Words broadcast16(int16_t x) { return {_mm512_set1_epi16(x)}; }
// Four int16, repeated.
inline Words broadcast_quad(const int16_t* p) {
    int64_t quad;
    std::memcpy(&quad, p, 8);
    return {_mm512_set1_epi64(quad)};
}
inline Words operator&(Words a, Words b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Words operator|(Words a, Words b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int N>
inline Words shift_right16(Words a) { return {_mm512_srli_epi16(a.v, N)}; }
template <int N>
inline Words shift_left16(Words a) { return {_mm512_slli_epi16(a.v, N)}; }
template <int N>
inline Words shift_right32(Words a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N>
inline Words shift_left32(Words a) { return {_mm512_slli_epi32(a.v, N)}; }
inline Words shift_left16_by(Words a, int n) { return {_mm512_sll_epi16(a.v, _mm_cvtsi32_si128(n))}; }
inline Words add16(Words a, Words b) { return {_mm512_add_epi16(a.v, b.v)}; }
inline Words sub16(Words a, Words b) { return {_mm512_sub_epi16(a.v, b.v)}; }
// round(a * b / 2^15) of int16: the product of two numbers of which 2^15 is 1.
inline Words multiply_q15(Words a, Words b) { return {_mm512_mulhrs_epi16(a.v, b.v)}; }
// sum + a0 * b0 + a1 * b1 in every 32-bit lane, of the two int16 of a lane.
// Not the intrinsic: GCC copies the sums of a loop from register to register around it.
inline Words dot16(Words sum, Words a, Words b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
    return sum;
}

// sum + a0 * b0 + ... + a3 * b3 in every 32-bit lane, of the four bytes of a lane: a without a sign, b with one.
inline Words dot8(Words sum, Words a, Words b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));
    return sum;
}

// A table of 16 int16, to look up an entry for every word of 0 to 15.
struct Table {
    __m512i v;
};
inline Table load_table(const int16_t* entries) {
    __m256i half = _mm256_loadu_si256((const __m256i*)entries);
    return {_mm512_broadcast_i64x4(half)};
}
inline Words look_up(Table table, Words codes) {
    return {_mm512_permutexvar_epi16(codes.v, table.v)};
}

// A table of 256 int16, to look up an entry for each of 32 bytes.
struct LargeTable {
    __m512i v[8];
};
inline LargeTable load_large_table(const int16_t* entries) {
    LargeTable table;
    for (int i = 0; i < 8; i++) table.v[i] = _mm512_loadu_si512(entries + 32 * i);
    return table;
}
// Bytes are below `SIZE`.
template <int SIZE>
inline Words look_up(const LargeTable& table, const uint8_t* p) {
    const __m512i at = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
    if constexpr (SIZE <= 64) return {_mm512_permutex2var_epi16(table.v[0], at, table.v[1])};
    __m512i of_64[4];
    for (int i = 0; i < 4; i++) of_64[i] = _mm512_permutex2var_epi16(table.v[2 * i], at, table.v[2 * i + 1]);
    const __mmask32 odd = _mm512_test_epi16_mask(at, _mm512_set1_epi16(64));
    const __m512i low = _mm512_mask_mov_epi16(of_64[0], odd, of_64[1]);
    const __m512i high = _mm512_mask_mov_epi16(of_64[2], odd, of_64[3]);
    return {_mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(at, _mm512_set1_epi16(128)), high)};
}

inline Floats load_floats(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_floats(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats broadcast_float(float x) { return {_mm512_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where one of the two is NaN, b.
inline Floats maximum(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats minimum(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats absolute(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline float highest(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline float lowest(Floats a) { return _mm512_reduce_min_ps(a.v); }
inline Floats to_floats(Words a) { return {_mm512_cvtepi32_ps(a.v)}; }
// The same bits.
inline Floats as_floats(Words a) { return {_mm512_castsi512_ps(a.v)}; }
inline Words as_words(Floats a) { return {_mm512_castps_si512(a.v)}; }
inline Words to_nearest(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Floats load_fp16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
// a where x is at least `least`, 0 elsewhere.
inline Floats zero_below(Floats a, Floats x, Floats least) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, least.v, _CMP_GE_OQ), a.v)};
}
inline void store_fp16(uint16_t* p, Floats a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// bf16. Storing rounds to nearest, ties to even.
inline Floats load_bf16(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store_bf16(uint16_t* p, Floats a) {
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}
// What AVX-512 BF16 adds, which not every CPU with AVX-512 has. In assembly, since this file is compiled for all.
#define XQ_BF16_PAIRS
inline bool has_bf16_pairs() {
    static const bool has = __builtin_cpu_supports("avx512bf16");
    return has;
}
// sum + a0 * b0 + a1 * b1 in every lane, of the two bf16 of a lane of b and of the one lane at `a`.
inline Floats dot_bf16(Floats sum, const uint32_t* a, Words b) {
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(b.v), "m"(*a));
    return sum;
}
// 32 numbers as bf16.
inline Words to_bf16(Floats first, Floats last) {
    Words both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both.v) : "v"(first.v), "v"(last.v));
    return both;
}
// 16 bytes, one a 32-bit lane.
inline Words load_bytes(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))};
}
// Of 32 and 32 int16 the low bytes, in order.
inline Words narrow(Words a, Words b) {
    return {_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a.v)), _mm512_cvtepi16_epi8(b.v), 1)};
}
// 32 bytes in both halves.
inline Words load_twice(const uint8_t* p) {
    return {_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p))};
}
// The low half of a and the high half of b.
inline Words join_halves(Words a, Words b) { return {_mm512_mask_mov_epi64(a.v, 0xF0, b.v)}; }
inline Words swap_halves(Words a) { return {_mm512_shuffle_i64x2(a.v, a.v, 0x4E)}; }
// Words of the high half shifted down by 4 bits.
inline Words high_half_down4(Words a) {
    return {_mm512_mask_srli_epi16(a.v, 0xFFFF0000, a.v, 4)};
}
inline void store_halves(uint8_t* low, uint8_t* high, Words a) {
    _mm256_storeu_si256((__m256i*)low, _mm512_castsi512_si256(a.v));
    _mm256_storeu_si256((__m256i*)high, _mm512_extracti64x4_epi64(a.v, 1));
}
// The low halves of the 32-bit lanes, in order.
inline void store_low_words(int16_t* p, Words a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
// The low bytes of 16-bit words of a and b alternately.
inline Words join_bytes(Words a, Words b) { return (a & broadcast16(255)) | shift_left16<8>(b); }
// The low words of 32-bit lanes of a and b alternately.
inline Words join_words(Words a, Words b) { return (a & broadcast(65535)) | shift_left32<16>(b); }
// Exchanges rows and columns of sixteen 32-bit lanes.
inline void transpose(Words (&rows)[16]) {
    __m512i by_2[16], by_4[16];
    for (int i = 0; i < 16; i += 2) {
        by_2[i] = _mm512_unpacklo_epi32(rows[i].v, rows[i + 1].v);
        by_2[i + 1] = _mm512_unpackhi_epi32(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 16; i++) {
        const __m512i a = by_2[i / 4 * 4 + i % 4 / 2], b = by_2[i / 4 * 4 + i % 4 / 2 + 2];
        by_4[i] = i % 2 ? _mm512_unpackhi_epi64(a, b) : _mm512_unpacklo_epi64(a, b);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(by_4[i], by_4[4 + i], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(by_4[i], by_4[4 + i], 0xDD);
        const __m512i c = _mm512_shuffle_i32x4(by_4[8 + i], by_4[12 + i], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(by_4[8 + i], by_4[12 + i], 0xDD);
        rows[i].v = _mm512_shuffle_i32x4(a, c, 0x88);
        rows[4 + i].v = _mm512_shuffle_i32x4(b, d, 0x88);
        rows[8 + i].v = _mm512_shuffle_i32x4(a, c, 0xDD);
        rows[12 + i].v = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
}
// 16-bit words of a and b alternately, from the low and from the high half of every 128 bits.
inline Words zip_low16(Words a, Words b) { return {_mm512_unpacklo_epi16(a.v, b.v)}; }
inline Words zip_high16(Words a, Words b) { return {_mm512_unpackhi_epi16(a.v, b.v)}; }
// Four times 4 bytes, `stride` apart, one byte a 32-bit lane.
inline Words load_quads(const uint8_t* p, ptrdiff_t stride) {
    int32_t quads[4];
    for (int i = 0; i < 4; i++) std::memcpy(quads + i, p + i * stride, 4);
    return {_mm512_cvtepu8_epi32(_mm_setr_epi32(quads[0], quads[1], quads[2], quads[3]))};
}
inline void store_bytes(uint8_t* p, Words a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
// The low halves of the 32-bit lanes as int16. Lanes 0 1 2 3 of every four are stored in the order 0 2 1 3.
inline void store_paired16(int16_t* p, Words a) {
    __m512i paired = _mm512_shuffle_epi32(a.v, (_MM_PERM_ENUM)0xD8);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(paired));
}
// Lists the i < count with first <= x[i] < first + size, in order. It writes up to 16 entries past the last.
inline int list_between(const uint16_t* x, int count, int first, int size, int32_t* out) {
    int listed = 0, i = 0;
    __m512i at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_set1_epi32(first), width = _mm512_set1_epi32(size);
    for (; i + 16 <= count; i += 16) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(x + i)));
        __mmask16 inside = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(wide, low), width);
        _mm512_storeu_si512(out + listed, _mm512_maskz_compress_epi32(inside, at));
        listed += _mm_popcnt_u32(inside);
        at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
    }
    for (; i < count; i++) {
        out[listed] = i;
        listed += (unsigned)(x[i] - first) < (unsigned)size;
    }
    return listed;
}
inline Floats round_to_whole(Floats a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// a * 2^n for whole n <= 127. Results below 2^-126 may be 0.
inline Floats times_power_of_two(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }

// Thirty-two 16-bit lanes.
constexpr int LANES = 32;
struct Shorts {
    __m512i v;
};
inline Shorts load_shorts(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_shorts(void* p, Shorts a) { _mm512_storeu_si512(p, a.v); }
inline Shorts broadcast_short(int16_t x) { return {_mm512_set1_epi16(x)}; }
// The lower of two numbers without a sign.
inline Shorts least(Shorts a, Shorts b) { return {_mm512_min_epu16(a.v, b.v)}; }
// a where x and y are equal, b elsewhere.
inline Shorts where_equal(Shorts x, Shorts y, Shorts a, Shorts b) {
    return {_mm512_mask_blend_epi16(_mm512_cmpeq_epi16_mask(x.v, y.v), b.v, a.v)};
}
inline Shorts subtract(Shorts a, Shorts b) { return {_mm512_sub_epi16(a.v, b.v)}; }
// The sum of numbers without a sign, at most 65535.
inline Shorts add_up_to_limit(Shorts a, Shorts b) { return {_mm512_adds_epu16(a.v, b.v)}; }
// (a - b)^2 / 2^15, rounded, of numbers with a sign; the difference ends at -2^15 and 2^15 - 1.
inline Shorts scaled_square(Shorts a, Shorts b) {
    const __m512i difference = _mm512_subs_epi16(a.v, b.v);
    return {_mm512_mulhrs_epi16(difference, difference)};
}
// The product of numbers without a sign, below 65536.
inline Shorts multiply(Shorts a, Shorts b) { return {_mm512_mullo_epi16(a.v, b.v)}; }
// Numbers below 256 as bytes.
inline void store_low_bytes(uint8_t* p, Shorts a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi16_epi8(a.v)); }

}  // namespace
