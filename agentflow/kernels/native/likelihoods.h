// The log-sum-exp of rows of logits, and their highest ones. One thread processes a whole row.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"
#include "team.h"

namespace agentflow {

// The logits of tokens first to first + 15; minus infinity past the vocabulary.
ALWAYS_INLINE Vec logits_from(const float* logits, int64_t first, int64_t vocab_size) {
    const int num = int(std::min<int64_t>(LANES, vocab_size - first));
    return first_lanes(load_first(logits + first, num), num, MINUS_INFINITY);
}

// log(sum(exp(logit))). Not finite if a logit is NaN or infinity, or if all are minus infinity.
inline float log_sum(const float* logits, int64_t vocab_size) {
    const Vec lowest = broadcast(MINUS_INFINITY);
    Vec most = lowest;
    uint32_t are_numbers = 0xFFFF;
    for (int64_t first = 0; first < vocab_size; first += LANES) {
        const Vec here = logits_from(logits, first, vocab_size);
        are_numbers &= at_least(here, lowest);
        most = max(most, here);
    }
    const float highest = largest(most);
    if (are_numbers != 0xFFFF) return std::numeric_limits<float>::quiet_NaN();
    if (!std::isfinite(highest)) return highest;
    constexpr int64_t BLOCK = 1024;  // is added up as floats, and its sum as double
    const Vec top = broadcast(highest), factor = broadcast(LOG2_E);
    double total = 0;
    for (int64_t begin = 0; begin < vocab_size; begin += BLOCK) {
        Vec sums = zero();
        for (int64_t first = begin; first < std::min(begin + BLOCK, vocab_size); first += LANES) {
            sums = add(sums, exp2(mul(sub(logits_from(logits, first, vocab_size), top), factor)));
        }
        total += sum(sums);
    }
    return float(highest + std::log(total));
}

// Writes the `num` highest logits and their tokens, the highest first, and of equals the lowest token. num: at most vocab_size.
inline void likeliest(const float* logits, int64_t vocab_size, int64_t num, float* values, int64_t* tokens) {
    int64_t num_found = 0;
    const auto insert = [&](int64_t token) {
        const float value = logits[token];
        int64_t place = num_found < num ? num_found++ : num - 1;  // the last one leaves
        for (; place > 0 && values[place - 1] < value; place--) {
            values[place] = values[place - 1];
            tokens[place] = tokens[place - 1];
        }
        values[place] = value;
        tokens[place] = token;
    };
    for (int64_t token = 0; token < num; token++) insert(token);
    for (int64_t first = num / LANES * LANES; first < vocab_size; first += LANES) {
        uint32_t found = at_least(logits_from(logits, first, vocab_size), broadcast(values[num - 1]));
        for (; found; found &= found - 1) {
            const int64_t token = first + __builtin_ctz(found);
            if (token >= num && token < vocab_size && logits[token] > values[num - 1]) insert(token);
        }
    }
}

}  // namespace agentflow
