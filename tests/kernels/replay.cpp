// Makes the calls of a file that tests/support/recorded_calls.py wrote, with another library, and compares all memory
// that they reach with what it was afterwards: replay LIBRARY ISA FILE. It ends with 1 where a byte differs.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

FILE* file;

void read(void* to, size_t size) {
    if (std::fread(to, 1, size, file) == size) return;
    std::puts("the file ends within a call");
    std::exit(2);
}
template <class T>
T read() {
    T x;
    read(&x, sizeof(x));
    return x;
}

struct Region {
    size_t size;
    char* memory;
    std::vector<char> before, after;

    Region() : size(read<int64_t>()) {
        const bool changed = read<int32_t>();
        memory = (char*)std::aligned_alloc(64, (size + 127) / 64 * 64);
        before.resize(size);
        read(before.data(), size);
        after = before;
        if (changed) read(after.data(), size);
        std::memcpy(memory, before.data(), size);
    }
    // An address that the call has not overwritten is expected to be still there.
    void set_address(size_t at, uint64_t to) {
        std::memcpy(memory + at, &to, 8);
        if (std::memcmp(before.data() + at, after.data() + at, 8)) return;
        std::memcpy(before.data() + at, &to, 8);
        std::memcpy(after.data() + at, &to, 8);
    }
    size_t changed() const {
        size_t count = 0;
        for (size_t i = 0; i < size; i++) count += before[i] != after[i];
        return count;
    }
    size_t wrong() const {
        size_t count = 0;
        for (size_t i = 0; i < size; i++) count += memory[i] != after[i];
        return count;
    }
};

struct Count {
    size_t calls, written, wrong;
};

// Makes one call; `name`: of the function, which is of the library.
Count repeat(void* library, const std::string& isa, std::string& name) {
    const int name_size = read<int32_t>(), test_size = read<int32_t>(), structure_size = read<int32_t>();
    const int expected = read<int32_t>();
    std::string test(test_size, ' ');
    std::vector<char> structure(structure_size);
    name.resize(name_size);
    read(&name[0], name_size);
    read(&test[0], test_size);
    read(structure.data(), structure_size);
    const int region_count = read<int32_t>(), address_count = read<int32_t>();
    std::vector<Region> regions(region_count);
    for (int i = 0; i < address_count; i++) {
        const int region = read<int32_t>();
        const size_t at = read<int64_t>();
        char* const memory = regions[read<int32_t>()].memory;
        const uint64_t to = (uint64_t)(uintptr_t)(memory + read<int64_t>());
        if (region < 0) std::memcpy(structure.data() + at, &to, 8);
        else regions[region].set_address(at, to);
    }
    const auto function = (int (*)(const void*))dlsym(library, ("xq_" + name + "_" + isa).c_str());
    if (!function) std::printf("the library has no %s for %s\n", name.c_str(), isa.c_str()), std::exit(2);
    const int returned = function(structure.data());
    Count count = {1, 0, returned != expected};
    for (Region& region : regions) {
        if (expected == 0) {  // what a call that fails has written is nothing to go by
            count.written += region.changed();
            count.wrong += region.wrong();
        }
        std::free(region.memory);
    }
    if (count.wrong) std::printf("%s, %s: %zu bytes differ\n", name.c_str(), test.c_str(), count.wrong);
    return count;
}

}  // namespace

int main(int argc, char** argv) {
    void* const library = argc == 4 ? dlopen(argv[1], RTLD_NOW) : nullptr;
    file = library ? std::fopen(argv[3], "rb") : nullptr;
    if (!file) return std::puts(argc == 4 && !library ? dlerror() : "replay LIBRARY ISA FILE"), 2;
    std::map<std::string, Count> counts;
    size_t wrong = 0;
    for (char begin[4]; std::fread(begin, 1, 4, file) == 4;) {
        std::string name;
        const Count count = repeat(library, argv[2], name);
        Count& all = counts[name];
        all = {all.calls + 1, all.written + count.written, all.wrong + count.wrong};
        wrong += count.wrong;
    }
    for (const auto& [name, count] : counts)
        std::printf("%-15s %5zu calls, %9zu bytes written, %zu differ\n", name.c_str(), count.calls, count.written,
                    count.wrong);
    return wrong || counts.empty();
}
