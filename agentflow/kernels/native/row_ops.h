// Operations on single rows between products: norms, rotary embeddings, copies.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "product.h"

namespace agentflow {

// The norm of rows of `size` values.
struct Norm {
    const void* weight;  // [size] of type S; null: there is no norm
    const void* bias;    // [size] of type S: the bias of a layer norm; null: an RMS norm
    int64_t size;
    float eps;
    int32_t is_less_one;  // the weight is stored minus 1
    int64_t stride;       // the values between the weights of two heads; 0: all heads have the same weights

    explicit operator bool() const { return weight != nullptr; }
};

// Calls body(k, num, value) with the values of a row from k on, LANES or fewer at a time.
template <class S, class Body>
ALWAYS_INLINE void each_lanes(const S* x, int64_t size, const Body& body) {
    for (int64_t k = 0; k < size; k += LANES) {
        const int num = int(std::min<int64_t>(LANES, size - k));
        body(k, num, load_first(x + k, num));
    }
}

// out = (x - mean) / sqrt(variance + eps) * weight + bias, rounded to S once.
template <class S, class Out>
void layer_norm(const S* x, const Norm& norm, Out* out) {
    Vec all = zero(), squares = zero();
    each_lanes(x, norm.size, [&](int64_t, int, Vec value) { all = add(all, value); });
    const Vec mean = broadcast(sum(all) / float(norm.size));
    each_lanes(x, norm.size, [&](int64_t, int num, Vec value) {
        const Vec from_mean = first_lanes(sub(value, mean), num, 0.0f);
        squares = fma(from_mean, from_mean, squares);
    });
    const Vec scale = broadcast(1.0f / std::sqrt(sum(squares) / float(norm.size) + norm.eps));
    const S *weight = static_cast<const S*>(norm.weight), *bias = static_cast<const S*>(norm.bias);
    each_lanes(x, norm.size, [&](int64_t k, int num, Vec value) {
        const Vec normed = mul(sub(value, mean), scale);
        store_first(out + k, rounded<S>(fma(normed, load_first(weight + k, num), load_first(bias + k, num))), num);
    });
}

// out = x / sqrt(mean(x^2) + eps), rounded to S, times the weight, rounded again. If the weight is stored minus 1, only the
// result is rounded, as in transformers.
template <class S, class Out>
void rms_norm(const S* x, const Norm& norm, Out* out) {
    Vec squares = zero();
    each_lanes(x, norm.size, [&](int64_t, int, Vec value) { squares = fma(value, value, squares); });
    const Vec scale = broadcast(1.0f / std::sqrt(sum(squares) / float(norm.size) + norm.eps)), one = broadcast(1.0f);
    const S* weight = static_cast<const S*>(norm.weight);
    each_lanes(x, norm.size, [&](int64_t k, int num, Vec value) {
        const Vec normed = mul(value, scale), by = load_first(weight + k, num);
        store_first(out + k, rounded<S>(norm.is_less_one ? mul(normed, add(by, one)) : mul(rounded<S>(normed), by)), num);
    });
}

// Applies either norm to a row. `out` may be `x`.
template <class S, class Out>
void normalize(const S* x, const Norm& norm, Out* out) {
    if (norm.bias) layer_norm(x, norm, out);
    else rms_norm(x, norm, out);
}

// Rotary embeddings of the first `num_rotated` dimensions of a head.
struct Rope {
    const float* frequencies;  // [num_rotated / 2], in radians per position
    int64_t num_rotated;
    float amplitude;  // the factor of cosines and sines
};

// cos and sin [num_rotated / 2] at a position, rounded to S as in transformers. `angles` [num_rotated / 2]: replace the angles of
// the position; or null.
template <class S>
void rope_angles(int64_t position, const Rope& rope, const float* angles, float* cos, float* sin) {
    const int64_t half = rope.num_rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        const float angle = angles ? angles[i] : float(position) * rope.frequencies[i];
        cos[i] = std::cos(angle) * rope.amplitude;
        sin[i] = std::sin(angle) * rope.amplitude;
    }
    for (int64_t i = 0; i < half; i += LANES) {
        const int num = int(std::min<int64_t>(LANES, half - i));
        store_first(cos + i, rounded<S>(load_first(cos + i, num)), num);
        store_first(sin + i, rounded<S>(load_first(sin + i, num)), num);
    }
}

// Rotates the first 2 * half dimensions of a head in place. Products and sums are rounded to S.
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

// to += row, each rounded to S.
template <class S>
void add_row(const S* row, int64_t size, S* to) {
    each_lanes(row, size, [&](int64_t k, int num, Vec value) { store_first(to + k, add(load_first(to + k, num), value), num); });
}

template <class S>
void scale_row(S* row, int64_t size, float factor) {
    each_lanes(row, size, [&](int64_t k, int num, Vec value) { store_first(row + k, mul(value, broadcast(factor)), num); });
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
