// Softmax attention of a task's rows over a run of slots, and the merging of partial results.
//
// Keys and values are packed into panels, KEY_BLOCK at a time: keys as columns for the scores, dimensions as columns
// for the weighted sum. Both products then use `tile`, for any number of rows. Sums are relative to the largest score
// of their block; when the sums of two blocks are added, one is rescaled (online softmax: Milakov and Gimelshein 2018,
// arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691).
#pragma once

#include <utility>

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
    int64_t row_stride;  // in values
    RowOf<S>* out;
    int64_t out_stride;  // in values
    float scale;         // the factor of the scores
    float cap = 0;       // a score s becomes cap * tanh(s / cap); 0: no cap
    const S* sinks = nullptr;  // [heads]: scores without values, which receive a part of each softmax; null: none
};

// A thread's buffers for one task.
template <class S>
struct Scratch {
    int64_t depth = 0, dims = 0, num_queries = 0;  // `depth`, `dims`: head_dim, padded for use as a depth and as columns
    std::vector<RowOf<S>> queries;  // [queries][depth]
    std::vector<float> sums;        // [nodes][queries][dims]
    std::vector<float> most, total; // [nodes][queries]: the largest score, and the sum of the weights relative to it
    std::vector<S> keys, values;    // panels of one block: [KEY_BLOCK * depth], [KEY_BLOCK * dims]

    void fit(int64_t num, int64_t num_nodes, int64_t head_dim) {
        num_queries = num;
        depth = padded_depth<S>(head_dim);
        dims = round_up<int64_t>(head_dim, PANEL);
        grow(queries, (num + MAX_TILE_ROWS) * depth);
        grow(sums, num_nodes * num * dims);
        grow(most, num_nodes * num);
        grow(total, num_nodes * num);
        grow(keys, KEY_BLOCK * depth);
        grow(values, KEY_BLOCK * dims);
    }
};

// The sums of one query over some keys: the largest score, the sum of the weights relative to it, and the weighted sum of the
// values [dims].
struct Sums {
    float &most, &total;
    float* values;
};

// Adds the sums over other keys. The order of the operations is the same in every caller.
ALWAYS_INLINE void add_sums(const Sums& to, const Sums& other, int64_t dims) {
    if (other.most == MINUS_INFINITY) return;
    if (to.most == MINUS_INFINITY) {  // the query attended to no key of `to`, and its sums are not set
        to.most = other.most;
        to.total = other.total;
        std::memcpy(to.values, other.values, dims * sizeof(float));
        return;
    }
    const bool is_higher = other.most > to.most;
    const float most = is_higher ? other.most : to.most, least = is_higher ? to.most : other.most;
    const Vec factor = exp2(broadcast(least - most));
    const Sums &high = is_higher ? other : to, &low = is_higher ? to : other;
    const float total = std::fma(low.total, first_lane(factor), high.total);
    for (int64_t dim = 0; dim < dims; dim += LANES) {
        store(to.values + dim, fma(load(low.values + dim), factor, load(high.values + dim)));
    }
    to.most = most;
    to.total = total;
}

// Vector v of the scores of one query, which are in panels: [panels][MAX_TILE_ROWS][PANEL], from the query's first score on.
ALWAYS_INLINE float* scores_at(float* scores, int v) { return scores + v / 2 * MAX_TILE_ROWS * PANEL + v % 2 * LANES; }

// Whether the first `num_vecs` vectors of scores contain NaN. Maximums may drop it. If another score is above minus infinity, the
// sum of the weights has the NaN; otherwise the scores would seem to be hidden.
inline bool has_nan(float* scores, int num_vecs) {
    uint32_t are_numbers = 0xFFFF;
    for (int v = 0; v < num_vecs; v++) are_numbers &= at_least(load(scores_at(scores, v)), broadcast(MINUS_INFINITY));
    return are_numbers != 0xFFFF;
}

