// Vectors of 16 float lanes: one AVX-512 register or two AVX2 registers, depending on the compiler's flags.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace agentflow {

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504f;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// A bfloat16 as stored in memory: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

#define ALWAYS_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)

struct Vec {
    __m512 v;
};

ALWAYS_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
ALWAYS_INLINE Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
ALWAYS_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
ALWAYS_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
ALWAYS_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
ALWAYS_INLINE float first_lane(Vec a) { return _mm512_cvtss_f32(a.v); }
ALWAYS_INLINE float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
ALWAYS_INLINE float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }

// The first n lanes of a; `other` in the remaining lanes.
ALWAYS_INLINE Vec first_lanes(Vec a, int n, float other) {
    const __mmask16 mask = n >= LANES ? 0xFFFF : n <= 0 ? 0 : (1u << n) - 1;
    return {_mm512_mask_blend_ps(mask, _mm512_set1_ps(other), a.v)};
}

// A mask with the bits of the lanes that are at least `bound`.
ALWAYS_INLINE uint32_t at_least(Vec a, Vec bound) { return _mm512_cmp_ps_mask(a.v, bound.v, _CMP_GE_OQ); }

// The lanes whose bit is set; `other` in the remaining lanes.
ALWAYS_INLINE Vec lanes_where(Vec a, uint32_t bits, float other) {
    return {_mm512_mask_blend_ps(__mmask16(bits), _mm512_set1_ps(other), a.v)};
}

ALWAYS_INLINE Vec widen(__m256i bits) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
ALWAYS_INLINE Vec load(const bf16* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Rounds to the nearest bfloat16, ties to even. NaN stays NaN.
ALWAYS_INLINE __m256i narrow(Vec a) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
#else
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7FC00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
ALWAYS_INLINE void store(bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }

// 2^x for x up to 127: a Taylor polynomial on [-1/2, 1/2], scaled. The relative error is below 2e-7, and below 5e-5 with the
// shorter polynomial, for results that are rounded to bfloat16.
template <bool IS_SHORT = false>
ALWAYS_INLINE Vec exp2(Vec x) {
    const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), x.v);  // NaN stays NaN
    const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(bounded, whole);
    __m512 p = _mm512_set1_ps(9.6181291e-3f);
    if constexpr (!IS_SHORT) {
        p = _mm512_fmadd_ps(_mm512_set1_ps(1.5403530e-4f), rest, _mm512_set1_ps(1.3333558e-3f));
        p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(9.6181291e-3f));
    }
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    return {_mm512_scalef_ps(p, whole)};
}

// a * b, rounded. The compiler cannot fuse it with an addition.
ALWAYS_INLINE Vec rounded_mul(Vec a, Vec b) {
    __m512 product = _mm512_mul_ps(a.v, b.v);
    asm("" : "+v"(product));
    return {product};
}
ALWAYS_INLINE Vec floor(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// a * 2^exponents. The exponents are integers stored as floats, and the results must be normal numbers.
ALWAYS_INLINE Vec scaled(Vec a, Vec exponents) {
    const __m512i added = _mm512_slli_epi32(_mm512_cvtps_epi32(exponents.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), added))};
}

ALWAYS_INLINE Vec load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// 64 bytes, or 16 integers.
struct Ints {
    __m512i v;
};

