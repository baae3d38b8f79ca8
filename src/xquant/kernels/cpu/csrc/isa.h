// The functions of one instruction set. avx2.cpp, avx512.cpp and neon.cpp define ISA, include its vectors (simd_*.h),
// then this file: so the same code is compiled once for each. All of it is in anonymous namespaces, or the linker would
// keep one of two functions of the same name, and might run AVX-512 where there is none.
#pragma once
#include "tiles.h"
#include "attention.h"
#include "rebuild.h"
#include "sealing.h"
#include "codebook_sealing.h"
#include "ranked_sealing.h"
#include "ranked.h"
#include "weigh.h"
#include "prefill.h"
#include "linear.h"

#define XQ_JOIN2(a, b) a##b
#define XQ_JOIN(a, b) XQ_JOIN2(a, b)
#define XQ_EXPORT(name) extern "C" __attribute__((visibility("default"))) int XQ_JOIN(name, ISA)
#define XQ_FUNCTION(name, structure) \
    XQ_EXPORT(xq_##name##_)(const structure* call) { return name(*call); }

namespace {

// Reads all the bytes (a multiple of 256) and returns a number that depends on each. Python times it, to measure
// the bandwidth of memory.
inline int read_all(const uint8_t* bytes, int64_t size, int threads) {
    int found = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : found)
    for (int64_t at = 0; at < size / 4096; at++) {
        Words any = zero_words();
        for (int i = 0; i < 4096; i += 64) {
            prefetch(bytes + at * 4096 + i + 8192);
            any = any | load(bytes + at * 4096 + i);
        }
        alignas(64) int lanes[16];
        store(lanes, any);
        found += lanes[0] ^ lanes[15];
    }
    return found;
}

}  // namespace

XQ_FUNCTION(attend, xq_attend)
XQ_EXPORT(xq_read_)(const void* bytes, int64_t size, int threads) {
    return read_all((const uint8_t*)bytes, size, threads);
}
XQ_FUNCTION(rebuild_scores, xq_rebuild_scores)
XQ_FUNCTION(rebuild_sum, xq_rebuild_sum)
XQ_FUNCTION(affine_encode, xq_affine_blocks)
XQ_FUNCTION(affine_decode, xq_affine_blocks)
XQ_FUNCTION(codebook_encode, xq_codebook_blocks)
XQ_FUNCTION(ranked_encode, xq_ranked_blocks)
XQ_FUNCTION(ranked_decode, xq_ranked_blocks)
XQ_FUNCTION(ranked_attend, xq_ranked_attend)
XQ_FUNCTION(weigh, xq_weigh)
XQ_FUNCTION(prefill, xq_prefill)
XQ_FUNCTION(linear, xq_linear)