// Turns the scores of some queries with up to KEY_BLOCK keys into weights relative to the largest score of each query. `scale`
// includes log2(e); `cap`: as in Queries. seen_of(i): the start and the end of the keys to which query i attends; sums_of(i): its
// sums. Finds all largest scores first: otherwise the weights of each query would wait for the last comparisons.
template <class S, class SeenOf, class SumsOf>
ALWAYS_INLINE void weigh(float* scores, int num_queries, int num_lanes, const SeenOf& seen_of, const SumsOf& sums_of, float scale,
                         float cap, RowOf<S>* weights) {
    constexpr int MOST_VECS = KEY_BLOCK / LANES;
    const int num_vecs = num_lanes / LANES;
    const float factor = cap != 0 ? LOG2_E : scale;
    for (int i = 0; i < num_queries; i++) {
        const auto [from, num_seen] = seen_of(i);
        Vec highest = broadcast(MINUS_INFINITY);
        if (from == 0 && num_seen == num_lanes && cap == 0) {
            for (int v = 0; v < num_vecs; v++) highest = max(highest, load(scores_at(scores + i * PANEL, v)));
        } else {
            for (int v = 0; v < num_vecs; v++) {
                float* at = scores_at(scores + i * PANEL, v);
                Vec seen = load(at);
                const int num = num_seen - v * LANES, hidden = from - v * LANES;
                if (cap != 0) seen = capped(seen, scale * (1 / LOG2_E), cap);
                if (num < LANES) seen = first_lanes(seen, num, MINUS_INFINITY);
                if (hidden > 0) seen = lanes_where(seen, hidden < LANES ? 0xFFFFu << hidden : 0, MINUS_INFINITY);
                store(at, seen);
                highest = max(highest, seen);
            }
        }
        sums_of(i).most = largest(highest) * factor;
    }
    for (int i = 0; i < num_queries; i++) {
        const Sums sums = sums_of(i);
        RowOf<S>* to = weights + i * KEY_BLOCK;
        if (sums.most == MINUS_INFINITY) {
            if (!has_nan(scores + i * PANEL, num_vecs)) {
                sums.total = 0;
                for (int v = 0; v < num_vecs; v++) store(to + v * LANES, zero());
                continue;
            }
            sums.most = std::numeric_limits<float>::quiet_NaN();
        }
        const Vec factors = broadcast(factor), top = broadcast(-sums.most);
        Vec all = zero();
        const auto add_weight = [&](int v) {
            const Vec weight = exp2<std::is_same_v<S, bf16>>(fma(load(scores_at(scores + i * PANEL, v)), factors, top));
            all = add(all, weight);
            store(to + v * LANES, weight);
        };
        if (num_vecs == MOST_VECS) {
#pragma GCC unroll 8
            for (int v = 0; v < MOST_VECS; v++) add_weight(v);
        } else {
            for (int v = 0; v < num_vecs; v++) add_weight(v);
        }
        sums.total = sum(all);
    }
}

// Writes a row's result for one query head to the output.
template <class S>
void write_result(const Sums& sums, int64_t head_dim, const Queries<S>& queries, int64_t row, int64_t head) {
    RowOf<S>* out = queries.out + row * queries.out_stride + head * head_dim;
    float total = sums.total;
    if (queries.sinks) total += first_lane(exp2(broadcast(to_float(queries.sinks[head]) * LOG2_E - sums.most)));
    const Vec share = broadcast(1.0f / total);
    for (int64_t dim = 0; dim < head_dim; dim += LANES) {
        const int width = int(std::min<int64_t>(LANES, head_dim - dim));
        store_first(out + dim, rounded<S>(mul(load(sums.values + dim), share)), width);
    }
}

// The number of floats of a part for one head: the largest score, the sum of the weights, and the weighted sum of the values.
inline int64_t part_size(const HeadShape& shape) { return 2 + round_up<int64_t>(shape.head_dim, PANEL); }

// The sums of a part for one head; `parts`: [num_parts][num_heads][part_size].
inline Sums sums_in(float* parts, int64_t part, int64_t head, const HeadShape& shape) {
    float* at = parts + (part * shape.num_heads + head) * part_size(shape);
    return {at[0], at[1], at + 2};
}

