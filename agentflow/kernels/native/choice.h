// Chooses a token from each row of logits, as `Sampler.choose` defines it. A thread processes a whole row while it is in the
// core's cache.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "likelihoods.h"
#include "simd.h"
#include "team.h"

namespace agentflow {

// S rows of logits, and how to choose a token for each, like inputs.ChoiceRows.
struct Choices {
    const float* logits;  // [S][vocab_size]
    int64_t num_rows, vocab_size;
    const int64_t* targets;  // [S]
    const float *temperatures, *top_ps, *min_ps;  // [S]
    const int64_t* top_ks;  // [S]
    const double* uniforms;  // [S], in [0, 1)
    const int64_t* mask_places;  // [S]: the row of `mask_words`; -1: all tokens are allowed. Null: no masks
    const uint32_t* mask_words;  // [..][num_words]: the allowed tokens, as bits
    int64_t num_words;
    const float* highest;  // [S][runs of RUN tokens]: the highest logit of each run, infinity if a logit is NaN; or null
};

constexpr int64_t RUN = 32;
constexpr int64_t NO_TOKEN = -1, NOT_FINITE = -2;  // as in no_choice.py

// The results that a forward pass writes for its sampled rows. The caller may fill this in while the pass runs.
struct Wanted {
    Choices choices;  // without logits
    Likelihoods likelihoods;
    int64_t* tokens;  // [S]; null: the caller failed and needs no results
};

class RowChoice {
  public:
    RowChoice(const Choices& choices, int64_t row)
        : c_(choices), row_(row), logits_(choices.logits + row * choices.vocab_size), num_(choices.vocab_size) {
        const int64_t place = c_.mask_places ? c_.mask_places[row] : -1;
        if (place >= 0) words_ = c_.mask_words + place * c_.num_words;
        else if (c_.highest) highest_ = c_.highest + row * num_runs();
    }

    int64_t token() {
        if (c_.targets[row_] >= 0) return c_.targets[row_];
        const float highest = most();
        if (highest == MINUS_INFINITY) return NO_TOKEN;
        if (highest == -MINUS_INFINITY) return NOT_FINITE;
        const float temperature = c_.temperatures[row_];
        return temperature > 0 ? drawn(highest, temperature) : first_of(highest);
    }

  private:
    int64_t num_runs() const { return (num_ + RUN - 1) / RUN; }

    // Keeps the sum of each block, so that only one block is added up again to find the drawn token.
    static constexpr int64_t BLOCK = 1024;

    // The likeliest token has the weight 2^35. All implementations of `Sampler.choose` have these constants.
    static constexpr float WEIGHT_BITS = 35, HIGHEST_WEIGHT = 0x1p35f;
    static constexpr float LEAST_EXPONENT = -37;  // below this power of two, relative to the likeliest token, a weight is 0
    static constexpr float EXP2[] = {1.3264726e-3f, 9.671513e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.93147e-1f, 1.0f};

    // The logits of tokens first to first + 15; -inf if a token is not allowed or past the vocabulary.
    Vec lanes(int64_t first) const {
        const int num = int(std::min<int64_t>(LANES, num_ - first));
        const Vec values = first_lanes(load_first(logits_ + first, num), num, MINUS_INFINITY);
        if (!words_) return values;
        const int64_t word = first / 32;
        const uint32_t bits = word < c_.num_words ? words_[word] >> (first % 32) & 0xFFFF : 0;
        return lanes_where(values, bits, MINUS_INFINITY);
    }

    // The highest logit; infinity if a logit is NaN.
    float most() const {
        if (highest_) return *std::max_element(highest_, highest_ + num_runs());
        const Vec lowest = broadcast(MINUS_INFINITY);
        Vec highest = lowest;
        uint32_t are_numbers = 0xFFFF;
        for (int64_t first = 0; first < num_; first += LANES) {
            const Vec here = lanes(first);
            are_numbers &= at_least(here, lowest);
            highest = max(highest, here);
        }
        return are_numbers == 0xFFFF ? largest(highest) : -MINUS_INFINITY;
    }

