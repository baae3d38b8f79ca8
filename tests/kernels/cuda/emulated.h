// What device.h has, on the CPU: the threads of a program are coroutines, which take turns where they meet. A warp's
// threads tell each other what they have through a table; the matrix units' order of rows and columns is that of PTX
// (mma.m16n8k16). Copies that run ahead are done at once.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

typedef uint32_t word;
typedef long long int64;

#define DEVICE static inline
#define CONSTANT constexpr
#define KERNEL(warps, blocks) static void
#define ARGUMENT const
#define EXPORTED extern "C"
#define SHARED_MEMORY(name) char* name = emulated::memory

struct alignas(16) words4 { word x, y, z, w; };
struct alignas(8) words2 { word x, y; };
struct alignas(16) floats4 { float x, y, z, w; };
struct alignas(8) floats2 { float x, y; };

namespace emulated {
constexpr int THREADS = 256, STACK = 1 << 17;
enum State { READY, WARP, ALL, DONE };
alignas(16) char memory[1 << 18];
char stacks[THREADS][STACK];
ucontext_t scheduler, contexts[THREADS];
State state[THREADS];
int now, grid[3], at[3];
word told[2][THREADS][8];  // what each thread tells its warp, in turns
int turn[THREADS];

inline void wait(State what) {
    state[now] = what;
    const int own = now;
    swapcontext(&contexts[own], &scheduler);
}
inline word (*tell(const word* numbers, int count))[8] {  // of the first thread of the warp
    const int own = turn[now]++ & 1;
    for (int i = 0; i < count; i++) told[own][now][i] = numbers[i];
    wait(WARP);
    return &told[own][now / 32 * 32];
}
inline bool all_are(int first, int count, State what) {
    bool some = false;
    for (int i = first; i < first + count; i++) {
        if (state[i] == DONE) continue;
        if (state[i] != what) return false;
        some = true;
    }
    return some;
}
template <class Body>
void run(Body body) {
    static Body* held;
    held = &body;
    for (int i = 0; i < THREADS; i++) {
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks[i], contexts[i].uc_stack.ss_size = STACK;
        contexts[i].uc_link = &scheduler;
        state[i] = READY, turn[i] = 0;
        makecontext(&contexts[i], [] { (*held)(); state[now] = DONE; }, 0);
    }
    for (bool going = true; going;) {
        going = false;
        for (int i = 0; i < THREADS; i++)
            if (state[i] == READY) now = i, swapcontext(&scheduler, &contexts[i]), going = true;
        for (int w = 0; w < THREADS; w += 32)
            if (all_are(w, 32, WARP))
                for (int i = w; i < w + 32; i++) if (state[i] == WARP) state[i] = READY, going = true;
        if (!going && all_are(0, THREADS, ALL))
            for (int i = 0; i < THREADS; i++) if (state[i] == ALL) state[i] = READY, going = true;
    }
    for (int i = 0; i < THREADS; i++)
        if (state[i] != DONE) abort();  // they wait for each other for ever
}
}  // namespace emulated

inline float half_float(uint16_t bits) { _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
inline uint16_t float_half(double x) { _Float16 h = (_Float16)x; uint16_t b; memcpy(&b, &h, 2); return b; }
inline float low_of(word a) { return half_float(a & 0xffff); }
inline float high_of(word a) { return half_float(a >> 16); }
inline word pair(double low, double high) { return float_half(low) | (word)float_half(high) << 16; }
inline word to_halves(float low, float high) { return pair(low, high); }
inline word select_or_1024(word a, word mask) { return (a & mask) | 0x64006400; }
inline word multiply(word a, word b) { return pair((double)low_of(a) * low_of(b), (double)high_of(a) * high_of(b)); }
inline word multiply_add(word a, word b, word c) {
    return pair((double)low_of(a) * low_of(b) + low_of(c), (double)high_of(a) * high_of(b) + high_of(c));
}
inline word negative(word a) { return a ^ 0x80008000; }
inline word bytes(word a, word b, word which) {
    const uint64_t all = a | (uint64_t)b << 32;
    word out = 0;
    for (int i = 0; i < 4; i++) out |= (word)(all >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
inline float as_float(word a) { float f; memcpy(&f, &a, 4); return f; }
inline word as_word(float a) { word w; memcpy(&w, &a, 4); return w; }
inline float exp2_of(float x) { return exp2f(x); }
inline float tanh_of(float x) { return tanhf(x); }
inline float larger(float a, float b) { return fmaxf(a, b); }
inline float root(float a) { return sqrtf(a); }
inline word bfloat_of(float a) {
    const word bits = as_word(a);
    return a != a ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void add_product(float (&sum)[4], word a0, word a1, word a2, word a3, word b0, word b1) {
    const word own[6] = {a0, a1, a2, a3, b0, b1};
    const int lane = emulated::now % 32;
    const auto warp = emulated::tell(own, 6);
    auto half = [&](int lane, int place, int k) { return k % 2 ? high_of(warp[lane][place]) : low_of(warp[lane][place]); };
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double total = sum[i];
        for (int k = 0; k < 16; k++)
            total += (double)half(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k) * half(column * 4 + k % 8 / 2, 4 + k / 8, k);
        sum[i] = (float)total;
    }
}
inline void copy_ahead(void* to, const void* from) { memcpy(to, from, 16); }
inline void end_of_copies() {}
template <int LATER>
inline void wait_for_copies() {}
inline word from_lane(word a, int lane) { return emulated::tell(&a, 1)[lane % 32][0]; }
inline int64 from_lane(int64 a, int lane) {
    const word own[2] = {(word)a, (word)(a >> 32)};
    const auto told = emulated::tell(own, 2)[lane % 32];
    return told[0] | (int64)told[1] << 32;
}
inline float from_lane(float a, int lane) { return as_float(from_lane(as_word(a), lane)); }
inline float from_other(float a, int mask) { return from_lane(a, emulated::now % 32 ^ mask); }
inline bool any_of(bool a) {
    const word own = a;
    const auto warp = emulated::tell(&own, 1);
    for (int i = 0; i < 32; i++) if (warp[i][0]) return true;
    return false;
}
inline void warp_barrier() { emulated::wait(emulated::WARP); }
inline void barrier() { emulated::wait(emulated::ALL); }
inline int arrive(int* counter) { return (*counter)++; }
inline void see_others() {}
inline int thread() { return emulated::now; }
inline int program(int axis) { return emulated::at[axis]; }
inline int programs(int axis) { return emulated::grid[axis]; }
