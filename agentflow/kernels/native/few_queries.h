// Attention for few queries, for which packing keys and values would cost more than it saves: scores and sums are computed
// directly from the pool. Needs bfloat16 instructions, and heads with a multiple of 64 dimensions.
#pragma once

#include "product.h"

namespace agentflow {

#if defined(__AVX512F__)

// Transposes 16 words (pairs of dimensions) of 16 keys. Afterwards, r[j] holds word j of each key.
ALWAYS_INLINE void turn(__m512i (&r)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // r[4 * n + i]: columns i, i + 4, ... of rows 4 n to 4 n + 3
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
    }
}

#endif

#if defined(__AVX512BF16__)

constexpr int MOST_FEW_QUERIES = 4;  // their sums over 64 dimensions fit into registers

// Writes the scores of query i with 16 keys to scores[i] [16], for heads of 32 * num_chunks dimensions. `stride`: the values
// between the starts of two queries. Calls step() after every 4 loads, like add_few.
template <int QUERIES, class Step>
void score_few(const bf16* queries, int64_t stride, int num_chunks, const bf16* const (&keys)[LANES], Vec (&scores)[QUERIES], const Step& step) {
    __m512 sums[QUERIES];  // in the order in which `tile` adds
#pragma GCC unroll 4
    for (int i = 0; i < QUERIES; i++) sums[i] = _mm512_setzero_ps();
    for (int chunk = 0; chunk < num_chunks; chunk++) {
        __m512i words[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            if (j % 4 == 0) step();
            words[j] = _mm512_loadu_si512(keys[j] + chunk * 32);
        }
        turn(words);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
#pragma GCC unroll 4
            for (int i = 0; i < QUERIES; i++) {
                const __m512bh value = pair_of(queries + i * stride + chunk * 32 + 2 * j);
                sums[i] = _mm512_dpbf16_ps(sums[i], value, reinterpret_cast<__m512bh>(words[j]));
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < QUERIES; i++) scores[i].v = sums[i];
}

// sums[i] [64] = the weighted sum of 64 dimensions of the values. The weight of a key for query i is
// weights[i * weight_stride + key]; value(key) returns a pointer to the value of a key.
template <int QUERIES, class Value, class Step>
void add_few(const bf16* weights, int64_t weight_stride, int num, const Value& value, float* sums,
             int64_t sums_stride, const Step& step) {
    constexpr int CHUNKS = 2;  // of 32 dimensions
    __m512 parts[QUERIES][CHUNKS][2];
#pragma GCC unroll 4
    for (int i = 0; i < QUERIES; i++) {
#pragma GCC unroll 2
        for (int c = 0; c < CHUNKS; c++) parts[i][c][0] = parts[i][c][1] = _mm512_setzero_ps();
    }
    for (int key = 0; key < num; key += 2) {
        const bf16* a = value(key);
        const bf16* b = key + 1 < num ? value(key + 1) : a;  // an odd last key: b's weight is 0
        step();
#pragma GCC unroll 2
        for (int c = 0; c < CHUNKS; c++) {
            const __m512i x = _mm512_loadu_si512(a + 32 * c), y = _mm512_loadu_si512(b + 32 * c);
            const __m512bh low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(x, y));
            const __m512bh high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(x, y));
#pragma GCC unroll 4
            for (int i = 0; i < QUERIES; i++) {
                const __m512bh weight = pair_of(weights + i * weight_stride + key);
                parts[i][c][0] = _mm512_dpbf16_ps(parts[i][c][0], weight, low);
                parts[i][c][1] = _mm512_dpbf16_ps(parts[i][c][1], weight, high);
            }
        }
    }
    // Of every 8 dimensions, the low part has the first 4, the high part the last 4.
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int i = 0; i < QUERIES; i++) {
#pragma GCC unroll 2
        for (int c = 0; c < CHUNKS; c++) {
            float* to = sums + i * sums_stride + 32 * c;
            store(to, Vec{_mm512_permutex2var_ps(parts[i][c][0], first, parts[i][c][1])});
            store(to + LANES, Vec{_mm512_permutex2var_ps(parts[i][c][0], second, parts[i][c][1])});
        }
    }
}

#endif

}  // namespace agentflow