    int64_t first_of(float highest) const {
        const int64_t begin = highest_ ? (std::find(highest_, highest_ + num_runs(), highest) - highest_) * RUN : 0;
        for (int64_t first = begin; first < num_; first += LANES) {
            const uint32_t found = at_least(lanes(first), broadcast(highest));
            if (found) return first + __builtin_ctz(found);
        }
        return 0;
    }

    int64_t drawn(float highest, float temperature) {
        weights().resize(round_up<int64_t>(num_, BLOCK));
        // Relative to the largest logit, so that even the smallest temperature does not overflow.
        const double factor = std::min(1.4426950408889634 / double(temperature), double(std::numeric_limits<float>::max()));
        const Vec top = broadcast(highest), log2_e = broadcast(float(factor));
        float* weight = weights().data();
        const auto is_zero = [&](int64_t first) {  // whether all weights of a run are 0
            return highest_ && (highest_[first / RUN] - highest) * float(factor) < LEAST_EXPONENT;
        };
        for (int64_t first = 0; first < num_; first += LANES) {
            if (is_zero(first)) store(weight + first, zero());
            else store(weight + first, whole_weight(rounded_mul(sub(lanes(first), top), log2_e)));
        }
        std::fill(weights().begin() + round_up<int64_t>(num_, LANES), weights().end(), 0.0f);
        double total = add_up();
        const float least = least_kept(total);
        if (least > 0) {
            for (int64_t first = 0; first < num_; first += LANES) {
                const Vec here = load(weight + first);
                store(weight + first, lanes_where(here, at_least(here, broadcast(least)), 0.0f));
            }
            total = add_up();
        }
        return at(std::min(c_.uniforms[row_] * total, std::nextafter(total, 0.0)));
    }

    // The weight of a token, floor(2^(35 + x)), as in `token_weights.whole_weights`. x: at most 0.
    static Vec whole_weight(Vec x) {
        x = max(x, broadcast(-64.0f));
        const Vec whole = floor(add(x, broadcast(0.5f))), rest = sub(x, whole);
        Vec power = broadcast(EXP2[0]);
        for (int i = 1; i < 6; i++) power = add(rounded_mul(power, rest), broadcast(EXP2[i]));
        return floor(scaled(power, add(whole, broadcast(WEIGHT_BITS))));
    }

    // Computes the sum of each block, and returns the total. The sums are exact.
    double add_up() {
        std::vector<double>& of_blocks = sums();
        of_blocks.assign(weights().size() / BLOCK, 0.0);
        double total = 0;
        for (size_t block = 0; block < of_blocks.size(); block++) {
            double parts[LANES] = {};
            const float* from = weights().data() + block * BLOCK;
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                for (int j = 0; j < LANES; j++) parts[j] += from[i + j];
            }
            for (double part : parts) of_blocks[block] += part;
            total += of_blocks[block];
        }
        return total;
    }

    // The smallest weight that top_k, top_p and min_p keep, applied in this order. Reads only the largest weights, and smaller
    // ones if these are not enough.
    float least_kept(double total) {
        const int64_t top_k = c_.top_ks[row_];
        const float min_p = c_.min_ps[row_] * HIGHEST_WEIGHT;
        const bool is_limited = top_k > 0 && top_k < num_, has_nucleus = c_.top_ps[row_] < 1;
        if (!is_limited && !has_nucleus) return min_p;
        for (float bound = 1e-3f;; bound = bound > 1e-9f ? bound * 1e-2f : 0.0f) {
            collect(bound * HIGHEST_WEIGHT);
            const bool are_all = bound == 0;
            Likeliest kept{0, total};
            if (is_limited) {
                kept = fewest([&](int64_t count, double) { return count >= top_k; });
                if (kept.least < 0 && !are_all) continue;
            }
            Likeliest nucleus = kept;
            if (has_nucleus) {
                const double wanted = double(c_.top_ps[row_]) * kept.sum;
                nucleus = fewest([&](int64_t, double sum) { return sum >= wanted; });
                if (nucleus.least < 0 && !are_all) continue;
            }
            return std::max({kept.least, nucleus.least, min_p});
        }
    }

    // Collects the weights of at least `bound`.
    void collect(float bound) {
        std::vector<float>& likely = likeliest();
        const float* from = weights().data();
        const Vec least = broadcast(bound);
        likely.clear();
        for (int64_t first = 0; first < num_; first += LANES) {
            const float* weight = from + first;
            uint32_t found = at_least(load(weight), least);
            for (; found; found &= found - 1) likely.push_back(weight[__builtin_ctz(found)]);
        }
    }

