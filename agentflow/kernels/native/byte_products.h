// Products of quantised rows with quantised panels, with the processor's byte products (AVX-512 VNNI).
//
// A row is quantised to 8 bits by groups, and multiplied directly with a panel's codes: no weight is rounded again, and a row's
// result does not depend on the other rows. With minimums, a group costs 8 products and 3 other operations in the same execution
// units, so the limit is 8/11 of the processor's rate (of the 1,050 GOP/s of a Zen 5 core, a tile reaches 760; bfloat16 reaches
// 525). Without minimums, it costs 8 products and 2 other operations. Scales for more than GROUP values would cost less, but the
// error of the logits grew with the size: 0.020 for groups of 32, 0.025 for 64, 0.035 for 128 on the default model.
#pragma once

#if defined(__AVX512VNNI__)

#include <bit>
#include <vector>

#include "quantised.h"

namespace agentflow {

constexpr int MAX_BYTE_ROWS = 6;       // the rows of a tile: 24 registers of sums, 2 of the panel
constexpr int MIN_UNPACKED_ROWS = 13;  // from this number of rows on, codes that are stored in two places are unpacked first

// A group of a row: value k is about scale * q[k].
struct RowGroup {
    float scale, sum;  // `sum`: the sum of the values
    int32_t negative_sums[3];  // the negated sums of q over each half, and over the whole group
};

// Pointers into ByteRows: some rows, from a group on.
struct ByteRowsAt {
    const int8_t* values;
    const RowGroup* groups;
    int64_t depth, num_groups;  // the sizes of a complete row, which are the strides

    ByteRowsAt after(int64_t num) const { return {values + num * depth, groups + num * num_groups, depth, num_groups}; }
};

// Rows as signed bytes.
struct ByteRows {
    std::vector<int8_t> values;    // [rows][depth]
    std::vector<RowGroup> groups;  // [rows][num_groups]
    int64_t depth = 0, num_groups = 0;

    void fit(int64_t num_rows, int64_t new_depth) {
        depth = new_depth, num_groups = depth / GROUP;
        grow(values, num_rows * depth);
        grow(groups, num_rows * num_groups);
    }

    // Rounds each value of a row to the nearest of 255 values. The scale of a group with NaN or infinity is not finite either.
    template <class Row>
    void set(int64_t row, const Row* from) {
        for (int64_t g = 0; g < num_groups; g++) {
            const __m512 low = load(from + g * GROUP).v, high = load(from + g * GROUP + LANES).v;
            // As integers, absolute values have the same order, and NaN is the largest; maximums of floats drop it.
            const __m512i sizes = _mm512_max_epi32(_mm512_castps_si512(_mm512_abs_ps(low)), _mm512_castps_si512(_mm512_abs_ps(high)));
            const float scale = std::bit_cast<float>(_mm512_reduce_max_epi32(sizes)) / 127.0f;
            const __m512 inverse = _mm512_set1_ps(scale > 0 ? 1.0f / scale : 0.0f);
            const __m128i first = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)));
            const __m128i second = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse)));
            const __m256i both = _mm256_set_m128i(second, first);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(values.data() + row * depth + g * GROUP), both);
            // The sums of every 8 values as unsigned bytes, which are 128 higher.
            const __m256i flipped = _mm256_xor_si256(both, _mm256_set1_epi8(char(0x80)));
            const __m256i eights = _mm256_sad_epu8(flipped, _mm256_setzero_si256());
            const __m256i halves = _mm256_add_epi64(eights, _mm256_unpackhi_epi64(eights, eights));
            const int first_sum = 128 * GROUP / 2 - _mm256_extract_epi32(halves, 0);
            const int second_sum = 128 * GROUP / 2 - _mm256_extract_epi32(halves, 4);
            const int sum = first_sum + second_sum;
            groups[row * num_groups + g] = {scale, -scale * float(sum), {first_sum, second_sum, sum}};
        }
    }

    ByteRowsAt at(int64_t row, int64_t group) const {
        return ByteRowsAt{values.data() + group * GROUP, groups.data() + group, depth, num_groups}.after(row);
    }
};

// The rows of the product that is running; guarded by the team's lock.
inline ByteRows& byte_rows() {
    static ByteRows* const rows = new ByteRows;  // never destroyed, like the team
    return *rows;
}

// A panel's groups in their stored form.
template <WeightFormat F>
struct PackedPanel {
    using C = Codes<F>;
    const uint8_t* groups;

    template <int AT>
    ALWAYS_INLINE __m512i step(int64_t g, int half) const {
        return C::template step<AT>(groups + g * C::BYTES, half).v;
    }
    ALWAYS_INLINE Vec scale(int64_t g, int half, int part) const { return C::scale_of(groups + g * C::BYTES, half, part); }
    ALWAYS_INLINE Vec min(int64_t g, int half) const { return C::min_of(groups + g * C::BYTES, half, zero()); }
};

// A panel whose codes are unpacked once for many rows. This is faster if codes are stored in two places.
template <WeightFormat F>
struct UnpackedPanel : PackedPanel<F> {
    const uint8_t* codes;  // [groups][NUM_STEPS][PANEL][STEP]

