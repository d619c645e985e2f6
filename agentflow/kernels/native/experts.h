// MLPs, and mixtures of several of them (experts; Shazeer et al. 2017, arXiv 1701.06538).
#pragma once

#include <algorithm>
#include <limits>
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

// A mixture of experts. The router chooses a few of them for each row, and their weights.
struct Experts {
    Weight router;  // computes the scores of the experts
    int64_t num;
    const Mlp* experts;  // [num]
    const Mlp* shared;   // an MLP that all rows use, or null
    int64_t num_used;    // the number of experts for each row
    int64_t normalises;  // the weights of a row add up to 1
    float scale;         // the factor of the weights
    int64_t num_groups, num_used_groups;  // a row uses only experts of the best groups
};

// Pads a row with zeros to a whole panel, because products read that far.
template <class Row>
void fill_up(Row* row, int64_t size, int64_t stride) {
    std::fill(row + size, row + stride, Row{});
}

// A row's use of an expert.
struct Use {
    int32_t expert, row;
    float weight;
};

// Buffers that all MLPs of a forward pass reuse.
template <class S>
struct MlpMemory {
    std::vector<RowOf<S>> inner, gathered;
    std::vector<S> scores, outputs;
    std::vector<float> likely;  // the scores or the probabilities of the experts, for one row
    std::vector<Use> uses;
};

// The products of an MLP, or of several that have the same shape.
struct MlpPortions {
    Portions gate_up, down;
    int64_t num_rows = 0;

    void add(const Mlp& mlp, int64_t num) {
        gate_up.push_back({&mlp.gate_up, num_rows, num});
        down.push_back({&mlp.down, num_rows, num});
        num_rows += num;
    }
};

// Writes the activated values between the two products of MLPs to memory.inner. Returns the stride of its rows. `added`: as in
// linear.h.
template <class S>
int64_t inner_rows(const RowOf<S>* x, int64_t stride, const MlpPortions& mlps, const Gating& gating, MlpMemory<S>& memory,
                   const S* added = nullptr) {
    const int64_t size = mlps.down[0].weight->num_in, inner_stride = round_up<int64_t>(size, PANEL);
    grow(memory.inner, (mlps.num_rows + MAX_TILE_ROWS) * inner_stride);
    RowOf<S>* to = memory.inner.data();
    if (gating.is_gated) gated_linear<S>(x, stride, mlps.gate_up, gating.activation, to, inner_stride, added);
    else linear<S>(x, stride, mlps.gate_up, to, inner_stride, added, gating.activation);
    for (int64_t t = 0; size < inner_stride && t < mlps.num_rows; t++) fill_up(to + t * inner_stride, size, inner_stride);
    return inner_stride;
}

// out [num_rows][hidden_size] = the MLP of each row.
template <class S>
void apply(const RowOf<S>* x, int64_t stride, const MlpPortions& mlps, const Gating& gating, MlpMemory<S>& memory, S* out) {
    const int64_t inner_stride = inner_rows(x, stride, mlps, gating, memory);
    linear<S>(memory.inner.data(), inner_stride, mlps.down, out, mlps.down[0].weight->num_out);
}

// Chooses the experts of a row by their scores [num], and appends them to `uses` in ascending order.
template <class S>
void route(const S* scores, const Experts& experts, int32_t row, std::vector<float>& likely, std::vector<Use>& uses) {
    const int64_t num = experts.num, in_group = num / experts.num_groups;
    likely.resize(num);
    std::transform(scores, scores + num, likely.begin(), [](S score) { return to_float(score); });
    const auto to_shares = [](auto first, auto last, const auto& value) {  // softmax
        float most = value(*first), total = 0;
        for (auto at = first; at < last; at++) most = std::max(most, value(*at));
        for (auto at = first; at < last; at++) total += value(*at) = std::exp(value(*at) - most);
        for (auto at = first; at < last; at++) value(*at) /= total;
    };
    if (!experts.normalises) to_shares(likely.begin(), likely.end(), [](float& value) -> float& { return value; });
    // NaN has no place in an order, so its expert could be passed over: any experts make the row NaN.
    bool has_nan = false;
    for (float value : likely) has_nan |= value != value;
    if (has_nan) {
        for (int32_t e = 0; e < experts.num_used; e++) uses.push_back({e, row, std::numeric_limits<float>::quiet_NaN()});
        return;
    }
    // The indices of the `wanted` largest values, in ascending order. Among equal values, the first come first.
    const auto largest = [](const std::vector<float>& values, int64_t wanted) {
        std::vector<int32_t> order(values.size());
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + wanted, order.end(), [&](int32_t a, int32_t b) {
            return values[a] != values[b] ? values[a] > values[b] : a < b;
        });
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
    for (int32_t e : largest(likely, experts.num_used)) uses.push_back({e, row, likely[e]});
    const auto first = uses.end() - experts.num_used;
    if (experts.normalises) to_shares(first, uses.end(), [](Use& use) -> float& { return use.weight; });
    else for (auto use = first; use < uses.end(); use++) use->weight *= experts.scale;
}

