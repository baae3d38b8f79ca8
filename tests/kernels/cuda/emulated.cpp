#define EMULATED
#include "attend.cu"

extern "C" int working_bytes_of() { return NEEDED_BYTES; }
extern "C" void launch(const Arguments* arguments, int x, int y, int z) {
    emulated::grid[0] = x, emulated::grid[1] = y, emulated::grid[2] = z;
    for (int k = 0; k < z; k++)
        for (int j = 0; j < y; j++)
            for (int i = x - 1; i >= 0; i--) {
                emulated::at[0] = i, emulated::at[1] = j, emulated::at[2] = k;
                memset(emulated::memory, 0xff, sizeof emulated::memory);
                const Arguments a = *arguments;
                emulated::run([&] { attend(a); });
            }
}
