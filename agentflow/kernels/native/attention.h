// Softmax attention of a task's rows over a run of slots, and the merging of partial results.
//
// Keys and values are laid out as panels, KEY_BLOCK at a time: keys as columns for the scores, dimensions as columns
// for the weighted sum. Both products then use `tile`, for any number of rows. Sums are relative to the largest score
// so far (online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691).
#pragma once

#include <memory>

#include "attention_tasks.h"
#include "few_queries.h"
#include "key_panels.h"
#include "row_ops.h"
#include "team.h"

namespace agentflow {

// Queries [rows][heads][head_dim], and the output [rows][heads * head_dim] in the row type of products.
template <class S>
struct Queries {
    const S* data;
    int64_t row_stride;
    RowOf<S>* out;
    int64_t out_stride;
    float scale;
};

// A thread's buffers for one task.
template <class S>
struct Scratch {
    int64_t depth = 0, dims = 0;  // head_dim, padded as a depth and as columns
    std::vector<RowOf<S>> queries;  // [queries][depth]
    std::vector<float> sums;        // [queries][dims]
    std::vector<float> most, total; // [queries]: the largest score, and the sum of the weights relative to it
    std::vector<S> keys, values;

    void fit(int64_t num_queries, int64_t head_dim) {
        depth = padded_depth<S>(head_dim);
        dims = round_up<int64_t>(head_dim, PANEL);
        grow(queries, (num_queries + MAX_TILE_ROWS) * depth);
        grow(sums, num_queries * dims);
        grow(most, num_queries);
        grow(total, num_queries);
        grow(keys, KEY_BLOCK * depth);
        grow(values, KEY_BLOCK * dims);
    }
};

// Turns the scores of one query with up to KEY_BLOCK keys, of which it sees `num_seen`, into weights relative to the
// largest score so far. Returns the factor by which earlier sums must be multiplied.
template <class S>
ALWAYS_INLINE float weigh(const float* scores, int num_seen, int num_lanes, float scale, float& most, float& total,
                          RowOf<S>* weights) {
    Vec seen[KEY_BLOCK / LANES];
    Vec highest = broadcast(MINUS_INFINITY);
    const int num_vecs = num_lanes / LANES;
    for (int v = 0; v < num_vecs; v++) {
        seen[v] = load(scores + v / 2 * MAX_TILE_ROWS * PANEL + v % 2 * LANES);
        const int num = num_seen - v * LANES;
        if (num < LANES) seen[v] = first_lanes(seen[v], num, MINUS_INFINITY);
        highest = max(highest, seen[v]);
    }
    const float before = most;
    most = std::max(before, largest(highest) * scale);
    if (most == MINUS_INFINITY) {
        for (int v = 0; v < num_vecs; v++) store(weights + v * LANES, zero());
        return 1.0f;
    }
    const Vec factor = broadcast(scale), top = broadcast(-most);
    Vec all = zero();
    for (int v = 0; v < num_vecs; v++) {
        const Vec weight = exp2<std::is_same_v<S, bf16>>(fma(seen[v], factor, top));
        all = add(all, weight);
        store(weights + v * LANES, weight);
    }
    const float decay = before == most ? 1.0f : std::exp2(before - most);
    total = total * decay + sum(all);
    return decay;
}

// The floats of a part for one head: the largest score, the sum of the weights, and the weighted sum of the values.
inline int64_t part_size(const HeadShape& shape) { return 2 + round_up<int64_t>(shape.head_dim, PANEL); }

template <class S>
class TaskRun {
  public:
    // `next`: the task that this thread will probably run next, or null; its first keys are prefetched.
    TaskRun(const Plan& plan, const Task& task, const Task* next, const HeadShape& shape, const Queries<S>& queries,
            const KvLayer<S>& kv, float* parts, Scratch<S>& scratch)
        : plan_(plan), task_(task), next_(next), shape_(shape), q_(queries), kv_(kv), ahead_(kv), parts_(parts), s_(scratch),
          group_(int(shape.group())), per_head_(task.num_rows * group_) {
        s_.fit(per_head_ * (task.end_head - task.first_head), shape.head_dim);
    }

