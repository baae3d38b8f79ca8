#define ISA neon
#include "simd_neon.h"
#include "isa.h"