    // The codes are in this thread's memory, one panel at a time.
    static UnpackedPanel of(const PackedPanel<F>& packed, int64_t num_groups) {
        static thread_local std::vector<uint8_t> codes;
        grow(codes, num_groups * GROUP * PANEL);
        for (int64_t g = 0; g < num_groups; g++) {
            for (int half = 0; half < 2; half++) {
                each_step<0, NUM_STEPS>([&](auto at) {
                    uint8_t* to = codes.data() + (g * NUM_STEPS + at) * PANEL * STEP + half * LANES * STEP;
                    _mm512_storeu_si512(to, packed.template step<at>(g, half));
                });
            }
        }
        return {packed, codes.data()};
    }

    template <int AT>
    ALWAYS_INLINE __m512i step(int64_t g, int half) const {
        return _mm512_loadu_si512(codes + (g * NUM_STEPS + AT) * PANEL * STEP + half * LANES * STEP);
    }
};

// Computes out [ROWS][PANEL] = rows times `num_groups` groups of a panel, or += if `adds`. Loads each value of a row once for both
// halves of the columns: a load for each product would be as slow as the products.
template <WeightFormat F, int ROWS, class Panel>
void byte_tile(const ByteRowsAt& rows, const Panel& panel, int64_t num_groups, float* out, bool adds, Prefetch to) {
    using C = Codes<F>;
    constexpr int OFFSET_BITS = __builtin_ctz(C::OFFSET);
    __m512 totals[ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        for (int half = 0; half < 2; half++) {
            totals[i][half] = adds ? _mm512_loadu_ps(out + i * PANEL + half * LANES) : _mm512_setzero_ps();
        }
    }
    for (int64_t g = 0; g < num_groups; g++) {
        each_step<0, C::NUM_SCALES>([&](auto part) {
            constexpr int NUM = NUM_STEPS / C::NUM_SCALES, BEGIN = part * NUM;
            constexpr int SUM = C::NUM_SCALES == 1 ? 2 : part;
            __m512i dots[ROWS][2];
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; i++) {
                // Formats without minimums subtract an offset from each code: the sums start at -offset times the row's sum.
                const __m512i less = _mm512_set1_epi32(rows.groups[i * rows.num_groups + g].negative_sums[SUM]);
                dots[i][0] = dots[i][1] = C::HAS_MINS ? _mm512_setzero_si512() : _mm512_slli_epi32(less, OFFSET_BITS);
            }
            each_step<BEGIN, BEGIN + NUM>([&](auto at) {
                prefetch_ahead<C::BYTES, at, NUM_STEPS>(panel.groups + g * C::BYTES, to);
                const __m512i columns[] = {panel.template step<at>(g, 0), panel.template step<at>(g, 1)};
#pragma GCC unroll 6
                for (int i = 0; i < ROWS; i++) {
                    int32_t bits;
                    std::memcpy(&bits, rows.values + i * rows.depth + g * GROUP + at * STEP, sizeof bits);
                    const __m512i value = _mm512_set1_epi32(bits);
                    for (int half = 0; half < 2; half++) {
                        dots[i][half] = _mm512_dpbusd_epi32(dots[i][half], columns[half], value);
                    }
                }
            });
            const Vec column_scales[] = {panel.scale(g, 0, part), panel.scale(g, 1, part)};
            const Vec mins[] = {panel.min(g, 0), panel.min(g, 1)};
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; i++) {
                const RowGroup& row = rows.groups[i * rows.num_groups + g];
                const __m512 scale = _mm512_set1_ps(row.scale), sum = _mm512_set1_ps(row.sum);
                for (int half = 0; half < 2; half++) {
                    const __m512 dot = _mm512_cvtepi32_ps(dots[i][half]);
                    totals[i][half] = _mm512_fmadd_ps(dot, _mm512_mul_ps(column_scales[half].v, scale), totals[i][half]);
                    if (C::HAS_MINS) totals[i][half] = _mm512_fmadd_ps(mins[half].v, sum, totals[i][half]);
                }
            }
        });
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(out + i * PANEL + half * LANES, totals[i][half]);
    }
}

// Multiplies rows with `num_groups` groups of a panel, whose codes start at `codes`. Writes the sums of row i to
// `sums` + i * `stride`, or adds them if `adds`. Calls done(first, num, sums [num][PANEL]) after each tile.
template <WeightFormat F, class Done>
void multiply_panel(const ByteRowsAt& rows, int64_t num_rows, const uint8_t* codes, int64_t num_groups, float* sums,
                    int64_t stride, bool adds, const Done& done) {
    const PackedPanel<F> packed{codes};
    // Panels of 8 bits need so few instructions that one core reads at its full rate only into the second cache.
    const Prefetch ahead = Codes<F>::BITS == 8 ? Prefetch::TO_SECOND_CACHE : prefetch_for(num_rows);
    const auto each = [&](const auto& panel) {
        each_even_tile(num_rows, MAX_BYTE_ROWS, [&](int64_t first, int num) {
            float* out = sums + first * stride;
            const Prefetch to = first == 0 ? ahead : Prefetch::NOTHING;  // the later tiles read the panel from a cache
            each_step<1, MAX_BYTE_ROWS + 1>([&](auto height) {
                if (height == num) byte_tile<F, height>(rows.after(first), panel, num_groups, out, adds, to);
            });
            done(first, num, out);
        });
    };
    constexpr bool IS_SLOW = Codes<F>::UPPER_BYTES > 0;  // unpacking the codes again for each tile is slow
    if (!IS_SLOW || num_rows < MIN_UNPACKED_ROWS) return each(packed);
    each(UnpackedPanel<F>::of(packed, num_groups));
}

}  // namespace agentflow

#endif
