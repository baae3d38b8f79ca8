// Elements of tensors of fp32, bf16 and fp16, loaded as floats and stored from them. One element or row has its
// dtype as an argument; a vector of 16 has it as a template parameter. Rounding is to nearest, ties to even, as
// torch's.
#pragma once
#include "xquant.h"

namespace {

constexpr float FP16_MAX = 65504;  // the largest finite

inline float load_element(const void* p, int dtype, int64_t i) {
    switch (dtype) {
        case XQ_FLOAT32: return ((const float*)p)[i];
        case XQ_BFLOAT16: {
            uint32_t bits = (uint32_t)((const uint16_t*)p)[i] << 16;
            float f;
            std::memcpy(&f, &bits, 4);
            return f;
        }
        default: return fp16_to_float(((const uint16_t*)p)[i]);
    }
}

inline void store_element(void* p, int dtype, int64_t i, float f) {
    switch (dtype) {
        case XQ_FLOAT32: ((float*)p)[i] = f; break;
        case XQ_BFLOAT16: {
            uint32_t bits;
            std::memcpy(&bits, &f, 4);
            bits += 0x7FFF + (bits >> 16 & 1);  // to nearest, ties to even
            ((uint16_t*)p)[i] = bits >> 16;
            break;
        }
        default: ((uint16_t*)p)[i] = float_to_fp16(f);
    }
}

inline void load_row(const void* p, int dtype, int64_t start, int count, float* out) {
    if (dtype == XQ_FLOAT32) {
        std::memcpy(out, (const float*)p + start, sizeof(float) * count);
    } else if (dtype == XQ_BFLOAT16) {
        for (int i = 0; i < count; i++) out[i] = load_element(p, XQ_BFLOAT16, start + i);
    } else {
        for (int i = 0; i < count; i++) out[i] = load_element(p, XQ_FLOAT16, start + i);
    }
}

// Sizes of rows that are gone through a vector at a time: up to the next multiple of 16.
inline int whole_vectors(int size) { return (size + 15) / 16 * 16; }

// The first `count` numbers; with fewer than 16, zeros follow.
inline Floats load_floats(const float* p, int count) {
    if (count >= 16) return load_floats(p);
    alignas(64) float x[16] = {};
    if (count > 0) std::memcpy(x, p, sizeof(float) * count);
    return load_floats(x);
}
inline Floats load_fp16(const uint16_t* p, int count) {
    if (count >= 16) return load_fp16(p);
    alignas(32) uint16_t x[16] = {};
    if (count > 0) std::memcpy(x, p, sizeof(uint16_t) * count);
    return load_fp16(x);
}

template <int DTYPE>
inline Floats load_as(const void* p, int64_t i) {
    if constexpr (DTYPE == XQ_FLOAT32) return load_floats((const float*)p + i);
    if constexpr (DTYPE == XQ_BFLOAT16) return load_bf16((const uint16_t*)p + i);
    if constexpr (DTYPE == XQ_FLOAT16) return load_fp16((const uint16_t*)p + i);
}
// With fewer than 16 elements, the first fills the lanes that are left.
template <int DTYPE>
inline Floats load_as(const void* p, int64_t i, int count) {
    if (count >= 16) return load_as<DTYPE>(p, i);
    alignas(64) float x[16];
    for (int j = 0; j < 16; j++) x[j] = load_element(p, DTYPE, i + (j < count ? j : 0));
    return load_floats(x);
}
template <int DTYPE>
inline void store_as(void* p, int64_t i, Floats a, int count) {
    if (count >= 16) {
        if constexpr (DTYPE == XQ_FLOAT32) store_floats((float*)p + i, a);
        if constexpr (DTYPE == XQ_BFLOAT16) store_bf16((uint16_t*)p + i, a);
        if constexpr (DTYPE == XQ_FLOAT16) store_fp16((uint16_t*)p + i, a);
        return;
    }
    alignas(64) float x[16];
    store_floats(x, a);
    for (int j = 0; j < count; j++) store_element(p, DTYPE, i + j, x[j]);
}

// NaN stays NaN: both functions return their second operand where one of the two is NaN.
inline Floats clamp_to_fp16(Floats x) {
    return minimum(broadcast_float(FP16_MAX), maximum(broadcast_float(-FP16_MAX), x));
}

template <class T>
inline const T* at_address(uint64_t address) {
    return (const T*)(uintptr_t)address;
}

// What a mask adds to a score: 0 or -infinity of a bool; of a number itself, but -infinity for the lowest of its dtype.
inline float mask_at(const void* mask, int dtype, int64_t i) {
    if (dtype == XQ_BOOL) return ((const uint8_t*)mask)[i] ? 0 : -INFINITY;
    float added = load_element(mask, dtype, i);
    return added < -1e30f || (dtype == XQ_FLOAT16 && added < -6e4f) ? -INFINITY : added;
}

}  // namespace