// Adds the outputs of some experts to out [num_rows][hidden_size]. `uses` are sorted by expert.
template <class S>
void add_experts(const RowOf<S>* x, int64_t stride, int64_t num_rows, const Experts& experts, const Use* uses, int64_t num_uses,
                 const Gating& gating, MlpMemory<S>& memory, S* out) {
    MlpPortions mlps;
    for (int64_t first = 0, end = 0; first < num_uses; first = end) {
        while (end < num_uses && uses[end].expert == uses[first].expert) end++;
        mlps.add(experts.experts[uses[first].expert], end - first);
    }
    const RowOf<S>* from = x;
    int64_t from_stride = 0;
    if (num_rows > 1) {
        from_stride = stride;
        grow(memory.gathered, (num_uses + MAX_TILE_ROWS) * stride);
        team().loop(num_uses, 8, [&](int64_t first, int64_t end, int) {
            for (int64_t i = first; i < end; i++) std::copy_n(x + uses[i].row * stride, stride, memory.gathered.data() + i * stride);
        });
        from = memory.gathered.data();
    }
    const int64_t size = experts.experts[0].down.num_out;
    grow(memory.outputs, num_uses * size);
    apply(from, from_stride, mlps, gating, memory, memory.outputs.data());
    // Divided by columns, because a row may have several uses.
    team().loop((size + LANES - 1) / LANES, 32, [&](int64_t first, int64_t end, int) {
        const int64_t begin = first * LANES, num = std::min(end * LANES, size) - begin;
        for (int64_t i = 0; i < num_uses; i++) {
            const Vec weight = rounded<S>(broadcast(uses[i].weight));
            S* to = out + uses[i].row * size + begin;
            each_lanes(memory.outputs.data() + i * size + begin, num, [&](int64_t k, int lanes, Vec value) {
                store_first(to + k, add(load_first(to + k, lanes), rounded<S>(mul(value, weight))), lanes);
            });
        }
    });
}

// out [num_rows][hidden_size] = the sum over the shared MLP and each row's experts, in this order; each addition is rounded to S.
template <class S>
void mixture(const RowOf<S>* x, int64_t stride, int64_t num_rows, const Experts& experts, const Gating& gating,
             MlpMemory<S>& memory, S* out) {
    constexpr int64_t MANY_USES = 512;  // about this number of uses are computed together, to bound the memory
    if (experts.shared) {
        MlpPortions shared;
        shared.add(*experts.shared, num_rows);
        apply(x, stride, shared, gating, memory, out);
    } else {
        std::fill_n(out, num_rows * experts.experts[0].down.num_out, S{});
    }
    grow(memory.scores, num_rows * experts.num);
    linear<S>(x, stride, num_rows, experts.router, memory.scores.data(), experts.num);
    std::vector<Use>& uses = memory.uses;
    uses.clear();
    for (int32_t t = 0; t < num_rows; t++) route(memory.scores.data() + t * experts.num, experts, t, memory.likely, uses);
    std::stable_sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) { return a.expert < b.expert; });
    const int64_t num_uses = int64_t(uses.size());
    for (int64_t first = 0, end = 0; first < num_uses; first = end) {
        do end++;
        while (end < num_uses && (uses[end].expert == uses[end - 1].expert || end - first < MANY_USES));
        add_experts(x, stride, num_rows, experts, uses.data() + first, end - first, gating, memory, out);
    }
}

}  // namespace agentflow
