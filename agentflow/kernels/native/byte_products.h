// Products of quantised rows with quantised panels, on the processor's products of bytes (AVX-512 VNNI).
//
// A row is quantised to 8 bits by groups, and multiplied with a panel's codes themselves: no weight is rounded again,
// and a row's result does not depend on the rows beside it. Scales for more than GROUP values would cost less (of 473
// GOP/s of a Zen 4 core this reaches 300, blocks of 128 values 400), but the error of the logits grew with them: 0.020
// for groups of 32, 0.025 for 64, 0.035 for 128 on the default model.
#pragma once

#if defined(__AVX512VNNI__)

#include <vector>

#include "quantised.h"

namespace agentflow {

constexpr int MAX_BYTE_ROWS = 12;  // of a tile

// Rows as signed bytes, with a scale for each group. `sums`: for each group, the scaled sums of its halves and of the
// whole.
struct ByteRows {
    std::vector<int8_t> values;  // [rows][depth]
    std::vector<float> scales;   // [rows][num_groups]
    std::vector<float> sums;     // [rows][num_groups][3]
    int64_t depth = 0, num_groups = 0;

    void fit(int64_t num_rows, int64_t new_depth) {
        depth = new_depth, num_groups = depth / GROUP;
        num_rows += MAX_BYTE_ROWS;  // which tiles may read
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
            const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse));
            const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
            __m128i* to = reinterpret_cast<__m128i*>(values.data() + row * depth + g * GROUP);
            _mm_storeu_si128(to, _mm512_cvtepi32_epi8(first));
            _mm_storeu_si128(to + 1, _mm512_cvtepi32_epi8(second));
            const int64_t place = row * num_groups + g;
            scales[place] = scale;
            sums[place * 3] = scale * float(_mm512_reduce_add_epi32(first));
            sums[place * 3 + 1] = scale * float(_mm512_reduce_add_epi32(second));
            sums[place * 3 + 2] = sums[place * 3] + sums[place * 3 + 1];
        }
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

// out [ROWS][PANEL] = rows first to first + ROWS times a panel.
template <int ROWS, class Panel>
void byte_tile(const ByteRows& rows, int64_t first, const Panel& panel, float* out) {
    const int8_t* values = rows.values.data() + first * rows.depth;
    const float* scales = rows.scales.data() + first * rows.num_groups;
    const float* sums = rows.sums.data() + first * rows.num_groups * 3;
    for (int half = 0; half < 2; half++) {
        __m512 totals[ROWS];
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) totals[i] = _mm512_setzero_ps();
        for (int64_t g = 0; g < rows.num_groups; g++) {
            each_step<0, Panel::NUM_SCALES>([&](auto part) {
                constexpr int NUM = NUM_STEPS / Panel::NUM_SCALES, BEGIN = part * NUM;
                constexpr int SUM = Panel::NUM_SCALES == 1 ? 2 : part;
                __m512i dots[ROWS];
#pragma GCC unroll 12
                for (int i = 0; i < ROWS; i++) dots[i] = _mm512_setzero_si512();
                each_step<BEGIN, BEGIN + NUM>([&](auto at) {
                    const __m512i columns = panel.template step<at>(g, half);
#pragma GCC unroll 12
                    for (int i = 0; i < ROWS; i++) {
                        int32_t bits;
                        std::memcpy(&bits, values + i * rows.depth + g * GROUP + at * STEP, sizeof bits);
                        dots[i] = _mm512_dpbusd_epi32(dots[i], columns, _mm512_set1_epi32(bits));
                    }
                });
                const Vec scale = panel.scale(g, half, part), min = panel.min(g, half, part, scale);
#pragma GCC unroll 12
                for (int i = 0; i < ROWS; i++) {
                    const __m512 weight = _mm512_mul_ps(scale.v, _mm512_set1_ps(scales[i * rows.num_groups + g]));
                    const __m512 sum = _mm512_set1_ps(sums[(i * rows.num_groups + g) * 3 + SUM]);
                    totals[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[i]), weight, totals[i]);
                    totals[i] = _mm512_fmadd_ps(min.v, sum, totals[i]);
                }
            });
        }
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) _mm512_storeu_ps(out + i * PANEL + half * LANES, totals[i]);
    }
}

// The same for any number of rows up to MAX_BYTE_ROWS. It may compute some rows more, so that fewer heights are compiled.
template <class Panel>
void byte_tile_of(int num_rows, const ByteRows& rows, int64_t first, const Panel& panel, float* out) {
    if (num_rows == 1) return byte_tile<1>(rows, first, panel, out);
    if (num_rows == 2) return byte_tile<2>(rows, first, panel, out);
    if (num_rows <= 4) return byte_tile<4>(rows, first, panel, out);
    if (num_rows <= 6) return byte_tile<6>(rows, first, panel, out);
    if (num_rows <= 8) return byte_tile<8>(rows, first, panel, out);
    if (num_rows <= 10) return byte_tile<10>(rows, first, panel, out);
    if (num_rows == 11) return byte_tile<11>(rows, first, panel, out);
    byte_tile<MAX_BYTE_ROWS>(rows, first, panel, out);
}

// Calls put(first, num, sums [num][PANEL]) for each tile of rows `begin` to `begin` + `num_rows` times a panel.
template <WeightFormat F, class Put>
void multiply_panel(const ByteRows& rows, int64_t begin, int64_t num_rows, const uint8_t* codes, const Put& put) {
    alignas(64) float sums[MAX_BYTE_ROWS * PANEL];
    const PackedPanel<F> packed{codes};
    const auto each = [&](const auto& panel) {
        each_even_tile(num_rows, MAX_BYTE_ROWS, [&](int64_t at, int num) {
            byte_tile_of(num, rows, begin + at, panel, sums);
            put(begin + at, num, sums);
        });
    };
    constexpr bool IS_SLOW = Codes<F>::UPPER_BYTES > 0;  // to unpack, for each tile again
    if (!IS_SLOW || num_rows <= MAX_BYTE_ROWS) return each(packed);
    auto& unpacked = unpacked_panel<Codes<F>::NUM_SCALES>();
    unpacked.set(packed, rows.num_groups);
    each(unpacked);
}

}  // namespace agentflow

#endif
