// What the kernels ask of the device: arithmetic with two fp16 numbers in a word, products of the matrix units,
// copies that run ahead, and what threads of a warp tell each other. No header of CUDA is wanted, so that NVRTC
// needs none. tests/cuda/emulated.h has the same names for the CPU.
#pragma once
#ifdef EMULATED
#include "emulated.h"
#else

typedef unsigned int word;
typedef long long int64;
constexpr unsigned ALL = 0xffffffffu;

#define KERNEL(warps, blocks) extern "C" __global__ void __launch_bounds__(32 * (warps), blocks)
#define DEVICE __device__ __forceinline__
#define CONSTANT __host__ __device__ constexpr
#define SHARED_MEMORY(name) extern __shared__ __align__(16) char name[]
#define ARGUMENT __grid_constant__ const
#define EXPORTED extern "C" __device__

struct __align__(16) words4 { word x, y, z, w; };
struct __align__(8) words2 { word x, y; };
struct __align__(16) floats4 { float x, y, z, w; };
struct __align__(8) floats2 { float x, y; };

// -- two halves in a word ------------------------------------------------------------------------------------

DEVICE word select_or_1024(word a, word mask) {  // the bits of a mask, in the mantissas of 1024
    word out;
    asm("lop3.b32 %0, %1, %2, 0x64006400, 0xEA;" : "=r"(out) : "r"(a), "r"(mask));
    return out;
}
DEVICE word multiply(word a, word b) {
    word out;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
DEVICE word multiply_add(word a, word b, word c) {
    word out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}
DEVICE word negative(word a) {
    word out;
    asm("neg.f16x2 %0, %1;" : "=r"(out) : "r"(a));
    return out;
}
DEVICE word to_halves(float low, float high) {
    word out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
DEVICE float low_of(word a) {
    float out;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(out) : "r"(a));
    return out;
}
DEVICE float high_of(word a) {
    float out;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(out) : "r"(a));
    return out;
}
DEVICE word bytes(word a, word b, word which) { return __byte_perm(a, b, which); }

// -- numbers -------------------------------------------------------------------------------------------------

DEVICE float as_float(word a) { return __uint_as_float(a); }
DEVICE word as_word(float a) { return __float_as_uint(a); }
DEVICE float exp2_of(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
DEVICE float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
DEVICE float tanh_of(float x) { return 1 - 2 * reciprocal(1 + exp2_of(2.8853900817779268f * x)); }
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float root(float a) { return sqrtf(a); }
DEVICE word bfloat_of(float a) {  // rounded to even
    word out;
    asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b32 %0, {h, h};}" : "=r"(out) : "f"(a));
    return out & 0xffff;
}

// -- matrix units, copies, threads ---------------------------------------------------------------------------

DEVICE void add_product(float (&sum)[4], word a0, word a1, word a2, word a3, word b0, word b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void copy_ahead(void* to, const void* from) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((word)__cvta_generic_to_shared(to)), "l"(from));
}
DEVICE void end_of_copies() { asm volatile("cp.async.commit_group;"); }
template <int LATER>
DEVICE void wait_for_copies() {  // of all groups but the LATER last
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}
DEVICE word from_lane(word a, int lane) { return __shfl_sync(ALL, a, lane); }
DEVICE int64 from_lane(int64 a, int lane) { return __shfl_sync(ALL, a, lane); }
DEVICE float from_lane(float a, int lane) { return __shfl_sync(ALL, a, lane); }
DEVICE float from_other(float a, int mask) { return __shfl_xor_sync(ALL, a, mask); }
DEVICE bool any_of(bool a) { return __any_sync(ALL, a); }
DEVICE void warp_barrier() { __syncwarp(); }
DEVICE void barrier() { __syncthreads(); }
DEVICE int arrive(int* counter) {  // how many came before; what was written before is seen by the last
    __threadfence();
    return atomicAdd(counter, 1);
}
DEVICE void see_others() { __threadfence(); }
DEVICE int thread() { return threadIdx.x; }
DEVICE int program(int axis) { return axis == 0 ? blockIdx.x : axis == 1 ? blockIdx.y : blockIdx.z; }
DEVICE int programs(int axis) { return axis == 0 ? gridDim.x : axis == 1 ? gridDim.y : gridDim.z; }
#endif