template <class S>
class TaskRun {
  public:
    // `next`: the task that this thread will probably run next, or null; its first keys are prefetched. `is_first`: this is the
    // thread's first task, so no task before it has prefetched its keys.
    TaskRun(const Plan& plan, const Task& task, const Task* next, bool is_first, const HeadShape& shape, const Queries<S>& queries,
            const KvLayer<S>& kv, float* parts, Scratch<S>& scratch)
        : plan_(plan), task_(task), next_(next), is_first_(is_first), shape_(shape), q_(queries), kv_(kv), ahead_(kv), parts_(parts),
          s_(scratch), group_(int(shape.group())), per_head_(task.num_rows * group_) {
        const int num_blocks = (task.num_keys + KEY_BLOCK - 1) / KEY_BLOCK;
        s_.fit(per_head_ * (task.end_head - task.first_head), 2 * std::bit_width(unsigned(num_blocks)) + 1, shape.head_dim);
    }

    void run() {
        const TilesInUse tiles;
        gather_queries();
        if (task_.num_shared) take_own_blocks();
        else take_blocks();
        hand_out();
    }

  private:
    void take_blocks() {
        if (is_first_) {  // in the order of memory, which is faster than in the order of use
            ahead_.begin(&task_, 0, 1);
            ahead_.step();
        }
        for (int first = 0; first < task_.num_keys; first += KEY_BLOCK) {
            const int num = std::min(KEY_BLOCK, task_.num_keys - first);
            const bool is_last = first + KEY_BLOCK >= task_.num_keys;
            ahead_.begin(is_last ? next_ : &task_, is_last ? 0 : first + KEY_BLOCK, num_steps(num));
            nodes_[num_nodes_++] = {task_.first_block + first / KEY_BLOCK, 0};
            std::fill_n(&s_.most[(num_nodes_ - 1) * s_.num_queries], s_.num_queries, MINUS_INFINITY);
            for (int head = task_.first_head; head < task_.end_head; head++) take_block(first, num, head);
            while (num_nodes_ > 1 && nodes_[num_nodes_ - 1].follows(nodes_[num_nodes_ - 2])) join_last();
        }
    }

