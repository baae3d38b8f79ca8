// What does not depend on the instruction set: which of them this CPU has, the sizes of the structures of the
// interface, and the table of RoPE.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "xquant.h"

extern "C" {
#pragma GCC visibility push(default)

// Bit 0: AVX2 with FMA and F16C; bit 1: AVX-512 F, BW, VL and VNNI, where the library has its kernels; bit 2: NEON,
// which every AArch64 CPU has.
int xq_isas() {
#ifdef __aarch64__
    return 4;
#else
    __builtin_cpu_init();
    int isas = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        isas |= 1;
#ifndef XQ_AVX2_ONLY
    if (isas && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        isas |= 2;
#endif
    return isas;
#endif
}

// Raised where what is behind the structures changes, and not their sizes: 2 has tiles of any multiple of 8 channels.
// Python compares it, and the sizes, with its own before it calls.
int xq_interface() { return 2; }

// Of the structure that each function takes.
size_t xq_attend_size() { return sizeof(xq_attend); }
size_t xq_affine_encode_size() { return sizeof(xq_affine_blocks); }
size_t xq_affine_decode_size() { return sizeof(xq_affine_blocks); }
size_t xq_codebook_encode_size() { return sizeof(xq_codebook_blocks); }
size_t xq_ranked_encode_size() { return sizeof(xq_ranked_blocks); }
size_t xq_ranked_decode_size() { return sizeof(xq_ranked_blocks); }
size_t xq_rebuild_scores_size() { return sizeof(xq_rebuild_scores); }
size_t xq_rebuild_sum_size() { return sizeof(xq_rebuild_sum); }
size_t xq_ranked_attend_size() { return sizeof(xq_ranked_attend); }
size_t xq_weigh_size() { return sizeof(xq_weigh); }
size_t xq_prefill_size() { return sizeof(xq_prefill); }
size_t xq_linear_size() { return sizeof(xq_linear); }

// The table of rotations R(0) .. R(block - 1) for keys in tiles: cos and sin [block, half] as int16 (1 is 32767)
// [block / 16][half / 4][2][cos, sin][16][2]. The 16 are the tokens of a tile; quads of channels and the elements
// within a quad are in the order in which tiles.h unpacks them.
void xq_rope_table(const float* cos, const float* sin, int block, int half, int16_t* out) {
    for (int t = 0; t < block; t++)
        for (int j = 0; j < half; j++) {
            int e = j % 4, units = half / 16, quad = j / 4;
            if (quad < 4 * units) quad = quad % units * 4 + quad / units;
            size_t at = (((size_t)(t / 16) * (half / 4) + quad) * 2 + e % 2) * 64 + t % 16 * 2 + e / 2;
            out[at] = (int16_t)lrintf(cos[(size_t)t * half + j] * 32767);
            out[at + 32] = (int16_t)lrintf(sin[(size_t)t * half + j] * 32767);
        }
}
#pragma GCC visibility pop
}