ALWAYS_INLINE Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
ALWAYS_INLINE Ints both(Ints a, uint8_t bits) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(char(bits)))}; }
ALWAYS_INLINE Ints either(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
// Shifts each integer: left by N bits, or right by -N.
template <int N>
ALWAYS_INLINE Ints shifted(Ints a) {
    if constexpr (N > 0) return {_mm512_slli_epi32(a.v, N)};
    if constexpr (N < 0) return {_mm512_srli_epi32(a.v, -N)};
    return a;
}
// Replaces each byte, which is below 16, with its entry in a table of 16 bytes.
ALWAYS_INLINE Ints looked_up(Ints a, const void* table) {
    const __m128i entries = _mm_loadu_si128(static_cast<const __m128i*>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), a.v)};
}
// Byte number BYTE of each integer, as a float.
template <int BYTE>
ALWAYS_INLINE Vec byte_of(Ints a) {
    return {_mm512_cvtepi32_ps(_mm512_and_si512(shifted<-8 * BYTE>(a).v, _mm512_set1_epi32(0xFF)))};
}
// Interleaves the lanes: stores a[0], b[0], a[1], b[1] and so on.
ALWAYS_INLINE void store_pairs(bf16* p, Vec a, Vec b) {
    const __m512i low = _mm512_cvtepu16_epi32(narrow(a)), high = _mm512_cvtepu16_epi32(narrow(b));
    _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

#else  // AVX2

struct Vec {
    __m256 lo, hi;
};

ALWAYS_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
ALWAYS_INLINE Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
ALWAYS_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
ALWAYS_INLINE void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
ALWAYS_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
ALWAYS_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
ALWAYS_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
ALWAYS_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
ALWAYS_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
ALWAYS_INLINE Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
ALWAYS_INLINE float first_lane(Vec a) { return _mm256_cvtss_f32(a.lo); }
ALWAYS_INLINE float sum(Vec a) {
    const __m256 all = _mm256_add_ps(a.lo, a.hi);
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
ALWAYS_INLINE float largest(Vec a) {
    const __m256 all = _mm256_max_ps(a.lo, a.hi);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

ALWAYS_INLINE Vec first_lanes(Vec a, int n, float other) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
    const __m256 hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes));
    const __m256 rest = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(rest, a.lo, lo), _mm256_blendv_ps(rest, a.hi, hi)};
}

ALWAYS_INLINE uint32_t at_least(Vec a, Vec bound) {
    const int lo = _mm256_movemask_ps(_mm256_cmp_ps(a.lo, bound.lo, _CMP_GE_OQ));
    return uint32_t(lo | _mm256_movemask_ps(_mm256_cmp_ps(a.hi, bound.hi, _CMP_GE_OQ)) << 8);
}

ALWAYS_INLINE Vec lanes_where(Vec a, uint32_t bits, float other) {
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    const __m256i all = _mm256_set1_epi32(int(bits));
    const __m256 lo = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low));
    const __m256 hi = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high));
    const __m256 rest = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(rest, a.lo, lo), _mm256_blendv_ps(rest, a.hi, hi)};
}

ALWAYS_INLINE __m256 widen_half(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
ALWAYS_INLINE Vec widen(__m256i bits) {
    return {widen_half(_mm256_castsi256_si128(bits)), widen_half(_mm256_extracti128_si256(bits, 1))};
}
ALWAYS_INLINE Vec load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

ALWAYS_INLINE __m256i rounded_half(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
    const __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    const __m256 kept = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, is_nan);
    return _mm256_srli_epi32(_mm256_castps_si256(kept), 16);
}
ALWAYS_INLINE __m256i narrow(Vec a) {
    const __m256i mixed = _mm256_packus_epi32(rounded_half(a.lo), rounded_half(a.hi));
    return _mm256_permute4x64_epi64(mixed, 0xD8);
}
ALWAYS_INLINE void store(bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }

ALWAYS_INLINE __m256 exp2_half(__m256 x) {
    const __m256 least = _mm256_set1_ps(-126.0f);
    const __m256 is_least = _mm256_cmp_ps(x, least, _CMP_LT_OQ);
    const __m256 bounded = _mm256_min_ps(_mm256_max_ps(x, least), _mm256_set1_ps(127.0f));
    const __m256 whole = _mm256_round_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 rest = _mm256_sub_ps(bounded, whole);
    __m256 p = _mm256_set1_ps(1.5403530e-4f);
    p = _mm256_fmadd_ps(p, rest, _mm256_set1_ps(1.3333558e-3f));
    p = _mm256_fmadd_ps(p, rest, _mm256_set1_ps(9.6181291e-3f));
    p = _mm256_fmadd_ps(p, rest, _mm256_set1_ps(5.5504109e-2f));
    p = _mm256_fmadd_ps(p, rest, _mm256_set1_ps(2.4022651e-1f));
    p = _mm256_fmadd_ps(p, rest, _mm256_set1_ps(6.9314718e-1f));
    p = _mm256_fmadd_ps(p, rest, _mm256_set1_ps(1.0f));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_ps(_mm256_andnot_ps(is_least, p), x, is_nan);
}
template <bool IS_SHORT = false>
ALWAYS_INLINE Vec exp2(Vec x) {
    return {exp2_half(x.lo), exp2_half(x.hi)};
}