    void run() {
        const TilesInUse tiles;
        gather_queries();
        for (int first = 0; first < task_.num_keys; first += KEY_BLOCK) {
            const int num = std::min(KEY_BLOCK, task_.num_keys - first);
            const bool is_last = first + KEY_BLOCK >= task_.num_keys;
            ahead_.begin(is_last ? next_ : &task_, is_last ? 0 : first + KEY_BLOCK, num_steps(num));
            for (int head = task_.first_head; head < task_.end_head; head++) take_block(first, num, head);
        }
        hand_out();
    }

  private:
    // Queries are ordered by KV head, then by row.
    int place(int head, int row, int i) const { return (head - task_.first_head) * per_head_ + row * group_ + i; }

    void gather_queries() {
        for (int head = task_.first_head; head < task_.end_head; head++) {
            for (int row = 0; row < task_.num_rows; row++) {
                const S* from = q_.data + plan_.rows[task_.first_row + row] * q_.row_stride;
                for (int i = 0; i < group_; i++) {
                    const int at = place(head, row, i);
                    RowOf<S>* to = s_.queries.data() + at * s_.depth;
                    copy_row(from + (head * group_ + i) * shape_.head_dim, shape_.head_dim, to);
                    std::fill(to + shape_.head_dim, to + s_.depth, RowOf<S>{});
                    s_.most[at] = MINUS_INFINITY;
                    s_.total[at] = 0;
                    std::memset(s_.sums.data() + at * s_.dims, 0, s_.dims * sizeof(float));
                }
            }
        }
    }

    void take_block(int first, int num, int head) {
        if (has_few()) return take_few(first, num, head);
        pack_keys(kv_, task_.slots + first, num, head, s_.keys.data());
        pack_values(kv_, task_.slots + first, num, head, s_.values.data());
        const int base = place(head, 0, 0);
        each_tile<S>(per_head_, [&](int64_t at, int num_queries) {
            const int last_row = int(at + num_queries - 1) / group_;
            const int64_t visible = std::min<int64_t>(num, seen(last_row) - first);
            if (visible > 0) take_tile(base + int(at), int(at), num_queries, first, int(visible), num);
        });
    }

    // Whether keys and values are read from the pool directly (few_queries.h).
    bool has_few() const {
#if defined(__AVX512BF16__)
        if (!std::is_same_v<S, bf16>) return false;
        if (shape_.head_dim == 64 || shape_.head_dim == 128) return per_head_ <= MOST_FEW_QUERIES;
#endif
        return false;
    }

    void take_few(int first, int num, int head) {
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<S, bf16>) {
            if (per_head_ == 1) return take_few<1>(first, num, head);
            if (per_head_ == 2) return take_few<2>(first, num, head);
            if (per_head_ == 3) return take_few<3>(first, num, head);
            return take_few<4>(first, num, head);
        }
#endif
    }

#if defined(__AVX512BF16__)

