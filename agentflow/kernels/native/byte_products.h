// Products of quantised rows with quantised panels, on the processor's products of bytes (AVX-512 VNNI).
//
// A row is quantised to 8 bits by groups, and multiplied with a panel's codes themselves: no weight is rounded again,
// and a row's result does not depend on the rows beside it. A group costs 8 products and 3 other operations of the same
// units, so 8/11 of the processor's rate is the limit (of 1,050 GOP/s of a Zen 5 core a tile reaches 760, where bfloat16
// reaches 525). Scales for more than GROUP values would cost less, but the error of the logits grew with them: 0.020 for
// groups of 32, 0.025 for 64, 0.035 for 128 on the default model.
#pragma once

#if defined(__AVX512VNNI__)

#include <vector>

#include "quantised.h"

namespace agentflow {

constexpr int MAX_BYTE_ROWS = 6;       // of a tile: 24 registers of sums, 2 of the panel
constexpr int MIN_UNPACKED_ROWS = 13;  // for which codes that lie in two places are unpacked first

// Some rows, from one of their groups on.
struct ByteRowsAt {
    const int8_t* values;
    const float *scales, *sums;
    int64_t depth, num_groups;  // of the whole rows

    ByteRowsAt after(int64_t num) const {
        return {values + num * depth, scales + num * num_groups, sums + num * num_groups * 3, depth, num_groups};
    }
};

// Rows as signed bytes, with a scale for each group. `sums`: for each group, the scaled sums of its halves and of the
// whole.
struct ByteRows {
    std::vector<int8_t> values;  // [rows][depth]
    std::vector<float> scales;   // [rows][num_groups]
    std::vector<float> sums;     // [rows][num_groups][3]
    int64_t depth = 0, num_groups = 0;

    void fit(int64_t num_rows, int64_t new_depth) {
        depth = new_depth, num_groups = depth / GROUP;
        grow(values, num_rows * depth);
        grow(scales, num_rows * num_groups);
        grow(sums, num_rows * num_groups * 3);
    }

    // Rounds each value of a row to the nearest of 255.
    template <class Row>
    void set(int64_t row, const Row* from) {
        for (int64_t g = 0; g < num_groups; g++) {
            const __m512 low = load(from + g * GROUP).v, high = load(from + g * GROUP + LANES).v;
            const float scale = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high))) / 127.0f;
            const __m512 inverse = _mm512_set1_ps(scale > 0 ? 1.0f / scale : 0.0f);
            const __m128i first = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)));
            const __m128i second = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(high, inverse)));
            const __m256i both = _mm256_set_m128i(second, first);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(values.data() + row * depth + g * GROUP), both);
            // The sums of each 8 values, as unsigned bytes: 128 more.
            const __m256i flipped = _mm256_xor_si256(both, _mm256_set1_epi8(char(0x80)));
            const __m256i eights = _mm256_sad_epu8(flipped, _mm256_setzero_si256());
            const __m256i halves = _mm256_add_epi64(eights, _mm256_unpackhi_epi64(eights, eights));
            const int first_sum = _mm256_extract_epi32(halves, 0) - 128 * GROUP / 2;
            const int second_sum = _mm256_extract_epi32(halves, 4) - 128 * GROUP / 2;
            const int64_t place = row * num_groups + g;
            scales[place] = scale;
            sums[place * 3] = scale * float(first_sum);
            sums[place * 3 + 1] = scale * float(second_sum);
            sums[place * 3 + 2] = sums[place * 3] + sums[place * 3 + 1];
        }
    }

    ByteRowsAt at(int64_t row, int64_t group) const {
        const ByteRowsAt all{values.data() + group * GROUP, scales.data() + group, sums.data() + group * 3, depth, num_groups};
        return all.after(row);
    }
};

// The rows of the product that runs; guarded by the team's lock.
inline ByteRows& byte_rows() {
    static ByteRows rows;
    return rows;
}

// A panel's codes as they are stored.
template <WeightFormat F>
struct PackedPanel {
    static constexpr int NUM_SCALES = Codes<F>::NUM_SCALES;
    const uint8_t* groups;

    template <int AT>
    ALWAYS_INLINE __m512i step(int64_t g, int half) const {
        return Codes<F>::template step<AT>(groups + g * Codes<F>::BYTES, half).v;
    }
    ALWAYS_INLINE Vec scale(int64_t g, int half, int part) const {
        return Codes<F>::scale_of(groups + g * Codes<F>::BYTES, half, part);
    }
    ALWAYS_INLINE Vec min(int64_t g, int half, int, Vec scale) const {
        return Codes<F>::min_of(groups + g * Codes<F>::BYTES, half, scale);
    }
};

// A panel's codes as bytes, unpacked once for many rows: pays where codes lie in two places.
template <int PARTS>
struct UnpackedPanel {
    static constexpr int NUM_SCALES = PARTS;
    std::vector<uint8_t> codes;       // [groups][NUM_STEPS][PANEL][STEP]
    std::vector<float> scales, mins;  // [groups][PARTS][PANEL]

