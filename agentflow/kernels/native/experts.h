// MLPs, and mixtures of several of them (experts; Shazeer et al. 2017, arXiv 1701.06538).
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "linear.h"
#include "row_ops.h"

namespace agentflow {

struct Mlp {
    Weight gate_up;  // gated, or the only product if the MLP has no gate
    Weight down;
};

struct Gating {
    Activation activation;
    bool is_gated;
};

// Experts, of which each row uses a few, with the weights that the router gives them.
struct Experts {
    Weight router;  // computes the scores of the experts
    int64_t num;
    const Mlp* experts;  // [num]
    const Mlp* shared;   // computes every row, or null
    int64_t num_used;    // for each row
    int64_t normalises;  // the weights of a row add up to 1
    float scale;         // of the weights
    int64_t num_groups, num_used_groups;  // a row uses experts of only the best groups
};

// Pads a row with zeros to a whole panel, because products read that far.
template <class Row>
void fill_up(Row* row, int64_t size, int64_t stride) {
    std::fill(row + size, row + stride, Row{});
}

// Buffers that the MLPs of a forward pass use in turn.
template <class S>
struct MlpMemory {
    std::vector<RowOf<S>> inner, gathered;
    std::vector<S> scores, outputs;
    std::vector<float> weights;   // of one row's experts
    std::vector<int32_t> chosen;  // the numbers of one row's experts

    // Makes room for the inner values of an MLP. Returns the distance of two rows.
    int64_t fit(const Mlp& mlp, int64_t num_rows) {
        const int64_t stride = round_up<int64_t>(mlp.down.num_in, PANEL);
        grow(inner, (num_rows + MAX_TILE_ROWS) * stride);
        return stride;
    }
};

// Writes the activated values between the two products of an MLP to memory.inner. `added`: as in linear.h.
template <class S>
void inner_rows(const RowOf<S>* x, int64_t stride, int64_t num_rows, const Mlp& mlp, const Gating& gating, MlpMemory<S>& memory,
                const S* added = nullptr) {
    const int64_t size = mlp.down.num_in, inner_stride = memory.fit(mlp, num_rows);
    RowOf<S>* to = memory.inner.data();
    if (gating.is_gated) gated_linear<S>(x, stride, num_rows, mlp.gate_up, gating.activation, to, inner_stride, added);
    else linear<S>(x, stride, num_rows, mlp.gate_up, to, inner_stride, added, gating.activation);
    for (int64_t t = 0; size < inner_stride && t < num_rows; t++) fill_up(to + t * inner_stride, size, inner_stride);
}

// out [num_rows][hidden_size] = the MLP of each row.
template <class S>
void apply(const RowOf<S>* x, int64_t stride, int64_t num_rows, const Mlp& mlp, const Gating& gating, MlpMemory<S>& memory, S* out) {
    inner_rows(x, stride, num_rows, mlp, gating, memory);
    linear<S>(memory.inner.data(), memory.fit(mlp, num_rows), num_rows, mlp.down, out, mlp.down.num_out);
}

// Chooses the experts of a row, from scores [num]. Writes their numbers in ascending order, and their weights.
template <class S>
void route(const S* scores, const Experts& experts, int32_t* chosen, float* weights) {
    const int64_t num = experts.num, in_group = num / experts.num_groups;
    std::vector<float> likely(num);
    std::transform(scores, scores + num, likely.begin(), [](S score) { return to_float(score); });
    const auto to_shares = [](auto first, auto last) {  // softmax
        const float most = *std::max_element(first, last);
        float total = 0;
        for (auto at = first; at < last; at++) total += *at = std::exp(*at - most);
        for (auto at = first; at < last; at++) *at /= total;
    };
    if (!experts.normalises) to_shares(likely.begin(), likely.end());
    // The numbers of the `wanted` largest of `values`, in ascending order; of equal values, the first.
    const auto largest = [](const std::vector<float>& values, int64_t wanted) {
        std::vector<int32_t> order(values.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
        order.resize(wanted);
        std::sort(order.begin(), order.end());
        return order;
    };
    if (experts.num_groups > 1) {
        std::vector<float> best(experts.num_groups);
        for (int64_t g = 0; g < experts.num_groups; g++) {
            best[g] = *std::max_element(likely.begin() + g * in_group, likely.begin() + (g + 1) * in_group);
        }
        const std::vector<int32_t> used = largest(best, experts.num_used_groups);
        for (int64_t e = 0; e < num; e++) {
            if (!std::binary_search(used.begin(), used.end(), int32_t(e / in_group))) likely[e] = 0;
        }
    }
    const std::vector<int32_t> used = largest(likely, experts.num_used);
    for (int64_t i = 0; i < experts.num_used; i++) chosen[i] = used[i], weights[i] = likely[used[i]];
    if (experts.normalises) to_shares(weights, weights + experts.num_used);
    else for (int64_t i = 0; i < experts.num_used; i++) weights[i] *= experts.scale;
}

// out [num_rows][hidden_size] = the sum of each row's experts, in the order of their numbers, and of the shared one before
// them; each addition is rounded to S.
template <class S>
void mixture(const RowOf<S>* x, int64_t stride, int64_t num_rows, const Experts& experts, const Gating& gating,
             MlpMemory<S>& memory, S* out) {
    const int64_t num_used = experts.num_used, size = experts.experts[0].down.num_out;
    if (experts.shared) apply(x, stride, num_rows, *experts.shared, gating, memory, out);
    else std::fill_n(out, num_rows * size, S{});
    grow(memory.scores, num_rows * experts.num);
    grow(memory.chosen, num_used);
    grow(memory.weights, num_used);
    linear<S>(x, stride, num_rows, experts.router, memory.scores.data(), experts.num);
    std::vector<std::vector<std::pair<int32_t, float>>> rows_of(experts.num);  // of each expert: its rows and their weights
    for (int32_t t = 0; t < num_rows; t++) {
        route(memory.scores.data() + t * experts.num, experts, memory.chosen.data(), memory.weights.data());
        for (int64_t i = 0; i < num_used; i++) rows_of[memory.chosen[i]].push_back({t, memory.weights[i]});
    }
    for (int64_t e = 0; e < experts.num; e++) {
        const auto& rows = rows_of[e];
        const int64_t num = int64_t(rows.size());
        if (!num) continue;
        const RowOf<S>* from = x;
        if (num < num_rows) {
            grow(memory.gathered, (num + MAX_TILE_ROWS) * stride);
            for (int64_t i = 0; i < num; i++) std::copy_n(x + rows[i].first * stride, stride, memory.gathered.data() + i * stride);
            from = memory.gathered.data();
        }
        grow(memory.outputs, num * size);
        apply(from, stride, num, experts.experts[e], gating, memory, memory.outputs.data());
        for (int64_t i = 0; i < num; i++) {
            const Vec weight = rounded<S>(broadcast(rows[i].second));
            S* to = out + rows[i].first * size;
            each_lanes(memory.outputs.data() + i * size, size, [&](int64_t k, int lanes, Vec value) {
                store_first(to + k, add(load_first(to + k, lanes), rounded<S>(mul(value, weight))), lanes);
            });
        }
    }
}

}  // namespace agentflow