ALWAYS_INLINE Vec rounded_mul(Vec a, Vec b) {
    Vec product = mul(a, b);
    asm("" : "+x"(product.lo), "+x"(product.hi));
    return product;
}
ALWAYS_INLINE Vec floor(Vec a) { return {_mm256_floor_ps(a.lo), _mm256_floor_ps(a.hi)}; }
ALWAYS_INLINE __m256 scaled_half(__m256 a, __m256 exponents) {
    const __m256i added = _mm256_slli_epi32(_mm256_cvtps_epi32(exponents), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), added));
}
ALWAYS_INLINE Vec scaled(Vec a, Vec exponents) {
    return {scaled_half(a.lo, exponents.lo), scaled_half(a.hi, exponents.hi)};
}

ALWAYS_INLINE Vec load_half(const uint16_t* p) {
    const __m128i* bits = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(bits)), _mm256_cvtph_ps(_mm_loadu_si128(bits + 1))};
}

struct Ints {
    __m256i lo, hi;
};

ALWAYS_INLINE Ints load_ints(const void* p) {
    const __m256i* halves = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
ALWAYS_INLINE Ints both(Ints a, uint8_t bits) {
    const __m256i all = _mm256_set1_epi8(char(bits));
    return {_mm256_and_si256(a.lo, all), _mm256_and_si256(a.hi, all)};
}
ALWAYS_INLINE Ints either(Ints a, Ints b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N>
ALWAYS_INLINE Ints shifted(Ints a) {
    if constexpr (N > 0) return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
    if constexpr (N < 0) return {_mm256_srli_epi32(a.lo, -N), _mm256_srli_epi32(a.hi, -N)};
    return a;
}
ALWAYS_INLINE Ints looked_up(Ints a, const void* table) {
    const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(entries, a.lo), _mm256_shuffle_epi8(entries, a.hi)};
}
template <int BYTE>
ALWAYS_INLINE Vec byte_of(Ints a) {
    const __m256i lowest = _mm256_set1_epi32(0xFF);
    const Ints moved = shifted<-8 * BYTE>(a);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(moved.lo, lowest)),
            _mm256_cvtepi32_ps(_mm256_and_si256(moved.hi, lowest))};
}
ALWAYS_INLINE __m256i pairs_of_half(__m256 a, __m256 b) {
    return _mm256_or_si256(rounded_half(a), _mm256_slli_epi32(rounded_half(b), 16));
}
ALWAYS_INLINE void store_pairs(bf16* p, Vec a, Vec b) {
    __m256i* halves = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(halves, pairs_of_half(a.lo, b.lo));
    _mm256_storeu_si256(halves + 1, pairs_of_half(a.hi, b.hi));
}

#endif

// Rounds a value to S, and returns it as a float.
template <class S>
ALWAYS_INLINE Vec rounded(Vec a);
template <>
ALWAYS_INLINE Vec rounded<float>(Vec a) { return a; }
template <>
ALWAYS_INLINE Vec rounded<bf16>(Vec a) { return widen(narrow(a)); }

// Loads n values, with zeros in the remaining lanes; stores the first n lanes.
template <class S>
ALWAYS_INLINE Vec load_first(const S* p, int n) {
    if (n >= LANES) return load(p);
    S held[LANES] = {};
    std::memcpy(held, p, n * sizeof(S));
    return load(held);
}
template <class S>
ALWAYS_INLINE void store_first(S* p, Vec a, int n) {
    if (n >= LANES) return store(p, a);
    S held[LANES];
    store(held, a);
    std::memcpy(p, held, n * sizeof(S));
}

// tanh(x) = 1 - 2 / (e^(2x) + 1), with an absolute error below 3e-7.
ALWAYS_INLINE Vec tanh(Vec x) {
    const Vec bounded = max(broadcast(-20.0f), sub(zero(), max(broadcast(-20.0f), sub(zero(), x))));  // NaN stays NaN
    const Vec power = exp2(mul(bounded, broadcast(2 * LOG2_E)));
    return sub(broadcast(1.0f), div(broadcast(2.0f), add(power, broadcast(1.0f))));
}

// cap * tanh(x * scale / cap).
ALWAYS_INLINE Vec capped(Vec x, float scale, float cap) {
    return mul(tanh(mul(x, broadcast(scale / cap))), broadcast(cap));
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T>
constexpr T round_up(T size, T step) {
    return (size + step - 1) / step * step;
}

}  // namespace agentflow
