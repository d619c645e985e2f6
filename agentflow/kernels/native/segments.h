// Attention in both directions within segments of rows, as in encoders: nothing is cached, and all rows of a segment attend to
// the same keys.
//
// A task is the attention of some rows of one segment for one head. It packs keys and values into panels, up to SEGMENT_KEYS
// at a time. For each tile of rows it first computes the scores with all these keys, so that each row has one maximum, and its
// weighted sum is one long product. If a segment has more keys, the sums of the blocks are added as in attention.h.
#pragma once

#include <vector>

#include "attention.h"

namespace agentflow {

constexpr int SEGMENT_KEYS = 1024;            // this number of packed keys and values fits a core's private cache
constexpr int64_t LEAST_ROWS_OF_TASK = 128;   // packing the keys does not pay off for fewer rows
constexpr int WEIGHTS_STRIDE = SEGMENT_KEYS + PANEL;  // not a power of two, so that the rows of a tile are in different cache sets

// The queries and results of rows. `query` and `out` start at row `first`.
template <class S>
struct SegmentRows {
    const S* query;
    int64_t query_stride;
    S* out;  // [rows][heads * head_dim]
    int64_t first, end;
    int64_t num_heads;
    float scale;
};

// Rows `first` to `end` (exclusive) of the segment that has rows `begin` to `begin` + `num_keys` (exclusive), for one head.
struct SegmentTask {
    int64_t begin, num_keys, first, end, head;
};

// Turns the scores of one row with `num` keys into weights relative to the largest score. `scale` includes log2(e). `scores`:
// [panels][MAX_TILE_ROWS][PANEL], from the row's first score on. The weights are padded with zeros to a whole panel.
template <class S>
ALWAYS_INLINE void weigh_all(float* scores, int num, float scale, float& most, float& total, RowOf<S>* weights) {
    constexpr int STEP = MAX_TILE_ROWS * PANEL;
    const int num_panels = (num + PANEL - 1) / PANEL;
    if (float* last = scores + (num_panels - 1) * STEP; num % PANEL) {
        const int left = num % PANEL;
        store(last, first_lanes(load(last), left, MINUS_INFINITY));
        store(last + LANES, first_lanes(load(last + LANES), left - LANES, MINUS_INFINITY));
    }
    Vec highest[2] = {broadcast(MINUS_INFINITY), broadcast(MINUS_INFINITY)}, all[2] = {zero(), zero()};
    for (int panel = 0; panel < num_panels; panel++) {
        for (int v = 0; v < 2; v++) highest[v] = max(highest[v], load(scores + panel * STEP + v * LANES));
    }
    most = largest(max(highest[0], highest[1])) * scale;
    if (most == MINUS_INFINITY && has_nan(scores, 2 * num_panels)) most = std::numeric_limits<float>::quiet_NaN();
    const Vec factor = broadcast(scale), top = broadcast(-most);
    for (int panel = 0; panel < num_panels; panel++) {
        for (int v = 0; v < 2; v++) {
            const Vec weight = exp2<std::is_same_v<S, bf16>>(fma(load(scores + panel * STEP + v * LANES), factor, top));
            all[v] = add(all[v], weight);
            store(weights + panel * PANEL + v * LANES, weight);
        }
    }
    total = sum(add(all[0], all[1]));
}

template <class S>
class SegmentRun {
  public:
    SegmentRun(const SegmentTask& task, const SegmentRows<S>& rows, const KvLayer<S>& kv, const int32_t* slots)
        : task_(task), rows_(rows), kv_(kv), slots_(slots), num_rows_(task.end - task.first), depth_(padded_depth<S>(kv.head_dim)),
          dims_(round_up<int64_t>(kv.head_dim, PANEL)) {
        const int64_t num_keys = std::min<int64_t>(task.num_keys, SEGMENT_KEYS);
        grow(memory_.keys, round_up<int64_t>(num_keys, PANEL) * depth_);
        grow(memory_.values, SEGMENT_KEYS * dims_);
        grow(memory_.queries, MAX_TILE_ROWS * depth_);
        grow(memory_.scores, SEGMENT_KEYS * MAX_TILE_ROWS);
        grow(memory_.weights, MAX_TILE_ROWS * WEIGHTS_STRIDE);
        grow(memory_.found, MAX_TILE_ROWS * dims_);
        grow(memory_.sums, num_rows_ * dims_);
        grow(memory_.most, num_rows_);
        grow(memory_.total, num_rows_);
    }

    void run() {
        const TilesInUse tiles;
        std::fill_n(memory_.most.data(), num_rows_, MINUS_INFINITY);
        std::fill_n(memory_.total.data(), num_rows_, 0.0f);
        for (int64_t first = 0; first < task_.num_keys; first += SEGMENT_KEYS) {
            const int num = int(std::min<int64_t>(task_.num_keys - first, SEGMENT_KEYS));
            const int32_t* slots = slots_ + task_.begin + first;
            pack_keys(kv_, slots, 0, num, task_.head, memory_.keys.data());
            pack_values(kv_, slots, 0, num, task_.head, memory_.values.data(), SEGMENT_KEYS);
            each_tile<S>(num_rows_, [&](int64_t at, int num_rows) { take_tile(at, num_rows, num); });
        }
        for (int64_t at = 0; at < num_rows_; at++) write(at);
    }