    template <int QUERIES>
    void take_few(int first, int num, int head) {
        alignas(64) float scores[MAX_TILE_ROWS * KEY_BLOCK];
        alignas(64) bf16 weights[QUERIES * KEY_BLOCK];
        float decays[QUERIES];
        const int at = place(head, 0, 0);
        const bf16* queries = s_.queries.data() + at * s_.depth;
        const int32_t* slots = task_.slots + first;
        const auto step = [&] { ahead_.step(); };
        for (int group = 0; group < num; group += LANES) {
            const bf16* keys[LANES];
            for (int i = 0; i < LANES; i++) keys[i] = kv_.key(slots[std::min(group + i, num - 1)], head);
            Vec found[QUERIES];
            if (shape_.head_dim == 64) score_few<QUERIES, 2>(queries, s_.depth, keys, found, step);
            else score_few<QUERIES, 4>(queries, s_.depth, keys, found, step);
            float* to = scores + group / PANEL * MAX_TILE_ROWS * PANEL + group % PANEL;
            for (int i = 0; i < QUERIES; i++) store(to + i * PANEL, found[i]);
        }
        for (int i = 0; i < QUERIES; i++) {
            const int64_t visible = std::clamp<int64_t>(seen(i / group_) - first, 0, num);
            decays[i] = weigh<S>(scores + i * PANEL, int(visible), round_up(num, LANES), q_.scale * LOG2_E,
                                 s_.most[at + i], s_.total[at + i], weights + i * KEY_BLOCK);
        }
        for (int64_t dim = 0; dim < shape_.head_dim; dim += 64) {
            const auto value = [&](int key) { return kv_.value(slots[key], head) + dim; };
            add_few<QUERIES>(weights, KEY_BLOCK, num, value, decays, s_.sums.data() + at * s_.dims + dim, s_.dims, step);
        }
    }
#endif

    // The number of calls of ahead_.step() for a block of `num` keys.
    int num_steps(int num) const {
        const int num_heads = task_.end_head - task_.first_head;
        if (has_few()) return num_heads * int(shape_.head_dim) / 64 * num;  // half of them for keys
        const int num_tiles = (per_head_ + max_rows<S>() - 1) / max_rows<S>();
        return num_heads * num_tiles * (round_up(num, PANEL) + int(s_.dims)) / PANEL;
    }

    int64_t seen(int row) const { return int64_t(task_.seen) + row; }

    // Adds the first `num` keys of a block, of which `num_packed` are laid out, to the sums of some queries.
    void take_tile(int query, int at, int num_queries, int first, int num, int num_packed) {
        alignas(64) float scores[MAX_TILE_ROWS * KEY_BLOCK];
        alignas(64) RowOf<S> weights[MAX_TILE_ROWS * KEY_BLOCK];
        alignas(64) float sums[MAX_TILE_ROWS * PANEL];
        float decays[MAX_TILE_ROWS];
        const int num_lanes = round_up(num, PANEL);
        for (int panel = 0; panel * PANEL < num; panel++) {
            tile<S>(num_queries, s_.queries.data() + query * s_.depth, s_.depth,
                    s_.keys.data() + panel * PANEL * s_.depth, s_.depth, scores + panel * MAX_TILE_ROWS * PANEL);
            ahead_.step();
        }
        for (int i = 0; i < num_queries; i++) {
            const int64_t visible = std::clamp<int64_t>(seen((at + i) / group_) - first, 0, num);
            decays[i] = weigh<S>(scores + i * PANEL, int(visible), num_lanes, q_.scale * LOG2_E, s_.most[query + i],
                                 s_.total[query + i], weights + i * KEY_BLOCK);
        }
        const int64_t depth = padded_depth<S>(num), stride = padded_depth<S>(num_packed);
        for (int64_t dim = 0; dim < s_.dims; dim += PANEL) {
            tile<S>(num_queries, weights, KEY_BLOCK, s_.values.data() + dim * stride, depth, sums);
            ahead_.step();
            for (int i = 0; i < num_queries; i++) {
                float* to = s_.sums.data() + (query + i) * s_.dims + dim;
                const Vec decay = broadcast(decays[i]);
                store(to, fma(load(to), decay, load(sums + i * PANEL)));
                store(to + LANES, fma(load(to + LANES), decay, load(sums + i * PANEL + LANES)));
            }
        }
    }

    void hand_out() {
        for (int row = 0; row < task_.num_rows; row++) {
            const int32_t part = plan_.parts[task_.first_row + row];
            for (int head = task_.first_head; head < task_.end_head; head++) {
                for (int i = 0; i < group_; i++) {
                    const int at = place(head, row, i);
                    const int64_t q_head = head * group_ + i;
                    if (part < 0) write(plan_.rows[task_.first_row + row], q_head, at);
                    else keep(part, q_head, at);
                }
            }
        }
    }

