#define ISA avx512
#include "simd_avx512.h"
#include "isa.h"