    // Processes a block whose first keys the rows share: packs the shared keys once, the others for each row.
    void take_own_blocks() {
        nodes_[num_nodes_++] = {task_.first_block, 0};
        ahead_.begin(next_, 0, int(task_.num_rows) * num_steps(KEY_BLOCK));
        for (int head = task_.first_head; head < task_.end_head; head++) {
            pack_keys(kv_, task_.slots, 0, task_.num_shared, head, s_.keys.data());
            pack_values(kv_, task_.slots, 0, task_.num_shared, head, s_.values.data());
            const int32_t* packed = nullptr;
            for (int row = 0; row < task_.num_rows; row++) {
                const OwnBlock& own = plan_.own[task_.first_own + row];
                if (own.slots != packed) {
                    pack_keys(kv_, own.slots, task_.num_shared, own.num_keys, head, s_.keys.data());
                    pack_values(kv_, own.slots, task_.num_shared, own.num_keys, head, s_.values.data());
                    packed = own.slots;
                }
                const int base = place(head, row, 0);
                each_tile<S>(group_, [&](int64_t at, int num_queries) {
                    take_tile(base + int(at), num_queries, own.seen, [&](int) { return std::pair(0, own.seen); });
                });
            }
        }
    }

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
                }
            }
        }
    }

    // The sums of query `at` over the keys of `node`.
    Sums sums_of(int node, int at) const {
        const int64_t place = node * s_.num_queries + at;
        return {s_.most[place], s_.total[place], s_.sums.data() + place * s_.dims};
    }

    // The sums of query `at` over the keys of the last block.
    Sums sums_of(int at) const { return sums_of(num_nodes_ - 1, at); }

    // Adds the sums of the last node to the sums of the node before it.
    void join_last() {
        num_nodes_--;
        for (int at = 0; at < s_.num_queries; at++) add_sums(sums_of(num_nodes_ - 1, at), sums_of(num_nodes_, at), s_.dims);
        nodes_[num_nodes_ - 1].level++;
    }

    void take_block(int first, int num, int head) {
        if (has_few()) return take_few(first, num, head);
        pack_keys(kv_, task_.slots + first, 0, num, head, s_.keys.data());
        pack_values(kv_, task_.slots + first, 0, num, head, s_.values.data());
        const int base = place(head, 0, 0);
        each_tile<S>(per_head_, [&](int64_t at, int num_queries) {
            const int first_row = int(at) / group_, last_row = int(at + num_queries - 1) / group_;
            const int64_t visible = std::min<int64_t>(num, seen(last_row) - first);
            if (visible <= 0 || from(first_row) - first >= num) return;
            take_tile(base + int(at), num_queries, int(visible), [&](int i) { return seen_in(first, num, (int(at) + i) / group_); });
        });
    }

    // Whether keys and values are read directly from the pool (few_queries.h).
    bool has_few() const {
#if defined(__AVX512BF16__)
        if (!std::is_same_v<S, bf16>) return false;
        if (shape_.head_dim % 64 == 0) return per_head_ <= MOST_FEW_QUERIES;
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
        const int at = place(head, 0, 0);
        const bf16* queries = s_.queries.data() + at * s_.depth;
        const int32_t* slots = task_.slots + first;
        const auto step = [&] { ahead_.step(); };
        for (int group = 0; group < num; group += LANES) {
            const bf16* keys[LANES];
            for (int i = 0; i < LANES; i++) keys[i] = kv_.key(slots[std::min(group + i, num - 1)], head);
            Vec found[QUERIES];
            score_few<QUERIES>(queries, s_.depth, int(shape_.head_dim / 32), keys, found, step);
            float* to = scores + group / PANEL * MAX_TILE_ROWS * PANEL + group % PANEL;
            for (int i = 0; i < QUERIES; i++) store(to + i * PANEL, found[i]);
        }
        weigh<S>(
            scores, QUERIES, round_up(num, LANES), [&](int i) { return seen_in(first, num, i / group_); },
            [&](int i) { return sums_of(at + i); }, q_.scale * LOG2_E, q_.cap, weights);
        for (int64_t dim = 0; dim < shape_.head_dim; dim += 64) {
            const auto value = [&](int key) { return kv_.value(slots[key], head) + dim; };
            add_few<QUERIES>(weights, KEY_BLOCK, num, value, sums_of(at).values + dim, s_.dims, step);
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
    int64_t from(int row) const { return int64_t(task_.from) + (task_.seen == ALL ? 0 : row); }

    // The start and the end, relative to `first`, of the keys to which a row attends among `num` keys from `first` on.
    std::pair<int, int> seen_in(int first, int num, int row) const {
        const int64_t end = std::clamp<int64_t>(seen(row) - first, 0, num);
        return {int(std::clamp<int64_t>(from(row) - first, 0, num)), int(end)};
    }

    // Computes the sums of some queries over the first `num` packed keys. seen_of(i): the start and the end of the keys to which
    // query i attends.
    template <class SeenOf>
    void take_tile(int query, int num_queries, int num, const SeenOf& seen_of) {
        alignas(64) float scores[MAX_TILE_ROWS * KEY_BLOCK];
        alignas(64) RowOf<S> weights[MAX_TILE_ROWS * KEY_BLOCK];
        alignas(64) float products[MAX_TILE_ROWS * PANEL];
        const int num_lanes = round_up(num, PANEL);
        for (int panel = 0; panel * PANEL < num; panel++) {
            tile<S>(num_queries, s_.queries.data() + query * s_.depth, s_.depth,
                    s_.keys.data() + panel * PANEL * s_.depth, s_.depth, scores + panel * MAX_TILE_ROWS * PANEL);
            ahead_.step();
        }
        const auto seen_here = [&](int i) {
            const auto [begin, end] = seen_of(i);
            return std::pair(begin, std::min(end, num));
        };
        weigh<S>(
            scores, num_queries, num_lanes, seen_here, [&](int i) { return sums_of(query + i); }, q_.scale * LOG2_E, q_.cap, weights);
        const int64_t depth = padded_depth<S>(num);
        for (int64_t dim = 0; dim < s_.dims; dim += PANEL) {
            tile<S>(num_queries, weights, KEY_BLOCK, s_.values.data() + dim * KEY_BLOCK, depth, products);
            ahead_.step();
            for (int i = 0; i < num_queries; i++) {
                float* to = sums_of(query + i).values + dim;
                store(to, load(products + i * PANEL));
                store(to + LANES, load(products + i * PANEL + LANES));
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
        for (int node = num_nodes_ - 1; node > 0; node--) add_sums(sums_of(node - 1, at), sums_of(node, at), s_.dims);
        write_result<S>(sums_of(0, at), shape_.head_dim, q_, row, q_head);
    }

    void keep(int32_t part, int64_t q_head, int at) {
        for (int node = 0; node < num_nodes_; node++) {
            const Sums from = sums_of(node, at), to = sums_in(parts_, part + node, q_head, shape_);
            to.most = from.most;
            to.total = from.total;
            std::memcpy(to.values, from.values, s_.dims * sizeof(float));
        }
    }

    const Plan& plan_;
    const Task& task_;
    const Task* const next_;
    const bool is_first_;
    const HeadShape& shape_;
    const Queries<S>& q_;
    const KvLayer<S>& kv_;
    FetchAhead<S> ahead_;
    float* parts_;
    Scratch<S>& s_;
    const int group_, per_head_;
    Node nodes_[2 * 32];  // the nodes that have sums
    int num_nodes_ = 0;
};

// Adds the parts of a row as the nodes of its tree, and writes its result.
template <class S>
void merge_row(const Plan& plan, int32_t row, const HeadShape& shape, float* parts, const Queries<S>& queries) {
    const int64_t dims = part_size(shape) - 2;
    const int32_t first = plan.first_parts[row], end = plan.first_parts[row + 1];
    static thread_local std::vector<std::pair<int32_t, Node>> nodes;  // with the index of each node's part
    for (int64_t head = 0; head < shape.num_heads; head++) {
        const auto join_last = [&] {
            const int32_t last = nodes.back().first;
            nodes.pop_back();
            add_sums(sums_in(parts, nodes.back().first, head, shape), sums_in(parts, last, head, shape), dims);
            nodes.back().second.level++;
        };
        nodes.clear();
        for (int32_t part = first; part < end; part++) {
            nodes.emplace_back(part, plan.nodes[part]);
            while (nodes.size() > 1 && nodes.back().second.follows(nodes[nodes.size() - 2].second)) join_last();
        }
        while (nodes.size() > 1) join_last();
        write_result<S>(sums_in(parts, first, head, shape), shape.head_dim, queries, row, head);
    }
}

template <class S>
Scratch<S>& scratch_of(int thread) {
    static Scratch<S>* scratches[Team::MAX_THREADS];  // never destroyed, like the team
    if (!scratches[thread]) scratches[thread] = new Scratch<S>;
    return *scratches[thread];
}

// Computes the attention of a plan. `parts`: a buffer of num_part_floats floats, [num_parts][num_heads][part_size].
template <class S>
void attend(const Plan& plan, const HeadShape& shape, const Queries<S>& queries, const KvLayer<S>& kv, float* parts) {
    // One by one, because the tasks are sorted by cost, the most expensive first.
    team().loop(int64_t(plan.tasks.size()), Team::ONE_BY_ONE, [&](int64_t first, int64_t end, int thread) {
        for (int64_t i = first; i < end; i++) {
            const size_t likely = i + team().num_threads();
            const Task* next = likely < plan.tasks.size() ? &plan.tasks[likely] : nullptr;
            const bool is_first = i < team().num_threads();
            TaskRun<S>(plan, plan.tasks[i], next, is_first, shape, queries, kv, parts, scratch_of<S>(thread)).run();
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
