// Memory that the kernels work in: everything a thread needs for a task is taken from one allocation. A thread
// keeps it between calls, since new memory would cost page faults at every call.
#pragma once
#include <cstdlib>

namespace {

// Memory of one thread, handed out from the start on in pieces that are aligned to 64 bytes.
struct Workspace {
    uint8_t *base = nullptr, *next = nullptr;
    size_t size = 0;
    ~Workspace() { std::free(base); }

    // Takes back all pieces and grows to at least `wanted` bytes. False: there is not enough memory.
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