    template <WeightFormat F>
    void set(const PackedPanel<F>& from, int64_t num_groups) {
        grow(codes, num_groups * GROUP * PANEL);
        grow(scales, num_groups * PARTS * PANEL);
        grow(mins, num_groups * PARTS * PANEL);
        for (int64_t g = 0; g < num_groups; g++) {
            for (int half = 0; half < 2; half++) {
                each_step<0, NUM_STEPS>([&](auto at) {
                    uint8_t* to = codes.data() + (g * NUM_STEPS + at) * PANEL * STEP + half * LANES * STEP;
                    _mm512_storeu_si512(to, from.template step<at>(g, half));
                });
                for (int part = 0; part < PARTS; part++) {
                    const Vec scale = from.scale(g, half, part);
                    store(scales.data() + (g * PARTS + part) * PANEL + half * LANES, scale);
                    store(mins.data() + (g * PARTS + part) * PANEL + half * LANES, from.min(g, half, part, scale));
                }
            }
        }
    }

    template <int AT>
    ALWAYS_INLINE __m512i step(int64_t g, int half) const {
        return _mm512_loadu_si512(codes.data() + (g * NUM_STEPS + AT) * PANEL * STEP + half * LANES * STEP);
    }
    ALWAYS_INLINE Vec scale(int64_t g, int half, int part) const {
        return load(scales.data() + (g * PARTS + part) * PANEL + half * LANES);
    }
    ALWAYS_INLINE Vec min(int64_t g, int half, int part, Vec) const {
        return load(mins.data() + (g * PARTS + part) * PANEL + half * LANES);
    }
};

// This thread's panel.
template <int PARTS>
UnpackedPanel<PARTS>& unpacked_panel() {
    static thread_local UnpackedPanel<PARTS> panel;
    return panel;
}

// out [ROWS][PANEL] = rows times `num_groups` groups of a panel, added to what is there if `adds`. Each value of a row is
// loaded once for both halves of the columns: one load for each product would be as slow as the products themselves.
template <int ROWS, class Panel>
void byte_tile(const ByteRowsAt& rows, const Panel& panel, int64_t num_groups, float* out, bool adds) {
    __m512 totals[ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        for (int half = 0; half < 2; half++) {
            totals[i][half] = adds ? _mm512_loadu_ps(out + i * PANEL + half * LANES) : _mm512_setzero_ps();
        }
    }
    for (int64_t g = 0; g < num_groups; g++) {
        each_step<0, Panel::NUM_SCALES>([&](auto part) {
            constexpr int NUM = NUM_STEPS / Panel::NUM_SCALES, BEGIN = part * NUM;
            constexpr int SUM = Panel::NUM_SCALES == 1 ? 2 : part;
            __m512i dots[ROWS][2];
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; i++) dots[i][0] = dots[i][1] = _mm512_setzero_si512();
            each_step<BEGIN, BEGIN + NUM>([&](auto at) {
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
            const Vec mins[] = {panel.min(g, 0, part, column_scales[0]), panel.min(g, 1, part, column_scales[1])};
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; i++) {
                const __m512 scale = _mm512_set1_ps(rows.scales[i * rows.num_groups + g]);
                const __m512 sum = _mm512_set1_ps(rows.sums[(i * rows.num_groups + g) * 3 + SUM]);
                for (int half = 0; half < 2; half++) {
                    const __m512 dot = _mm512_cvtepi32_ps(dots[i][half]);
                    totals[i][half] = _mm512_fmadd_ps(dot, _mm512_mul_ps(column_scales[half].v, scale), totals[i][half]);
                    totals[i][half] = _mm512_fmadd_ps(mins[half].v, sum, totals[i][half]);
                }
            }
        });
    }
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(out + i * PANEL + half * LANES, totals[i][half]);
    }
}

// Multiplies rows with `num_groups` groups of a panel, whose codes begin at `codes`. The sums of row i are at
// `sums` + i * `stride`, and are added to what is there if `adds`. Calls done(first, num, sums [num][PANEL]) after each tile.
template <WeightFormat F, class Done>
void multiply_panel(const ByteRowsAt& rows, int64_t num_rows, const uint8_t* codes, int64_t num_groups, float* sums,
                    int64_t stride, bool adds, const Done& done) {
    const PackedPanel<F> packed{codes};
    const auto each = [&](const auto& panel) {
        each_even_tile(num_rows, MAX_BYTE_ROWS, [&](int64_t first, int num) {
            float* out = sums + first * stride;
            each_step<1, MAX_BYTE_ROWS + 1>([&](auto height) {
                if (height == num) byte_tile<height>(rows.after(first), panel, num_groups, out, adds);
            });
            done(first, num, out);
        });
    };
    constexpr bool IS_SLOW = Codes<F>::UPPER_BYTES > 0;  // to unpack, for each tile again
    if (!IS_SLOW || num_rows < MIN_UNPACKED_ROWS) return each(packed);
    auto& unpacked = unpacked_panel<Codes<F>::NUM_SCALES>();
    unpacked.set(packed, num_groups);
    each(unpacked);
}

}  // namespace agentflow

#endif
