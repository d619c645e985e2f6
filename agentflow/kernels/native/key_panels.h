// Packs a block of keys and values from the pool into panels, and prefetches the next block.
#pragma once

#include "attention_tasks.h"
#include "few_queries.h"
#include "product.h"

namespace agentflow {

// A layer of the KV pool, or other rows with keys and values: [slots, 2, num_kv_heads, head_dim], keys at 0, values at 1.
template <class S>
struct KvLayer {
    const S* data;
    int64_t num_kv_heads, head_dim;
    int64_t slot_stride = 2 * num_kv_heads * head_dim;  // values between the starts of two slots
    const S* key(int32_t slot, int64_t head) const { return data + slot * slot_stride + head * head_dim; }
    const S* value(int32_t slot, int64_t head) const { return key(slot, num_kv_heads + head); }
};

// Transposes 16 rows of 16 words. Row i consists of `num` words at from[i] (null: none), then zeros. Writes the first
// `num_columns` columns, column i to `to + i * stride`.
ALWAYS_INLINE void transpose_words(const uint32_t* const (&from)[16], int num, uint32_t* to, int64_t stride, int num_columns = 16) {
#if defined(__AVX512F__)
    const __mmask16 present = __mmask16((1u << num) - 1);
    __m512i r[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = from[i] ? _mm512_maskz_loadu_epi32(present, from[i]) : _mm512_setzero_si512();
    turn(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (i < num_columns) _mm512_storeu_si512(to + i * stride, r[i]);
    }
#else
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < num_columns; j++) to[j * stride + i] = from[i] && j < num ? from[i][j] : 0;
    }
#endif
}

// Packs keys `begin` to `num` as columns: panels [ceil(num / 32)][words of a key][32]. A word is a float or a pair of bfloat16.
// `begin`: a multiple of LANES.
template <class S>
void pack_keys(const KvLayer<S>& kv, const int32_t* slots, int begin, int num, int64_t head, S* panels) {
    constexpr int PAIR = Format<S>::PAIR;
    const int64_t words = padded_depth<S>(kv.head_dim) / PAIR, whole = kv.head_dim / PAIR;
    for (int first = begin; first < round_up(num, PANEL); first += LANES) {
        uint32_t* to = reinterpret_cast<uint32_t*>(panels) + first / PANEL * words * PANEL + first % PANEL;
        const uint32_t* from[LANES];
        for (int i = 0; i < LANES; i++) {
            const bool is_there = first + i < num;
            from[i] = is_there ? reinterpret_cast<const uint32_t*>(kv.key(slots[first + i], head)) : nullptr;
        }
        int64_t word = 0;
        for (; word + LANES <= whole; word += LANES) {
            transpose_words(from, LANES, to + word * PANEL, PANEL);
            for (int i = 0; i < LANES; i++) from[i] = from[i] ? from[i] + LANES : nullptr;
        }
        if (word == words) continue;
        const int num_left = int(whole - word);
        transpose_words(from, num_left, to + word * PANEL, PANEL, int(words - word));
        if (whole * PAIR == kv.head_dim) continue;
        for (int i = 0; i < LANES; i++) {  // the last value is half of a word
            if (from[i]) std::memcpy(to + whole * PANEL + i, from[i] + num_left, sizeof(S));
        }
    }
}

// The first `num` of 16 values, then zeros.
ALWAYS_INLINE __m256i first_values(const bf16* from, int num) {
    if (num >= LANES) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (num <= 0) return _mm256_setzero_si256();
    alignas(32) bf16 values[LANES] = {};
    std::memcpy(values, from, num * sizeof(bf16));
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(values));
}