    void write(int32_t row, int64_t q_head, int at) {
        RowOf<S>* out = q_.out + row * q_.out_stride + q_head * shape_.head_dim;
        const Vec share = broadcast(1.0f / s_.total[at]);
        for (int64_t dim = 0; dim < shape_.head_dim; dim += LANES) {
            const int width = int(std::min<int64_t>(LANES, shape_.head_dim - dim));
            store_first(out + dim, rounded<S>(mul(load(s_.sums.data() + at * s_.dims + dim), share)), width);
        }
    }

    void keep(int32_t part, int64_t q_head, int at) {
        float* to = parts_ + (part * shape_.num_heads + q_head) * part_size(shape_);
        to[0] = s_.most[at];
        to[1] = s_.total[at];
        std::memcpy(to + 2, s_.sums.data() + at * s_.dims, s_.dims * sizeof(float));
    }

    const Plan& plan_;
    const Task& task_;
    const Task* const next_;
    const HeadShape& shape_;
    const Queries<S>& q_;
    const KvLayer<S>& kv_;
    FetchAhead<S> ahead_;
    float* parts_;
    Scratch<S>& s_;
    const int group_, per_head_;
};

// Merges the parts of a row into its result, after rescaling their sums to the largest score.
template <class S>
void merge_row(const Plan& plan, int32_t row, const HeadShape& shape, const float* parts, const Queries<S>& queries) {
    const int64_t size = part_size(shape);
    const int32_t first = plan.first_parts[row], end = plan.first_parts[row + 1];
    for (int64_t head = 0; head < shape.num_heads; head++) {
        const auto of = [&](int32_t part) { return parts + (part * shape.num_heads + head) * size; };
        float most = MINUS_INFINITY, total = 0;
        for (int32_t part = first; part < end; part++) most = std::max(most, of(part)[0]);
        for (int32_t part = first; part < end; part++) total += std::exp2(of(part)[0] - most) * of(part)[1];
        RowOf<S>* out = queries.out + row * queries.out_stride + head * shape.head_dim;
        for (int64_t dim = 0; dim < shape.head_dim; dim += LANES) {
            Vec sums = zero();
            for (int32_t part = first; part < end; part++) {
                const float weight = std::exp2(of(part)[0] - most) / total;
                sums = fma(load(of(part) + 2 + dim), broadcast(weight), sums);
            }
            store_first(out + dim, rounded<S>(sums), int(std::min<int64_t>(LANES, shape.head_dim - dim)));
        }
    }
}

template <class S>
Scratch<S>& scratch_of(int thread) {
    static std::unique_ptr<Scratch<S>> scratches[Team::MAX_THREADS];
    if (!scratches[thread]) scratches[thread] = std::make_unique<Scratch<S>>();
    return *scratches[thread];
}

// `parts`: a buffer of num_part_floats floats, [num_parts][num_heads][part_size].
template <class S>
void attend(const Plan& plan, const HeadShape& shape, const Queries<S>& queries, const KvLayer<S>& kv, float* parts) {
    // One by one, as tasks are sorted by cost, the longest first.
    team().loop(int64_t(plan.tasks.size()), Team::ONE_BY_ONE, [&](int64_t first, int64_t end, int thread) {
        for (int64_t i = first; i < end; i++) {
            const size_t likely = i + team().num_threads();
            const Task* next = likely < plan.tasks.size() ? &plan.tasks[likely] : nullptr;
            TaskRun<S>(plan, plan.tasks[i], next, shape, queries, kv, parts, scratch_of<S>(thread)).run();
        }
    });
    team().loop(int64_t(plan.merged_rows.size()), 4, [&](int64_t first, int64_t end, int) {
        for (int64_t i = first; i < end; i++) merge_row(plan, plan.merged_rows[i], shape, parts, queries);
    });
}

inline int64_t num_part_floats(const Plan& plan, const HeadShape& shape) {
    return plan.num_parts * shape.num_heads * part_size(shape);
}

}  // namespace agentflow
