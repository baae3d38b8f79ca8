#define PATH avx2
#include "simd_avx2.h"
#include "isa.h"