  private:
    struct Memory {
        std::vector<S> keys, values;  // panels of a block of keys
        std::vector<RowOf<S>> queries, weights;  // of a tile's rows
        std::vector<float> scores, found;  // of a tile's rows; `found`: the weighted sums [rows][dims]
        std::vector<float> sums, most, total;  // of all rows
    };

    Sums sums_of(int64_t at) const { return {memory_.most[at], memory_.total[at], memory_.sums.data() + at * dims_}; }

    // Adds the sums of some rows over the packed keys.
    void take_tile(int64_t at, int num_rows, int num_keys) {
        for (int i = 0; i < num_rows; i++) {
            RowOf<S>* to = memory_.queries.data() + i * depth_;
            const int64_t row = task_.first - rows_.first + at + i;
            copy_row(rows_.query + row * rows_.query_stride + task_.head * kv_.head_dim, kv_.head_dim, to);
            std::fill(to + kv_.head_dim, to + depth_, RowOf<S>{});
        }
        for (int panel = 0; panel * PANEL < num_keys; panel++) {
            tile<S>(num_rows, memory_.queries.data(), depth_, memory_.keys.data() + panel * PANEL * depth_, depth_,
                    memory_.scores.data() + panel * MAX_TILE_ROWS * PANEL);
        }
        float most[MAX_TILE_ROWS], total[MAX_TILE_ROWS];
        for (int i = 0; i < num_rows; i++) {
            weigh_all<S>(memory_.scores.data() + i * PANEL, num_keys, rows_.scale * LOG2_E, most[i], total[i],
                         memory_.weights.data() + i * WEIGHTS_STRIDE);
        }
        alignas(64) float products[MAX_TILE_ROWS * PANEL];
        for (int64_t dim = 0; dim < dims_; dim += PANEL) {
            tile<S>(num_rows, memory_.weights.data(), WEIGHTS_STRIDE, memory_.values.data() + dim * SEGMENT_KEYS,
                    padded_depth<S>(num_keys), products);
            for (int i = 0; i < num_rows; i++) {
                for (int v = 0; v < 2; v++) store(memory_.found.data() + i * dims_ + dim + v * LANES, load(products + i * PANEL + v * LANES));
            }
        }
        for (int i = 0; i < num_rows; i++) add_sums(sums_of(at + i), {most[i], total[i], memory_.found.data() + i * dims_}, dims_);
    }

    void write(int64_t at) const {
        const Sums sums = sums_of(at);
        const int64_t width = kv_.head_dim, row = task_.first - rows_.first + at;
        S* out = rows_.out + row * rows_.num_heads * width + task_.head * width;
        const Vec share = broadcast(1.0f / sums.total);
        for (int64_t dim = 0; dim < width; dim += LANES) {
            store_first(out + dim, mul(load(sums.values + dim), share), int(std::min<int64_t>(LANES, width - dim)));
        }
    }

    static inline thread_local Memory memory_;
    const SegmentTask& task_;
    const SegmentRows<S>& rows_;
    const KvLayer<S>& kv_;
    const int32_t* const slots_;
    const int64_t num_rows_, depth_, dims_;  // `depth_`, `dims_`: head_dim, padded for use as a depth and as columns
};

// `starts` [num + 1]: the first row of each segment, ascending, and the number of rows.
template <class S>
void attend_segments(const SegmentRows<S>& rows, const KvLayer<S>& kv, const int64_t* starts, int64_t num) {
    std::vector<int32_t> slots(starts[num]);
    for (int64_t row = 0; row < starts[num]; row++) slots[row] = int32_t(row);
    std::vector<SegmentTask> tasks;
    const int64_t low = std::upper_bound(starts, starts + num, rows.first) - starts - 1;
    const int64_t high = std::lower_bound(starts, starts + num, rows.end) - starts;
    const int64_t wanted = 4 * team().num_threads(), undivided = (high - low) * rows.num_heads;
    for (int64_t i = low; i < high; i++) {
        const int64_t first = std::max(starts[i], rows.first), count = std::min(starts[i + 1], rows.end) - first;
        const int64_t pieces = std::clamp<int64_t>((wanted + undivided - 1) / undivided, 1, std::max<int64_t>(1, count / LEAST_ROWS_OF_TASK));
        for (int64_t head = 0; head < rows.num_heads; head++) {
            for (int64_t piece = 0; piece < pieces; piece++) {
                tasks.push_back({starts[i], starts[i + 1] - starts[i], first + count * piece / pieces, first + count * (piece + 1) / pieces, head});
            }
        }
    }
    team().loop(int64_t(tasks.size()), Team::ONE_BY_ONE, [&](int64_t first, int64_t end, int) {
        for (int64_t i = first; i < end; i++) SegmentRun<S>(tasks[i], rows, kv, slots.data()).run();
    });
}

}  // namespace agentflow
