// Scratch memory. Included once for each instruction set.
#pragma once
#include <cstdlib>

namespace {

// Scratch memory of a thread, 64-byte aligned. It is kept between calls, or every call would begin with
// page faults.
struct Workspace {
    uint8_t *base = nullptr, *next = nullptr;
    size_t size = 0;
    ~Workspace() { std::free(base); }

    // Empties it and makes room. False: there is not so much memory.
    bool reserve(size_t wanted) {
        if (wanted > size) {
            std::free(base);
            size = (wanted + 4095) / 4096 * 4096;
            base = (uint8_t*)std::aligned_alloc(64, size);
            if (!base) size = 0;
        }
        next = base;
        return base != nullptr;
    }
    template <class T>
    T* take(size_t count) {
        T* p = (T*)next;
        next += (count * sizeof(T) + 63) / 64 * 64;
        return p;
    }
};

}  // namespace
