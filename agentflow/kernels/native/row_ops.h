// Operations on single rows between the products: norms, rotary embeddings, copies.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "product.h"

namespace agentflow {

// out = round(x / sqrt(mean(x^2) + eps)) * weight, rounded to S. out may be x.
template <class S, class Out>
void rms_norm(const S* x, const S* weight, int64_t size, float eps, Out* out) {
    Vec squares = zero();
    for (int64_t k = 0; k < size; k += LANES) {
        const Vec value = load_first(x + k, int(std::min<int64_t>(LANES, size - k)));
        squares = fma(value, value, squares);
    }
    const Vec scale = broadcast(1.0f / std::sqrt(sum(squares) / float(size) + eps));
    for (int64_t k = 0; k < size; k += LANES) {
        const int num = int(std::min<int64_t>(LANES, size - k));
        const Vec normed = rounded<S>(mul(load_first(x + k, num), scale));
        store_first(out + k, rounded<S>(mul(normed, load_first(weight + k, num))), num);
    }
}

// cos and sin [head_dim / 2] at a position, rounded to S as in transformers. `angles` [head_dim / 2]: if not null, these
// instead of the position's.
template <class S>
void rope_angles(int64_t position, const float* frequencies, const float* angles, int64_t half, float* cos, float* sin) {
    for (int64_t i = 0; i < half; i++) {
        const float angle = angles ? angles[i] : float(position) * frequencies[i];
        cos[i] = std::cos(angle);
        sin[i] = std::sin(angle);
    }
    for (int64_t i = 0; i < half; i += LANES) {
        const int num = int(std::min<int64_t>(LANES, half - i));
        store_first(cos + i, rounded<S>(load_first(cos + i, num)), num);
        store_first(sin + i, rounded<S>(load_first(sin + i, num)), num);
    }
}

// Rotates one head in place; products and sums are rounded to S.
template <class S>
void rotate(S* head, int64_t half, const float* cos, const float* sin) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int num = int(std::min<int64_t>(LANES, half - i));
        const Vec a = load_first(head + i, num), b = load_first(head + half + i, num);
        const Vec c = load_first(cos + i, num), s = load_first(sin + i, num);
        store_first(head + i, sub(rounded<S>(mul(a, c)), rounded<S>(mul(b, s))), num);
        store_first(head + half + i, add(rounded<S>(mul(b, c)), rounded<S>(mul(a, s))), num);
    }
}

template <class S, class Out>
void copy_row(const S* from, int64_t size, Out* to) {
    if constexpr (std::is_same_v<S, Out>) {
        std::memcpy(to, from, size * sizeof(S));
    } else {
        for (int64_t k = 0; k < size; k += LANES) {
            const int num = int(std::min<int64_t>(LANES, size - k));
            store_first(to + k, load_first(from + k, num), num);
        }
    }
}

}  // namespace agentflow
