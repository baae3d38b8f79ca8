// The search for the best codes of rows of numbers: `quant.trellis._Search`, bit for bit. Costs are 16-bit numbers
// that end at 65535, and LANES rows are searched side by side.
#pragma once
#include "widths.h"
#include "workspace.h"

namespace {

class TrellisSearch {
  public:
    static size_t bytes(int tokens) {
        return (2 * sizeof(uint16_t) + most_codes(tokens) / 2) * WINDOWS * LANES + 3 * 64;
    }
    TrellisSearch(int tokens, Workspace& workspace) : tokens(tokens) {
        cost = workspace.take<uint16_t>(WINDOWS * LANES);
        next = workspace.take<uint16_t>(WINDOWS * LANES);
        choices = workspace.take<uint8_t>(most_codes(tokens) * WINDOWS / 2 * LANES);
    }

    // The codes [tokens / width.tokens][LANES] of rows of numbers [tokens][LANES] in units, with these levels [2][256]
    // in units, and weights [tokens][LANES] of the errors, at most 16; of weight 0 any level will do.
    void codes(const Width& width, const int16_t* levels, const int16_t* numbers, const int16_t* weights,
               uint8_t* out) {
        const Search search = pick(width);
        this->levels = levels;
        this->numbers = numbers;
        this->weights = weights;
        (this->*search)(out);
    }

  private:
    static constexpr int LEVELLED = 8, LEAD = 24, DEAREST = 4095;  // as in quant/trellis.py
    using Search = void (TrellisSearch::*)(uint8_t*);
    const int tokens;
    uint16_t *cost, *next;  // [256][LANES] of the best ways to each window
    uint8_t* choices;       // [codes][256 >> K][LANES] which of the windows that differ in their oldest bits was best
    const int16_t *levels, *numbers, *weights;

    static size_t most_codes(int tokens) { return std::max(tokens, 2 * LEAD); }
    static Search pick(const Width& width) {
        if (width.tokens == 2)
            return width.code == 1 ? &TrellisSearch::search<1, 2>
                                   : width.code == 3 ? &TrellisSearch::search<3, 2> : &TrellisSearch::search<5, 2>;
        static constexpr Search each[] = {&TrellisSearch::search<1, 1>, &TrellisSearch::search<2, 1>,
                                          &TrellisSearch::search<3, 1>, &TrellisSearch::search<4, 1>};
        return each[width.code - 1];
    }

    template <int K, int V>
    void search(uint8_t* out) {
        constexpr int BRANCHES = 1 << K, SHARED = WINDOWS >> K;
        const int count = tokens / V, lead = LEAD / K;
        int window[LANES], start[LANES];
        std::fill(cost, cost + WINDOWS * LANES, (uint16_t)0);
        forward<K, V>(count - lead % count, 2 * lead);
        find_cheapest(window);
        for (int step = 2 * lead - 1; step > lead; step--) back<K>(step, window);
        for (int lane = 0; lane < LANES; lane++) start[lane] = window[lane] >> K;

        for (int s = 0; s < WINDOWS; s++)
            for (int lane = 0; lane < LANES; lane++)
                cost[s * LANES + lane] = s % SHARED == start[lane] ? 0 : UINT16_MAX;
        forward<K, V>(0, count);
        for (int lane = 0; lane < LANES; lane++) {
            window[lane] = start[lane];
            for (int s = start[lane] + SHARED; s < WINDOWS; s += SHARED)
                if (cost[s * LANES + lane] < cost[window[lane] * LANES + lane]) window[lane] = s;
        }
        for (int step = count - 1; step >= 0; step--) {
            for (int lane = 0; lane < LANES; lane++)
                out[step * LANES + lane] = (uint8_t)(window[lane] % BRANCHES);
            back<K>(step, window);
        }
    }

    // The window of each row that costs least, the first of equal ones.
    void find_cheapest(int* window) const {
        Shorts best = load_shorts(cost), found = broadcast_short(0);
        for (int s = 1; s < WINDOWS; s++) {
            const Shorts lower = least(best, load_shorts(cost + s * LANES));
            found = where_equal(lower, best, found, broadcast_short((int16_t)s));
            best = lower;
        }
        int16_t each[LANES];
        store_shorts(each, found);
        std::copy(each, each + LANES, window);
    }

    template <int K>
    void back(int step, int* window) const {
        constexpr int SHARED = WINDOWS >> K;
        const uint8_t* choice = choices + (size_t)step * SHARED * LANES;
        for (int lane = 0; lane < LANES; lane++) {
            const int known = window[lane] >> K;
            window[lane] = known + choice[known * LANES + lane] * SHARED;
        }
    }

    // Goes on over `count` codes from code `first` of the circle.
    template <int K, int V>
    void forward(int first, int count) {
        constexpr int BRANCHES = 1 << K, SHARED = WINDOWS >> K;
        const int16_t* const levels = this->levels;
        uint8_t* choice_to = choices;
        for (int step = 0; step < count; step++) {
            const Shorts lowest = step % LEVELLED ? broadcast_short(0) : lowest_cost();
            const int token = (first + step) * V % tokens;
            Shorts number[V], weight[V];
            for (int v = 0; v < V; v++) {
                number[v] = load_shorts(numbers + (size_t)(token + v) * LANES);
                weight[v] = load_shorts(weights + (size_t)(token + v) * LANES);
            }
            const uint16_t* before = cost;
            uint16_t* after = next;
            for (int p = 0; p < SHARED; p++) {
                Shorts best = load_shorts(before + p * LANES), choice = broadcast_short(0);
                unroll<BRANCHES - 1>([&](auto j) {
                    constexpr int i = j + 1;
                    const Shorts lower = least(best, load_shorts(before + (p + i * SHARED) * LANES));
                    choice = where_equal(lower, best, choice, broadcast_short(i));
                    best = lower;
                });
                store_low_bytes(choice_to, choice);
                choice_to += LANES;
                best = subtract(best, lowest);
                const int16_t* const own = levels + p * BRANCHES;
                unroll<BRANCHES>([&](auto s) {
                    Shorts total = best;
                    for (int v = 0; v < V; v++) {
                        const Shorts level = broadcast_short(own[v * WINDOWS + s]);
                        const Shorts error = least(scaled_square(number[v], level), broadcast_short(DEAREST));
                        total = add_up_to_limit(total, multiply(error, weight[v]));
                    }
                    store_shorts(after + s * LANES, total);
                });
                after += BRANCHES * LANES;
            }
            std::swap(cost, next);
        }
    }

    // Of each row, of all of its windows.
    Shorts lowest_cost() const {
        Shorts lowest = load_shorts(cost);
        for (int s = 1; s < WINDOWS; s++) lowest = least(lowest, load_shorts(cost + s * LANES));
        return lowest;
    }
};

}  // namespace
