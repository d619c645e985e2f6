// The activations of MLPs.
#pragma once

#include <stdexcept>
#include <string>

#include "simd.h"

namespace agentflow {

// In the order of `activations.ACTIVATIONS`.
enum Activation : int64_t { SILU, GELU_TANH, GELU, RELU, CLAMPED_SWIGLU, QUICK_GELU, NUM_ACTIVATIONS };

ALWAYS_INLINE Vec sigmoid(Vec x) {
    return div(broadcast(1.0f), add(broadcast(1.0f), exp2(mul(x, broadcast(-LOG2_E)))));
}

// The error function, with an absolute error below 5e-7 (Abramowitz and Stegun 1964, 7.1.26).
ALWAYS_INLINE Vec erf(Vec x) {
    constexpr float FACTORS[] = {1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f};
    const Vec size = max(x, sub(zero(), x)), t = div(broadcast(1.0f), fma(size, broadcast(0.3275911f), broadcast(1.0f)));
    Vec sums = zero();
    for (float factor : FACTORS) sums = fma(sums, t, broadcast(factor));
    const Vec rest = mul(mul(sums, t), exp2(mul(mul(size, size), broadcast(-LOG2_E))));
    const Vec positive = sub(broadcast(1.0f), rest), negative = sub(rest, broadcast(1.0f));
    const uint32_t is_positive = at_least(x, zero());
    return add(lanes_where(positive, is_positive, 0.0f), lanes_where(negative, ~is_positive & 0xFFFF, 0.0f));
}

// The activation of one value, rounded to S.
template <class S>
ALWAYS_INLINE Vec activated(Activation activation, Vec x) {
    const Vec half = mul(x, broadcast(0.5f)), one = broadcast(1.0f);
    switch (activation) {
        case SILU: return rounded<S>(div(x, add(one, exp2(mul(x, broadcast(-LOG2_E))))));
        case GELU_TANH: {  // x / 2 (1 + tanh y) is x / (1 + e^-2y)
            constexpr float FACTOR = -2 * LOG2_E * 0.7978845608f;
            const Vec power = mul(x, fma(mul(x, x), broadcast(FACTOR * 0.044715f), broadcast(FACTOR)));
            return rounded<S>(div(x, add(one, exp2(power))));
        }
        case GELU: return rounded<S>(mul(half, add(one, erf(mul(x, broadcast(0.7071067812f))))));
        case RELU: return max(zero(), x);
        case QUICK_GELU: return rounded<S>(mul(x, rounded<S>(sigmoid(rounded<S>(mul(x, broadcast(1.702f)))))));
        default: throw std::invalid_argument("there is no activation " + std::to_string(activation) + " of one value");
    }
}

// The activation of a gated MLP. Each operation is rounded to S.
template <class S>
ALWAYS_INLINE Vec gated(Activation activation, Vec gate, Vec up) {
    if (activation != CLAMPED_SWIGLU) return rounded<S>(mul(activated<S>(activation, gate), up));
    // GPT-OSS (arXiv 2508.10925).
    const Vec limit = broadcast(7.0f), lowest = broadcast(-7.0f);
    const auto least = [](Vec a, Vec b) { return sub(zero(), max(sub(zero(), a), sub(zero(), b))); };
    gate = least(limit, gate);
    up = max(lowest, least(limit, up));
    const Vec open = rounded<S>(sigmoid(rounded<S>(mul(gate, broadcast(1.702f)))));
    return rounded<S>(mul(rounded<S>(add(up, broadcast(1.0f))), rounded<S>(mul(gate, open))));
}

}  // namespace agentflow
