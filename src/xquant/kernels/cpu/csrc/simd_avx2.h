// Vectors of sixteen 32-bit lanes as two registers of AVX2 (with FMA and F16C). simd_avx512.h has the same names and
// says what they do.
#pragma once
#include <immintrin.h>

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

inline float fp16_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_fp16(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

struct Words {
    __m256i lo, hi;
};
struct Floats {
    __m256 lo, hi;
};

inline Words load(const void* p) {
    auto q = (const __m256i*)p;
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store(void* p, Words a) {
    auto q = (__m256i*)p;
    _mm256_storeu_si256(q, a.lo);
    _mm256_storeu_si256(q + 1, a.hi);
}
inline Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Words broadcast(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Words broadcast16(int16_t x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
inline Words broadcast_quad(const int16_t* p) {
    int64_t quad;
    std::memcpy(&quad, p, 8);
    return {_mm256_set1_epi64x(quad), _mm256_set1_epi64x(quad)};
}
inline Words operator&(Words a, Words b) {
    return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline Words operator|(Words a, Words b) {
    return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
template <int N>
inline Words shift_right16(Words a) {
    return {_mm256_srli_epi16(a.lo, N), _mm256_srli_epi16(a.hi, N)};
}
template <int N>
inline Words shift_left16(Words a) {
    return {_mm256_slli_epi16(a.lo, N), _mm256_slli_epi16(a.hi, N)};
}
template <int N>
inline Words shift_right32(Words a) {
    return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
inline Words shift_left32(Words a) {
    return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
inline Words shift_left16_by(Words a, int n) {
    __m128i by = _mm_cvtsi32_si128(n);
    return {_mm256_sll_epi16(a.lo, by), _mm256_sll_epi16(a.hi, by)};
}
inline Words add16(Words a, Words b) {
    return {_mm256_add_epi16(a.lo, b.lo), _mm256_add_epi16(a.hi, b.hi)};
}
inline Words sub16(Words a, Words b) {
    return {_mm256_sub_epi16(a.lo, b.lo), _mm256_sub_epi16(a.hi, b.hi)};
}
inline Words multiply_q15(Words a, Words b) {
    return {_mm256_mulhrs_epi16(a.lo, b.lo), _mm256_mulhrs_epi16(a.hi, b.hi)};
}
inline Words dot16(Words sum, Words a, Words b) {
    return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
            _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
}

// Not vpmaddubsw, whose sums of two products end at 32767.
inline __m256i dot8(__m256i sum, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
inline Words dot8(Words sum, Words a, Words b) { return {dot8(sum.lo, a.lo, b.lo), dot8(sum.hi, a.hi, b.hi)}; }

struct Table {
    __m256i low, high;  // the low and the high bytes of the 16 entries, each twice
};
inline Table load_table(const int16_t* entries) {
    alignas(16) uint8_t low[16], high[16];
    for (int i = 0; i < 16; i++) {
        low[i] = (uint16_t)entries[i] & 255;
        high[i] = (uint16_t)entries[i] >> 8;
    }
    return {_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)low)),
            _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)high))};
}
inline __m256i look_up_half(Table table, __m256i codes) {
    __m256i low = _mm256_shuffle_epi8(table.low, codes);  // of the even bytes; odd bytes are 0 and look up entry 0
    __m256i high = _mm256_shuffle_epi8(table.high, codes);
    low = _mm256_and_si256(low, _mm256_set1_epi16(255));
    return _mm256_or_si256(low, _mm256_slli_epi16(high, 8));
}
inline Words look_up(Table table, Words codes) {
    return {look_up_half(table, codes.lo), look_up_half(table, codes.hi)};
}

struct LargeTable {
    const int16_t* entries;
};
inline LargeTable load_large_table(const int16_t* entries) { return {entries}; }
template <int SIZE>
inline Words look_up(const LargeTable& table, const uint8_t* p) {
    alignas(32) int16_t found[32];
    for (int i = 0; i < 32; i++) found[i] = table.entries[p[i]];
    return load(found);
}

inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store_floats(float* p, Floats a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline Floats broadcast_float(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline Floats operator-(Floats a, Floats b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline Floats operator*(Floats a, Floats b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline Floats operator/(Floats a, Floats b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Floats maximum(Floats a, Floats b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline Floats minimum(Floats a, Floats b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline Floats absolute(Floats a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
template <class Combine>
inline float reduce(Floats a, Combine combine) {
    alignas(32) float x[16];
    store_floats(x, a);
    float r = x[0];
    for (int i = 1; i < 16; i++) r = combine(r, x[i]);
    return r;
}
inline float sum(Floats a) {
    __m256 s = _mm256_add_ps(a.lo, a.hi);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
inline float highest(Floats a) {
    return reduce(a, [](float x, float y) { return x > y ? x : y; });
}
inline float lowest(Floats a) {
    return reduce(a, [](float x, float y) { return x < y ? x : y; });
}
inline Floats to_floats(Words a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline Floats as_floats(Words a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline Words as_words(Floats a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline Words to_nearest(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Floats load_fp16(const uint16_t* p) {
    auto q = (const __m128i*)p;
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline Floats zero_below(Floats a, Floats x, Floats least) {
    return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, least.lo, _CMP_GE_OQ)),
            _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, least.hi, _CMP_GE_OQ))};
}
inline void store_fp16(uint16_t* p, Floats a) {
    auto q = (__m128i*)p;
    _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline __m256 widen_bf16(__m128i a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
}
inline Floats load_bf16(const uint16_t* p) {
    auto q = (const __m128i*)p;
    return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
inline __m256i to_bf16(__m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    return _mm256_srli_epi32(bits, 16);
}
inline void store_bf16(uint16_t* p, Floats a) {
    __m256i both = _mm256_packus_epi32(to_bf16(a.lo), to_bf16(a.hi));  // lo0 hi0 lo1 hi1
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xD8));
}
inline Words load_bytes(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline __m256i narrow(__m256i a, __m256i b) {
    const __m256i low = _mm256_set1_epi16(255);
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_and_si256(a, low), _mm256_and_si256(b, low)), 0xD8);
}
inline Words narrow(Words a, Words b) { return {narrow(a.lo, a.hi), narrow(b.lo, b.hi)}; }
inline Words load_twice(const uint8_t* p) {
    const __m256i half = _mm256_loadu_si256((const __m256i*)p);
    return {half, half};
}
inline Words join_halves(Words a, Words b) { return {a.lo, b.hi}; }
inline Words swap_halves(Words a) { return {a.hi, a.lo}; }
inline Words high_half_down4(Words a) { return {a.lo, _mm256_srli_epi16(a.hi, 4)}; }
inline void store_halves(uint8_t* low, uint8_t* high, Words a) {
    _mm256_storeu_si256((__m256i*)low, a.lo);
    _mm256_storeu_si256((__m256i*)high, a.hi);
}
inline void store_low_words(int16_t* p, Words a) {
    const __m256i packed = _mm256_packs_epi32(a.lo, a.hi);  // numbers are between -2^15 and 2^15
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xD8));
}
inline Words join_bytes(Words a, Words b) { return (a & broadcast16(255)) | shift_left16<8>(b); }
inline Words join_words(Words a, Words b) { return (a & broadcast(65535)) | shift_left32<16>(b); }
inline void transpose(Words (&rows)[16]) {
    alignas(32) int32_t given[16][16], found[16][16];
    for (int i = 0; i < 16; i++) store(given[i], rows[i]);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) found[j][i] = given[i][j];
    for (int i = 0; i < 16; i++) rows[i] = load(found[i]);
}
inline Words zip_low16(Words a, Words b) {
    return {_mm256_unpacklo_epi16(a.lo, b.lo), _mm256_unpacklo_epi16(a.hi, b.hi)};
}
inline Words zip_high16(Words a, Words b) {
    return {_mm256_unpackhi_epi16(a.lo, b.lo), _mm256_unpackhi_epi16(a.hi, b.hi)};
}
inline Words load_quads(const uint8_t* p, ptrdiff_t stride) {
    int32_t quads[4];
    for (int i = 0; i < 4; i++) std::memcpy(quads + i, p + i * stride, 4);
    return {_mm256_cvtepu8_epi32(_mm_setr_epi32(quads[0], quads[1], 0, 0)),
            _mm256_cvtepu8_epi32(_mm_setr_epi32(quads[2], quads[3], 0, 0))};
}
inline void store_bytes(uint8_t* p, Words a) {
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a.lo, a.hi), 0xD8);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    _mm_storeu_si128((__m128i*)p, bytes);
}
inline void store_paired16(int16_t* p, Words a) {
    __m256i lo = _mm256_shuffle_epi32(a.lo, 0xD8), hi = _mm256_shuffle_epi32(a.hi, 0xD8);
    __m256i both = _mm256_packs_epi32(lo, hi);  // by 128-bit lanes: lo0 hi0 lo1 hi1
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xD8));
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
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
inline Floats times_power_of_two(Floats a, Floats n) {
    Words biased = to_nearest(maximum(n, broadcast_float(-127)) + broadcast_float(127));
    return a * Floats{_mm256_castsi256_ps(_mm256_slli_epi32(biased.lo, 23)),
                      _mm256_castsi256_ps(_mm256_slli_epi32(biased.hi, 23))};
}

constexpr int LANES = 16;
struct Shorts {
    __m256i v;
};
inline Shorts load_shorts(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline void store_shorts(void* p, Shorts a) { _mm256_storeu_si256((__m256i*)p, a.v); }
inline Shorts broadcast_short(int16_t x) { return {_mm256_set1_epi16(x)}; }
inline Shorts least(Shorts a, Shorts b) { return {_mm256_min_epu16(a.v, b.v)}; }
inline Shorts where_equal(Shorts x, Shorts y, Shorts a, Shorts b) {
    return {_mm256_blendv_epi8(b.v, a.v, _mm256_cmpeq_epi16(x.v, y.v))};
}
inline Shorts subtract(Shorts a, Shorts b) { return {_mm256_sub_epi16(a.v, b.v)}; }
inline Shorts add_up_to_limit(Shorts a, Shorts b) { return {_mm256_adds_epu16(a.v, b.v)}; }
inline Shorts scaled_square(Shorts a, Shorts b) {
    const __m256i difference = _mm256_subs_epi16(a.v, b.v);
    return {_mm256_mulhrs_epi16(difference, difference)};
}
inline Shorts multiply(Shorts a, Shorts b) { return {_mm256_mullo_epi16(a.v, b.v)}; }
inline void store_low_bytes(uint8_t* p, Shorts a) {
    const __m128i low = _mm256_castsi256_si128(a.v), high = _mm256_extracti128_si256(a.v, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(low, high));
}

}  // namespace
