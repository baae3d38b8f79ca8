// The functions of one instruction set; PATH is its name.
#pragma once
#include "tiles.h"
#include "attend.h"

#define XQ_JOIN2(a, b) a##b
#define XQ_JOIN(a, b) XQ_JOIN2(a, b)

extern "C" __attribute__((visibility("default"))) int XQ_JOIN(xq_attend_, PATH)(const xq_attend* call) { return attend(*call); }
