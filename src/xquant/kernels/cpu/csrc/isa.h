// The functions of one instruction set; PATH is its name.
#pragma once
#include "tiles.h"
#include "attention.h"
#include "rebuild.h"
#include "sealing.h"
#include "ranked_sealing.h"
#include "ranked.h"

#define XQ_JOIN2(a, b) a##b
#define XQ_JOIN(a, b) XQ_JOIN2(a, b)

namespace {

// Reads all the bytes (a multiple of 256) and gives something that depends on each.
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

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_attend_, PATH)(const xq_attend* call) { return attend(*call); }

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_read_, PATH)(const void* bytes, int64_t size,
                                                                            int threads) {
    return read_all((const uint8_t*)bytes, size, threads);
}

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_rebuild_, PATH)(const xq_rebuild* call) {
    return rebuild(*call);
}

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_sum_, PATH)(const xq_sum* call) {
    return sum_values(*call);
}

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_seal_, PATH)(const xq_blocks* call) { return seal(*call); }

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_decode_, PATH)(const xq_blocks* call) {
    return decode(*call);
}

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_rank_, PATH)(const xq_ranked* call) {
    return seal_ranked(*call);
}

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_ranked_, PATH)(const xq_ranked* call) {
    return decode_ranked(*call);
}

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_ranked_scores_, PATH)(const xq_ranked_scores* call) {
    return score_ranked(*call);
}

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_ranked_sum_, PATH)(const xq_ranked_sum* call) {
    return sum_ranked(*call);
}
