// Multiplications a second that all threads together reach in registers: each instruction over and over, on
// accumulators that do not wait for each other. Prints one line an instruction: its name, then multiply-adds.
// g++ -O2 -fopenmp peak.cpp
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

// 24 accumulators cover the latency; zmm30 and zmm31 are the factors.
#define ON(name, to) name " %%zmm30, %%zmm31, %%zmm" #to "\n"
#define FOUR(name, a, b, c, d) ON(name, a) ON(name, b) ON(name, c) ON(name, d)
#define ALL(name)                                                                             \
    FOUR(name, 0, 1, 2, 3) FOUR(name, 4, 5, 6, 7) FOUR(name, 8, 9, 10, 11)                      \
    FOUR(name, 12, 13, 14, 15) FOUR(name, 16, 17, 18, 19) FOUR(name, 20, 21, 22, 23)
#define MEASURE(name, each) report(name, each, [] { asm volatile(ALL(name) ::: "memory"); })

constexpr int TIMES = 1000000, RUNS = 7;

template <class Body>
void report(const char* name, int each, Body body) {
    using clock = std::chrono::steady_clock;
    double best = 0;
    int threads = 1;
    for (int run = 0; run < RUNS; run++) {
        const auto start = clock::now();
#pragma omp parallel
        {
#pragma omp single
            threads = omp_get_num_threads();
            asm volatile("vpxord %%zmm30, %%zmm30, %%zmm30\nvpxord %%zmm31, %%zmm31, %%zmm31\n" ::: "memory");
            for (int i = 0; i < TIMES; i++) body();
        }
        const double seconds = std::chrono::duration<double>(clock::now() - start).count();
        best = std::max(best, 24.0 * each * TIMES * threads / seconds);
    }
    std::printf("%s %.0f\n", name, best);
}

int main() {
    if (__builtin_cpu_supports("avx512f")) MEASURE("vfmadd231ps", 16);
    if (__builtin_cpu_supports("avx512vnni")) MEASURE("vpdpwssd", 32);
    if (__builtin_cpu_supports("avx512bf16")) MEASURE("vdpbf16ps", 32);
}
