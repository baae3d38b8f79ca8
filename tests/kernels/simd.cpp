// What every operation of a simd_*.h gives, beside the same a lane at a time. test_simd.py compiles this for each
// instruction set, with SIMD naming its header, and `make neon` for AArch64. It ends with the number of operations that
// are wrong, and names them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include SIMD

namespace {

int wrong = 0;

void expect(const char* what, const void* got, const void* wanted, size_t size) {
    if (std::memcmp(got, wanted, size) == 0) return;
    std::printf("%s is wrong\n", what);
    wrong++;
}

// Compares what `got` stores with what `wanted` says of each of N numbers of type T.
template <class T, int N, class Got, class Wanted>
void each(const char* what, Got got, Wanted wanted) {
    T found[N + 16], right[N];
    got(found);
    for (int i = 0; i < N; i++) right[i] = (T)wanted(i);
    expect(what, found, right, sizeof(right));
}
template <class F>
void words(const char* what, Words got, F wanted) {
    each<int32_t, 16>(what, [&](int32_t* to) { store(to, got); }, wanted);
}
template <class F>
void shorts(const char* what, Words got, F wanted) {
    each<int16_t, 32>(what, [&](int16_t* to) { store(to, got); }, wanted);
}
template <class F>
void bytes(const char* what, Words got, F wanted) {
    each<uint8_t, 64>(what, [&](uint8_t* to) { store(to, got); }, wanted);
}
template <class F>
void floats(const char* what, Floats got, F wanted) {
    each<float, 16>(what, [&](float* to) { store_floats(to, got); }, wanted);
}
template <class F>
void lanes(const char* what, Shorts got, F wanted) {
    each<uint16_t, LANES>(what, [&](uint16_t* to) { store_shorts(to, got); }, wanted);
}

std::mt19937 numbers(0);

// Random numbers of all types, in the memory of one another.
struct Random {
    union {
        int32_t words[16];
        int16_t shorts[32];
        uint16_t unsigned_shorts[32];
        uint8_t bytes[64];
        int8_t signed_bytes[64];
    };
    float floats[16];
    Random() {
        for (int i = 0; i < 16; i++) words[i] = (int32_t)numbers(), floats[i] = words[i] * 1e-6f;
    }
    Words all() const { return load(words); }
    Floats all_floats() const { return load_floats(floats); }
};

int q15(int a, int b) { return (a * b + 0x4000) >> 15; }

void of_integers() {
    const Random r, s, sum;
    const Words a = r.all(), b = s.all();
    words("load", a, [&](int i) { return r.words[i]; });
    words("zero_words", zero_words(), [](int) { return 0; });
    words("broadcast", broadcast(-7654321), [](int) { return -7654321; });
    shorts("broadcast16", broadcast16(-321), [](int) { return -321; });
    shorts("broadcast_quad", broadcast_quad(r.shorts), [&](int i) { return r.shorts[i % 4]; });
    words("and", a & b, [&](int i) { return r.words[i] & s.words[i]; });
    words("or", a | b, [&](int i) { return r.words[i] | s.words[i]; });
    shorts("shift_right16<0>", shift_right16<0>(a), [&](int i) { return r.shorts[i]; });
    shorts("shift_right16", shift_right16<5>(a), [&](int i) { return r.unsigned_shorts[i] >> 5; });
    shorts("shift_left16<0>", shift_left16<0>(a), [&](int i) { return r.shorts[i]; });
    shorts("shift_left16", shift_left16<5>(a), [&](int i) { return r.unsigned_shorts[i] << 5; });
    shorts("shift_left16_by", shift_left16_by(a, 7), [&](int i) { return r.unsigned_shorts[i] << 7; });
    words("shift_right32", shift_right32<12>(a), [&](int i) { return (uint32_t)r.words[i] >> 12; });
    words("shift_left32", shift_left32<16>(a), [&](int i) { return (uint32_t)r.words[i] << 16; });
    shorts("add16", add16(a, b), [&](int i) { return r.shorts[i] + s.shorts[i]; });
    shorts("sub16", sub16(a, b), [&](int i) { return r.shorts[i] - s.shorts[i]; });
    shorts("multiply_q15", multiply_q15(a, b), [&](int i) { return q15(r.shorts[i], s.shorts[i]); });
    words("dot16", dot16(sum.all(), a, b), [&](int i) {
        const auto product = [&](int j) { return (uint32_t)(r.shorts[2 * i + j] * s.shorts[2 * i + j]); };
        return (uint32_t)sum.words[i] + product(0) + product(1);
    });
    words("dot8", dot8(sum.all(), a, b), [&](int i) {
        uint32_t found = (uint32_t)sum.words[i];
        for (int j = 4 * i; j < 4 * i + 4; j++) found += (uint32_t)(r.bytes[j] * s.signed_bytes[j]);
        return found;
    });
    words("load_bytes", load_bytes(r.bytes + 1), [&](int i) { return r.bytes[1 + i]; });
    words("load_quads", load_quads(r.bytes, 7), [&](int i) { return r.bytes[i / 4 * 7 + i % 4]; });
    bytes("narrow", narrow(a, b), [&](int i) { return i < 32 ? r.shorts[i] : s.shorts[i - 32]; });
    bytes("load_twice", load_twice(r.bytes + 3), [&](int i) { return r.bytes[3 + i % 32]; });
    bytes("join_halves", join_halves(a, b), [&](int i) { return i < 32 ? r.bytes[i] : s.bytes[i]; });
    bytes("swap_halves", swap_halves(a), [&](int i) { return r.bytes[(i + 32) % 64]; });
    shorts("high_half_down4", high_half_down4(a),
           [&](int i) { return i < 16 ? r.shorts[i] : r.unsigned_shorts[i] >> 4; });
    each<uint8_t, 64>("store_halves", [&](uint8_t* to) { store_halves(to + 32, to, a); },
                      [&](int i) { return r.bytes[(i + 32) % 64]; });
    bytes("join_bytes", join_bytes(a, b), [&](int i) { return i % 2 ? s.bytes[i - 1] : r.bytes[i]; });
    shorts("join_words", join_words(a, b), [&](int i) { return i % 2 ? s.shorts[i - 1] : r.shorts[i]; });
    // Of every 128 bits.
    shorts("zip_low16", zip_low16(a, b), [&](int i) { return (i % 2 ? s : r).shorts[i / 8 * 8 + i % 8 / 2]; });
    shorts("zip_high16", zip_high16(a, b), [&](int i) { return (i % 2 ? s : r).shorts[i / 8 * 8 + 4 + i % 8 / 2]; });

    int32_t small[16];
    for (int i = 0; i < 16; i++) small[i] = r.shorts[i];
    each<int16_t, 16>("store_low_words", [&](int16_t* to) { store_low_words(to, load(small)); },
                      [&](int i) { return small[i]; });
    each<int16_t, 16>("store_paired16", [&](int16_t* to) { store_paired16(to, load(small)); },
                      [&](int i) { return small[i / 4 * 4 + i % 2 * 2 + i % 4 / 2]; });
    each<uint8_t, 16>("store_bytes", [&](uint8_t* to) { store_bytes(to, load_bytes(r.bytes)); },
                      [&](int i) { return r.bytes[i]; });

    Random given[16];
    Words rows[16];
    for (int i = 0; i < 16; i++) rows[i] = given[i].all();
    transpose(rows);
    for (int j = 0; j < 16; j++) words("transpose", rows[j], [&](int i) { return given[i].words[j]; });
}

void of_tables() {
    const Random r, places;
    int16_t entries[256], codes[32];
    for (auto& entry : entries) entry = (int16_t)numbers();
    for (int i = 0; i < 32; i++) codes[i] = places.shorts[i] & 15;
    shorts("look_up", look_up(load_table(entries), load(codes)), [&](int i) { return entries[codes[i]]; });
    const LargeTable large = load_large_table(entries);
    shorts("look_up<256>", look_up<256>(large, places.bytes), [&](int i) { return entries[places.bytes[i]]; });
    uint8_t low[32];
    for (int i = 0; i < 32; i++) low[i] = places.bytes[i] % 64;
    shorts("look_up<64>", look_up<64>(large, low), [&](int i) { return entries[low[i]]; });

    uint16_t x[45];
    int32_t found[45 + 16], listed[45], count = 0;
    for (auto& each : x) each = numbers() % 100;
    for (int i = 0; i < 45; i++)
        if (x[i] >= 40 && x[i] < 70) listed[count++] = i;
    const int32_t length = list_between(x, 45, 40, 30, found);
    expect("list_between", &length, &count, sizeof(count));
    expect("list_between", found, listed, count * sizeof(int32_t));
}

void of_floats() {
    Random r, s, t;
    r.floats[3] = NAN, s.floats[5] = NAN;
    const Floats a = r.all_floats(), b = s.all_floats(), c = t.all_floats();
    const float *x = r.floats, *y = s.floats, *z = t.floats;
    floats("broadcast_float", broadcast_float(1.5f), [](int) { return 1.5f; });
    floats("maximum", maximum(a, b), [&](int i) { return x[i] > y[i] ? x[i] : y[i]; });
    floats("minimum", minimum(a, b), [&](int i) { return x[i] < y[i] ? x[i] : y[i]; });
    floats("zero_below", zero_below(c, a, b), [&](int i) { return x[i] >= y[i] ? z[i] : 0; });
    r.floats[3] = -1, s.floats[5] = 0.25f;
    const Floats d = r.all_floats(), e = s.all_floats();
    floats("add", d + e, [&](int i) { return x[i] + y[i]; });
    floats("subtract", d - e, [&](int i) { return x[i] - y[i]; });
    floats("times", d * e, [&](int i) { return x[i] * y[i]; });
    floats("divide", d / e, [&](int i) { return x[i] / y[i]; });
    floats("fma", fma(d, e, c), [&](int i) { return std::fma(x[i], y[i], z[i]); });
    floats("absolute", absolute(d), [&](int i) { return std::fabs(x[i]); });
    const float high = highest(d), low = lowest(d);
    expect("highest", &high, std::max_element(x, x + 16), 4);
    expect("lowest", &low, std::min_element(x, x + 16), 4);
    const Words small = load_bytes(t.bytes);
    float total = 0;
    for (int i = 0; i < 16; i++) total += t.bytes[i];
    const float summed = sum(to_floats(small));
    expect("sum", &summed, &total, 4);
    floats("to_floats", to_floats(t.all()), [&](int i) { return (float)t.words[i]; });
    floats("as_floats", as_floats(as_words(d)), [&](int i) { return x[i]; });
    for (int i = 0; i < 16; i++) r.floats[i] = i < 8 ? i - 3.5f : x[i];
    words("to_nearest", to_nearest(r.all_floats()), [&](int i) { return std::lrintf(x[i]); });
    floats("round_to_whole", round_to_whole(r.all_floats()), [&](int i) { return std::rint(x[i]); });
    for (int i = 0; i < 16; i++) s.floats[i] = i * 9 - 70;
    floats("times_power_of_two", times_power_of_two(c, s.all_floats()),
           [&](int i) { return std::ldexp(z[i], (int)y[i]); });
}

float of_fp16(int h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float size = exponent ? std::ldexp(1024.f + mantissa, exponent - 25) : std::ldexp((float)mantissa, -24);
    return h & 0x8000 ? -size : size;
}

// All finite numbers of fp16, and what lies between two of them; some of bf16.
void of_halves() {
    for (int from = 0; from < 0x10000; from += 16) {
        if ((from & 0x7C00) == 0x7C00) continue;
        uint16_t h[16];
        float between[16];
        for (int i = 0; i < 16; i++) h[i] = (uint16_t)(from + i);
        floats("load_fp16", load_fp16(h), [&](int i) { return of_fp16(h[i]); });
        each<uint16_t, 16>("store_fp16", [&](uint16_t* to) { store_fp16(to, load_fp16(h)); },
                           [&](int i) { return h[i]; });
        const auto is_last = [&](int i) { return h[i] == 0x7BFF || h[i] == 0xFBFF; };
        for (int i = 0; i < 16; i++) between[i] = (of_fp16(h[i]) + of_fp16(h[i] + !is_last(i))) / 2;
        each<uint16_t, 16>("store_fp16 of ties", [&](uint16_t* to) { store_fp16(to, load_floats(between)); },
                           [&](int i) { return is_last(i) ? h[i] : (h[i] + 1) & ~1; });
        each<uint16_t, 16>("float_to_fp16", [&](uint16_t* to) {
            for (int i = 0; i < 16; i++) to[i] = float_to_fp16(fp16_to_float(h[i]));
        }, [&](int i) { return h[i]; });
    }
    const Random r;
    floats("load_bf16", load_bf16(r.unsigned_shorts), [&](int i) {
        const uint32_t bits = (uint32_t)r.unsigned_shorts[i] << 16;
        float found;
        std::memcpy(&found, &bits, 4);
        return found;
    });
    uint32_t bits[16];
    float x[16];
    for (int i = 0; i < 16; i++) bits[i] = i < 8 ? 0x3F808000 + i * 0x10000 : 0x41234567 + i * 0x1357;
    std::memcpy(x, bits, sizeof(x));
    each<uint16_t, 16>("store_bf16", [&](uint16_t* to) { store_bf16(to, load_floats(x)); },
                       [&](int i) { return (bits[i] + 0x7FFF + (bits[i] >> 16 & 1)) >> 16; });
#ifdef XQ_BF16_PAIRS
    if (!has_bf16_pairs()) return;
    uint16_t rounded[16], a[32], b[32];
    store_bf16(rounded, load_floats(x));
    each<uint16_t, 32>("to_bf16", [&](uint16_t* to) { store(to, to_bf16(load_floats(x), load_floats(x))); },
                       [&](int i) { return rounded[i % 16]; });
    for (int i = 0; i < 32; i++) a[i] = 0x3F80 + i, b[i] = 0x4080 - 2 * i;  // products and sums that are exact
    uint32_t pair;
    std::memcpy(&pair, a + 6, 4);
    const auto of = [](uint16_t h) {
        const uint32_t wide = (uint32_t)h << 16;
        float found;
        std::memcpy(&found, &wide, 4);
        return found;
    };
    floats("dot_bf16", dot_bf16(load_floats(x), &pair, load(b)), [&](int i) {
        return x[i] + (of(a[6]) * of(b[2 * i]) + of(a[7]) * of(b[2 * i + 1]));
    });
#endif
}

void of_shorts() {
    Random r, s, t;
    for (int i = 0; i < 32; i++)  // the square of a difference of -2^15 is 2^15 or one less
        if (i % 3 == 0 || r.shorts[i] - s.shorts[i] <= -32768) s.shorts[i] = r.shorts[i];
    const Shorts a = load_shorts(r.shorts), b = load_shorts(s.shorts), c = load_shorts(t.shorts);
    const uint16_t *x = r.unsigned_shorts, *y = s.unsigned_shorts, *z = t.unsigned_shorts;
    lanes("load_shorts", a, [&](int i) { return x[i]; });
    lanes("broadcast_short", broadcast_short(-5), [](int) { return -5; });
    lanes("least", least(a, b), [&](int i) { return std::min(x[i], y[i]); });
    lanes("where_equal", where_equal(a, b, c, a), [&](int i) { return x[i] == y[i] ? z[i] : x[i]; });
    lanes("subtract (shorts)", subtract(a, b), [&](int i) { return x[i] - y[i]; });
    lanes("add_up_to_limit", add_up_to_limit(a, b), [&](int i) { return std::min(x[i] + y[i], 65535); });
    lanes("multiply", multiply(a, b), [&](int i) { return (uint32_t)x[i] * y[i]; });
    lanes("scaled_square", scaled_square(a, b), [&](int i) {
        const int difference = std::min(r.shorts[i] - s.shorts[i], 32767);
        return q15(difference, difference);
    });
    for (int i = 0; i < 32; i++) r.shorts[i] &= 255;
    each<uint8_t, LANES>("store_low_bytes", [&](uint8_t* to) { store_low_bytes(to, load_shorts(r.shorts)); },
                         [&](int i) { return r.shorts[i]; });
}

}  // namespace

int main() {
    for (int i = 0; i < 20; i++) {
        of_integers();
        of_tables();
        of_floats();
        of_shorts();
    }
    of_halves();
    return std::min(wrong, 100);
}
