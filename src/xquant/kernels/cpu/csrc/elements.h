// Rows of tensors of several dtypes, as floats.
#pragma once
#include "xquant.h"

namespace {

inline size_t element_bytes(int dtype) { return dtype == XQ_FLOAT32 ? 4 : dtype == XQ_BOOL ? 1 : 2; }

inline float fp16_to_float(uint16_t h) { return _cvtsh_ss(h); }

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
        default: ((uint16_t*)p)[i] = _cvtss_sh(f, 0);
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

template <class T>
inline const T* at_address(uint64_t address) {
    return (const T*)(uintptr_t)address;
}

// What a mask adds to a score.
inline float mask_at(const void* mask, int dtype, int64_t i) {
    if (dtype == XQ_BOOL) return ((const uint8_t*)mask)[i] ? 0 : -INFINITY;
    float added = load_element(mask, dtype, i);
    return added < -1e30f || (dtype == XQ_FLOAT16 && added < -6e4f) ? -INFINITY : added;
}

}  // namespace
