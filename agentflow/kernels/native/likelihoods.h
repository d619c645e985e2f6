// The log-sum-exp of rows of logits, the highest logits, and the log-probabilities of single tokens. A thread processes a whole
// row.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "simd.h"
#include "team.h"

namespace agentflow {

// The log-probabilities to compute for S rows, like inputs.Likelihoods. A null field is not computed.
struct Likelihoods {
    float* logprobs;  // [S]: the log-probability of each row's token
    int64_t* ranks;   // [S]: how many tokens are at least as likely as the row's token, including itself
    int64_t num_top;
    const bool* wants_top;  // [S]: whether the row needs the likeliest tokens; null: all rows do
    int64_t* top_ids;       // [S][num_top]
    float* top_logprobs;    // [S][num_top]
    int64_t num_scored;
    const int64_t *scored_rows, *scored_ids;  // [num_scored]; the rows ascend
    float* scored_logprobs;                   // [num_scored]
};

// The logits of tokens `first` to `first` + 15; minus infinity beyond the vocabulary.
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
    constexpr int64_t BLOCK = 1024;  // logits that are summed in float; the sums of blocks are added in double
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

// Writes the `num` highest logits and their tokens, the highest first; equal logits in the order of their tokens. `num`: at most
// vocab_size.
inline void likeliest(const float* logits, int64_t vocab_size, int64_t num, float* values, int64_t* tokens) {
    int64_t num_found = 0;
    const auto insert = [&](int64_t token) {
        const float value = logits[token];
        int64_t place = num_found < num ? num_found++ : num - 1;  // replaces the lowest logit found so far
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

// The number of logits that are at least `least`.
inline int64_t num_at_least(const float* logits, int64_t vocab_size, float least) {
    const Vec bound = broadcast(least);
    int64_t count = 0;
    for (int64_t first = 0; first < vocab_size; first += LANES) {
        const uint32_t within = (1u << std::min<int64_t>(LANES, vocab_size - first)) - 1;
        count += std::popcount(at_least(logits_from(logits, first, vocab_size), bound) & within);
    }
    return count;
}

// Writes the results of row `row`, which has these logits. Returns `token`, or `not_finite` if the logits are not finite.
inline int64_t write_likelihoods(const Likelihoods& to, int64_t row, const float* logits, int64_t vocab_size, int64_t token,
                                 int64_t not_finite) {
    const float total = log_sum(logits, vocab_size);
    if (!std::isfinite(total)) token = not_finite;
    const float own = logits[std::max<int64_t>(token, 0)];
    to.logprobs[row] = own - total;
    if (to.ranks) to.ranks[row] = num_at_least(logits, vocab_size, own);
    if (to.top_ids && (!to.wants_top || to.wants_top[row])) {
        float* values = to.top_logprobs + row * to.num_top;
        likeliest(logits, vocab_size, to.num_top, values, to.top_ids + row * to.num_top);
        for (int64_t i = 0; i < to.num_top; i++) values[i] -= total;
    }
    const auto [first, end] = std::equal_range(to.scored_rows, to.scored_rows + to.num_scored, row);
    for (const int64_t* at = first; at < end; at++) {
        const int64_t i = at - to.scored_rows;
        to.scored_logprobs[i] = logits[to.scored_ids[i]] - total;
    }
    return token;
}

}  // namespace agentflow
