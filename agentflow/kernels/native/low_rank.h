// Low-rank changes of a product (LoRA; Hu et al. 2021, arXiv 2106.09685), each for some rows of a batch.
#pragma once

#include "linear.h"

namespace agentflow {

// A part of a change: up [outputs of the part, rank] times the part's rows of `down`. Its outputs start at `first_output`.
struct LowRankPart {
    Weight up;
    int64_t first_output;
};

// A change of W [num_out, num_in].
struct LowRank {
    static constexpr int MAX_PARTS = 3;
    Weight down;  // [ranks of all parts, num_in]
    int64_t num_parts;  // 0: W is not changed
    LowRankPart parts[MAX_PARTS];
};

// The rows of a batch to which one change applies.
struct ChangedRows {
    const LowRank* change;
    const int64_t* rows;
    int64_t num_rows;
};

// Buffers that the changes of all products reuse.
template <class S>
struct LowRankMemory {
    std::vector<RowOf<S>> gathered, inner;  // the rows of the changes, and their products with `down`
    std::vector<S> added;  // [rows of the batch][num_out]: the sum to add to the product
};

// Multiplies a few rows with one panel, and calls put(row, column, width, values) for all its outputs.
template <class S, class Put>
void few_rows(const RowOf<S>* rows, int64_t stride, int64_t num_rows, const Weight& weight, int64_t panel,
              const Put& put) {
    static thread_local std::vector<S> widened;
    alignas(64) float sums[MAX_TILE_ROWS * PANEL];
    const int64_t depth = padded_depth<S>(weight.num_in);
    const S* columns = dense_panel<S>(panel_of<S>(weight, panel), 0, depth, widened);
    each_tile<S>(num_rows, [&](int64_t at, int num) {
        tile<S>(num, rows + at * stride, stride, columns, depth, sums);
        for (int i = 0; i < num; i++) {
            each_vec<S>(sums + i * PANEL, weight, panel,
                        [&](int64_t column, int width, Vec value) { put(at + i, column, width, value); });
        }
    });
}

constexpr int64_t ROW_BLOCK = 64;  // rows that one thread multiplies with one panel

// Writes to memory.added the summand that `changes` add to the product of x [num_rows] with a weight of `num_out` outputs; zeros
// for rows without a change. The products with `down` and the results are each rounded to S. Returns memory.added.
template <class S>
const S* low_rank(const RowOf<S>* x, int64_t stride, int64_t num_rows, int64_t num_out,
                  const std::vector<ChangedRows>& changes, LowRankMemory<S>& memory) {
    struct Unit {
        const ChangedRows* of;
        const Weight* weight;
        int64_t panel, first_row, begin, num;  // `num` rows of the change, from `begin` on; `first_row`: its first gathered row
        int64_t first_rank, first_output;
    };
    std::vector<Unit> downs, ups;
    const auto add_units = [](std::vector<Unit>& units, Unit unit) {
        for (unit.begin = 0; unit.begin < unit.of->num_rows; unit.begin += ROW_BLOCK) {
            unit.num = std::min(ROW_BLOCK, unit.of->num_rows - unit.begin);
            for (unit.panel = 0; unit.panel * PANEL < unit.weight->num_out; unit.panel++) units.push_back(unit);
        }
    };
    int64_t num_gathered = 0, most_ranks = 0;
    for (const ChangedRows& changed : changes) {
        const LowRank& change = *changed.change;
        if (!change.num_parts || !changed.num_rows) continue;
        add_units(downs, {&changed, &change.down, 0, num_gathered, 0, 0, 0, 0});
        int64_t first_rank = 0;
        for (int64_t i = 0; i < change.num_parts; i++) {
            const LowRankPart& part = change.parts[i];
            add_units(ups, {&changed, &part.up, 0, num_gathered, 0, 0, first_rank, part.first_output});
            first_rank += part.up.num_in;
        }
        most_ranks = std::max(most_ranks, first_rank);
        num_gathered += changed.num_rows;
    }
    // Products read rows up to a whole panel, even if a part follows other parts.
    const int64_t inner_stride = round_up<int64_t>(most_ranks, PANEL) + PANEL;
    grow(memory.gathered, (num_gathered + MAX_TILE_ROWS) * stride);
    grow(memory.inner, (num_gathered + MAX_TILE_ROWS) * inner_stride);
    grow(memory.added, num_rows * num_out);
    std::fill_n(memory.inner.begin(), (num_gathered + MAX_TILE_ROWS) * inner_stride, RowOf<S>{});
    std::fill_n(memory.added.begin(), num_rows * num_out, S{});
    int64_t at = 0;
    for (const ChangedRows& changed : changes) {
        if (!changed.change->num_parts) continue;
        for (int64_t i = 0; i < changed.num_rows; i++, at++) {
            std::copy_n(x + changed.rows[i] * stride, stride, memory.gathered.begin() + at * stride);
        }
    }
    team().loop(downs.size(), 1, [&](int64_t first, int64_t end, int) {
        const TilesInUse tiles;
        for (int64_t u = first; u < end; u++) {
            const Unit& unit = downs[u];
            const int64_t row = unit.first_row + unit.begin;
            RowOf<S>* out = memory.inner.data() + row * inner_stride;
            few_rows<S>(memory.gathered.data() + row * stride, stride, unit.num, *unit.weight, unit.panel,
                        [&](int64_t i, int64_t column, int width, Vec value) {
                            store_first(out + i * inner_stride + column, rounded<S>(value), width);
                        });
        }
    });
    team().loop(ups.size(), 4, [&](int64_t first, int64_t end, int) {
        const TilesInUse tiles;
        for (int64_t u = first; u < end; u++) {
            const Unit& unit = ups[u];
            const RowOf<S>* inner = memory.inner.data() + (unit.first_row + unit.begin) * inner_stride + unit.first_rank;
            few_rows<S>(inner, inner_stride, unit.num, *unit.weight, unit.panel,
                        [&](int64_t i, int64_t column, int width, Vec value) {
                            const int64_t row = unit.of->rows[unit.begin + i];
                            store_first(memory.added.data() + row * num_out + unit.first_output + column, value, width);
                        });
        }
    });
    return memory.added.data();
}

}  // namespace agentflow
