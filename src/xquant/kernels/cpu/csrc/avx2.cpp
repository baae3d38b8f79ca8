#define ISA avx2
#include "simd_avx2.h"
#include "isa.h"
