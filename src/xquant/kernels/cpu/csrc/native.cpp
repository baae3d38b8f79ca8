// What does not depend on the instruction set: which of them this CPU has, and tables.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "xquant.h"

extern "C" {
#pragma GCC visibility push(default)

// Bit 0: AVX2 with FMA and F16C; bit 1: AVX-512 F, BW, VL and VNNI.
int xq_paths() {
    __builtin_cpu_init();
    int paths = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        paths |= 1;
    if (paths && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        paths |= 2;
    return paths;
}

size_t xq_attend_size() { return sizeof(xq_attend); }
size_t xq_seal_size() { return sizeof(xq_blocks); }
size_t xq_decode_size() { return sizeof(xq_blocks); }
size_t xq_rank_size() { return sizeof(xq_ranked); }
size_t xq_ranked_size() { return sizeof(xq_ranked); }
size_t xq_rebuild_size() { return sizeof(xq_rebuild); }
size_t xq_sum_size() { return sizeof(xq_sum); }
size_t xq_ranked_scores_size() { return sizeof(xq_ranked_scores); }
size_t xq_ranked_sum_size() { return sizeof(xq_ranked_sum); }

// Tables of a rotation by 0 .. block - 1 positions: cos and sin [block, half] to int16
// [block / 16][half / 4][2][cos, sin][16][2], quads in the order of tiles of keys (tiles.h).
void xq_turn(const float* cos, const float* sin, int block, int half, int16_t* out) {
    for (int t = 0; t < block; t++)
        for (int j = 0; j < half; j++) {
            int e = j % 4, units = half / 16;
            int quad = j / 4 % units * 4 + j / 4 / units;
            size_t at = (((size_t)(t / 16) * (half / 4) + quad) * 2 + e % 2) * 64 + t % 16 * 2 + e / 2;
            out[at] = (int16_t)lrintf(cos[(size_t)t * half + j] * 32767);
            out[at + 32] = (int16_t)lrintf(sin[(size_t)t * half + j] * 32767);
        }
}
#pragma GCC visibility pop
}