    struct Likeliest {
        float least;  // the smallest weight of the set; negative: the collected weights are not enough
        double sum;
    };

    // The smallest set of the largest collected weights for which is_enough(count, sum), with all weights equal to its last one.
    // A radix select: counts and adds up all weights by their upper bits, then the weights in the bucket that makes the set large
    // enough by the next bits, and so on. The bits of positive floats have the order of the floats.
    template <class IsEnough>
    Likeliest fewest(const IsEnough& is_enough) {
        constexpr int NUM_KEYS = 4096, SHIFTS[] = {19, 7, 0};
        std::vector<int32_t>& numbers = memory<3, int32_t>();
        std::vector<double>& totals = memory<4, double>();
        std::vector<float>& left = memory<5, float>();
        left = likeliest();
        int64_t number = 0;  // the number of weights above the weights in `left`; `sum`: their sum
        double sum = 0;
        for (const int shift : SHIFTS) {
            const uint32_t bits = shift ? NUM_KEYS - 1 : (1 << SHIFTS[1]) - 1;
            const auto key_of = [&](float weight) { return std::bit_cast<uint32_t>(weight) >> shift & bits; };
            numbers.assign(NUM_KEYS, 0), totals.assign(NUM_KEYS, 0.0);
            for (float weight : left) numbers[key_of(weight)]++, totals[key_of(weight)] += weight;
            int last = -1;  // the bucket that makes the set large enough; if rounding prevents it, the last bucket
            bool is_found = false;
            for (int key = NUM_KEYS - 1; key >= 0 && !is_found; key--) {
                if (!numbers[key]) continue;
                if (last >= 0) number += numbers[last], sum += totals[last];
                last = key;
                is_found = is_enough(number + numbers[key], sum + totals[key]);
            }
            if (!is_found && shift == SHIFTS[0]) return {-1, last < 0 ? 0.0 : sum + totals[last]};
            std::erase_if(left, [&](float weight) { return int(key_of(weight)) != last; });
        }
        return {left[0], sum + double(left[0]) * double(left.size())};
    }

    // The first token at which the cumulative sum exceeds `point`.
    int64_t at(double point) const {
        double reached = 0;
        int64_t block = 0;
        for (; block + 1 < int64_t(sums().size()) && reached + sums()[block] <= point; block++) reached += sums()[block];
        int64_t last = 0;  // the last token with a weight: the result if rounding leaves the sum below `point`
        for (int64_t token = block * BLOCK; token < num_; token++) {
            const float weight = weights()[token];
            if (weight > 0) last = token;
            reached += weight;
            if (reached > point) return token;
        }
        return last;
    }

    // Thread-local buffers, reused for each row.
    static std::vector<float>& weights() { return memory<0, float>(); }
    static std::vector<float>& likeliest() { return memory<1, float>(); }
    static std::vector<double>& sums() { return memory<2, double>(); }

    template <int WHICH, class T>
    static std::vector<T>& memory() {
        thread_local std::vector<T> kept;
        return kept;
    }

    const Choices& c_;
    const int64_t row_;
    const float* const logits_;
    const int64_t num_;
    const uint32_t* words_ = nullptr;
    const float* highest_ = nullptr;  // unless the row has a mask
};

// Chooses the tokens of all rows. `likelihoods`: null, or without `logprobs`, if no row needs them.
inline void choose(const Choices& choices, int64_t* tokens, const Likelihoods* likelihoods = nullptr) {
    const bool has_likelihoods = likelihoods && likelihoods->logprobs;
    const int64_t size = choices.vocab_size;
    team().loop(choices.num_rows, Team::ONE_BY_ONE, [&](int64_t first, int64_t end, int) {
        for (int64_t row = first; row < end; row++) {
            tokens[row] = RowChoice(choices, row).token();
            if (!has_likelihoods) continue;
            tokens[row] = write_likelihoods(*likelihoods, row, choices.logits + row * size, size, tokens[row], NOT_FINITE);
        }
    });
}

}  // namespace agentflow
