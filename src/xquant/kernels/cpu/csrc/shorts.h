// Vectors of sixteen 16-bit lanes. One register of AVX2 holds them, whichever instruction set is compiled for.
#pragma once
#include "elements.h"

namespace {

constexpr int LANES = 16;

struct Shorts {
    __m256i v;
};
inline Shorts load_shorts(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline void store_shorts(void* p, Shorts a) { _mm256_storeu_si256((__m256i*)p, a.v); }
inline Shorts broadcast_short(int16_t x) { return {_mm256_set1_epi16(x)}; }
// The lower of two numbers without a sign.
inline Shorts least(Shorts a, Shorts b) { return {_mm256_min_epu16(a.v, b.v)}; }
inline Shorts equal(Shorts a, Shorts b) { return {_mm256_cmpeq_epi16(a.v, b.v)}; }
// a where `which` is set, b elsewhere.
inline Shorts select(Shorts which, Shorts a, Shorts b) { return {_mm256_blendv_epi8(b.v, a.v, which.v)}; }
inline Shorts subtract(Shorts a, Shorts b) { return {_mm256_sub_epi16(a.v, b.v)}; }
// The sum of numbers without a sign, at most 65535.
inline Shorts add_up_to_limit(Shorts a, Shorts b) { return {_mm256_adds_epu16(a.v, b.v)}; }
// (a - b)^2 / 2^15, rounded, of numbers with a sign; the difference ends at -2^15 and 2^15 - 1.
inline Shorts scaled_square(Shorts a, Shorts b) {
    const __m256i difference = _mm256_subs_epi16(a.v, b.v);
    return {_mm256_mulhrs_epi16(difference, difference)};
}
// The product of numbers without a sign, below 65536.
inline Shorts multiply(Shorts a, Shorts b) { return {_mm256_mullo_epi16(a.v, b.v)}; }
// Sixteen numbers below 256 as bytes.
inline void store_low_bytes(uint8_t* p, Shorts a) {
    const __m128i low = _mm256_castsi256_si128(a.v), high = _mm256_extracti128_si256(a.v, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(low, high));
}

}  // namespace