// Interleaves two rows of 32 bfloat16 value by value: the first `num` values of each, then zeros. If b is null, its values are 0.
ALWAYS_INLINE void interleave(const bf16* a, const bf16* b, int num, bf16* to) {
    for (int part = 0; part < 2; part++) {
        const int left = num - part * LANES;
        const __m256i x = first_values(a + part * LANES, left);
        const __m256i y = b ? first_values(b + part * LANES, left) : _mm256_setzero_si256();
        const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
        __m256i* out = reinterpret_cast<__m256i*>(to + part * 32);
        _mm256_storeu_si256(out, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(low, high, 0x31));
    }
}

// Packs values `begin` to `num` with dimensions as columns: panels [ceil(head_dim / 32)][most_keys][32]. `begin`: even.
template <class S>
void pack_values(const KvLayer<S>& kv, const int32_t* slots, int begin, int num, int64_t head, S* panels, int64_t most_keys = KEY_BLOCK) {
    constexpr int PAIR = Format<S>::PAIR;
    const int64_t depth = padded_depth<S>(num);
    for (int64_t first = 0; first < kv.head_dim; first += PANEL) {
        const int width = int(std::min<int64_t>(PANEL, kv.head_dim - first));
        S* panel = panels + (first / PANEL * most_keys + begin) * PANEL;
        for (int64_t key = begin; key < depth; key += PAIR, panel += PANEL * PAIR) {
            if (key >= num) {
                std::memset(panel, 0, PANEL * PAIR * sizeof(S));
                continue;
            }
            const S* a = kv.value(slots[key], head) + first;
            const S* b = PAIR == 2 && key + 1 < num ? kv.value(slots[key + 1], head) + first : nullptr;
            if constexpr (PAIR == 1) {
                std::memset(panel, 0, PANEL * sizeof(S));
                std::memcpy(panel, a, width * sizeof(S));
            } else {
                interleave(a, b, width, panel);
            }
        }
    }
}

// Prefetches the keys and values of a block while another block is processed: a few cache lines at a time, in memory order, at an
// even rate. This also triggers the hardware prefetcher, and does not fill the processor's queues, which ordinary loads need too.
template <class S>
class FetchAhead {
  public:
    explicit FetchAhead(const KvLayer<S>& kv) : kv_(kv) {}

    // Starts at key `first` of a task. About `num_steps` calls of step() prefetch the block. `task`: null if nothing is to be
    // prefetched.
    void begin(const Task* task, int first, int num_steps) {
        task_ = task;
        is_value_ = true;
        key_ = first - 1;
        last_key_ = task ? std::min(task->num_keys, first + KEY_BLOCK) - 1 : key_;
        size_ = task ? (task->end_head - task->first_head) * kv_.head_dim * int64_t(sizeof(S)) : 0;
        at_ = end_ = nullptr;
        const int64_t num_lines = (last_key_ - key_) * 2 * ((size_ + LINE - 1) / LINE);
        num_at_once_ = int((num_lines + num_steps - 1) / num_steps);
    }

    ALWAYS_INLINE void step() {
        for (int i = 0; i < num_at_once_; i++) {
            if (at_ >= end_ && !advance()) return;
            _mm_prefetch(at_, _MM_HINT_T1);
            at_ += LINE;
        }
    }

  private:
    static constexpr int64_t LINE = 64;  // bytes

    // Moves from a key to its value, or from a value to the next key. Returns false at the end.
    ALWAYS_INLINE bool advance() {
        if (is_value_ && key_ == last_key_) return false;
        key_ += is_value_;
        is_value_ = !is_value_;
        const int32_t slot = task_->slots[key_];
        at_ = reinterpret_cast<const char*>(is_value_ ? kv_.value(slot, task_->first_head) : kv_.key(slot, task_->first_head));
        end_ = at_ + size_;
        return true;
    }

    const KvLayer<S>& kv_;
    const Task* task_ = nullptr;
    int key_ = 0, last_key_ = 0, num_at_once_ = 0;
    bool is_value_ = true;  // at_ is in a value, not in a key
    int64_t size_ = 0;
    const char *at_ = nullptr, *end_ = nullptr;
};

}  // namespace agentflow
