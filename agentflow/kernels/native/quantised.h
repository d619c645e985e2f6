// Quantised weights: panels of integer codes, with a scale for each column and group of values along the depth.
//
// A panel is a sequence of groups of GROUP values for PANEL columns. A value is `scale * code + min`; the formats
// without stored minimums have `min = -OFFSET * scale`. Four bytes of a column, adjacent along the depth, are stored together:
// a *step*, as the processor's byte products (VNNI) expect. A group contains
//
//   - codes: for each half of the columns and every two steps, 64 bytes, with the lower 4 bits for the first step and the
//     upper 4 bits for the second; with 8 bits, 64 bytes for each step
//   - upper bits of codes of 5 or 6 bits: for each half of the columns, 64 bytes with one bit for each step, or 128 bytes
//     with two bits
//   - scales as float16 [NUM_SCALES][PANEL], then minimums [PANEL] if they are stored
//
// With VNNI, rows are quantised too (byte_products.h). Without VNNI, for floats, and for many rows with AMX, a panel is
// converted to the type of the rows, once for each block of rows.
#pragma once

#include <stdexcept>
#include <string>

#include "product.h"

namespace agentflow {

// In the order of PANEL_FORMATS in native_ops/structures.py.
enum WeightFormat : int64_t { DENSE, INT4, INT4_MIN, INT4_TABLE, INT5, INT5_MIN, INT6, INT8 };

constexpr int GROUP = 32, STEP = 4, NUM_STEPS = GROUP / STEP;

// The values of IQ4_NL's codes, plus 128.
alignas(16) constexpr uint8_t TABLE[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

template <WeightFormat F>
struct Codes {
    static constexpr int BITS = F == INT8 ? 8 : F == INT6 ? 6 : F == INT5 || F == INT5_MIN ? 5 : 4;
    static constexpr bool HAS_MINS = F == INT4_MIN || F == INT5_MIN;
    static constexpr int OFFSET = F == INT4_TABLE ? 128 : 1 << (BITS - 1);
    static constexpr int NUM_SCALES = F == INT6 ? 2 : 1;
    static constexpr int HALF_BYTES = BITS == 8 ? NUM_STEPS * 64 : NUM_STEPS / 2 * 64;
    static constexpr int UPPER_BYTES = BITS == 5 ? 64 : BITS == 6 ? 128 : 0;  // for a half of the columns
    static constexpr int SCALES_AT = 2 * (HALF_BYTES + UPPER_BYTES);
    static constexpr int MINS_AT = SCALES_AT + NUM_SCALES * PANEL * 2;
    static constexpr int BYTES = MINS_AT + (HAS_MINS ? PANEL * 2 : 0);

    // The bytes of one step: for each of 16 columns, 4 codes that are adjacent along the depth.
    template <int AT>
    static ALWAYS_INLINE Ints step(const uint8_t* group, int half) {
        if constexpr (BITS == 8) return load_ints(group + half * HALF_BYTES + AT * 64);
        Ints codes = load_ints(group + half * HALF_BYTES + AT / 2 * 64);
        codes = both(shifted<AT % 2 ? -4 : 0>(codes), 0x0F);
        const uint8_t* upper = group + 2 * HALF_BYTES + half * UPPER_BYTES;
        if constexpr (BITS == 5) codes = either(codes, both(shifted<4 - AT>(load_ints(upper)), 0x10));
        if constexpr (BITS == 6) {
            codes = either(codes, both(shifted<4 - AT % 4 * 2>(load_ints(upper + AT / 4 * 64)), 0x30));
        }
        if constexpr (F == INT4_TABLE) codes = looked_up(codes, TABLE);
        return codes;
    }

    static void put(uint8_t* group, int column, int k, uint8_t code) {
        const int half = column / LANES, at = k / STEP, place = column % LANES * STEP + k % STEP;
        if constexpr (BITS == 8) {
            group[half * HALF_BYTES + at * 64 + place] = code;
            return;
        }
        group[half * HALF_BYTES + at / 2 * 64 + place] |= uint8_t((code & 0x0F) << at % 2 * 4);
        uint8_t* upper = group + 2 * HALF_BYTES + half * UPPER_BYTES + place;
        if constexpr (BITS == 5) *upper |= uint8_t(code >> 4 << at);
        if constexpr (BITS == 6) upper[at / 4 * 64] |= uint8_t(code >> 4 << at % 4 * 2);
    }

    static int get(const uint8_t* group, int column, int k) {
        const int half = column / LANES, at = k / STEP, place = column % LANES * STEP + k % STEP;
        if constexpr (BITS == 8) return group[half * HALF_BYTES + at * 64 + place];
        const int lower = group[half * HALF_BYTES + at / 2 * 64 + place] >> at % 2 * 4 & 0x0F;
        const uint8_t* upper = group + 2 * HALF_BYTES + half * UPPER_BYTES + place;
        if constexpr (F == INT4_TABLE) return TABLE[lower];
        if constexpr (BITS == 5) return lower | (*upper >> at & 1) << 4;
        if constexpr (BITS == 6) return lower | (upper[at / 4 * 64] >> at % 4 * 2 & 3) << 4;
        return lower;
    }

    static uint16_t* scales(uint8_t* group) { return reinterpret_cast<uint16_t*>(group + SCALES_AT); }
    static const uint16_t* scales(const uint8_t* group) { return reinterpret_cast<const uint16_t*>(group + SCALES_AT); }

    static ALWAYS_INLINE Vec scale_of(const uint8_t* group, int half, int part) {
        return load_half(scales(group) + part * PANEL + half * LANES);
    }
    static ALWAYS_INLINE Vec min_of(const uint8_t* group, int half, Vec scale) {
        if constexpr (HAS_MINS) return load_half(scales(group) + NUM_SCALES * PANEL + half * LANES);
        return mul(scale, broadcast(-float(OFFSET)));
    }
};

// Calls body with the format as a constant.
template <class Body>
auto with_format(int64_t format, const Body& body) {
    switch (format) {
        case INT4: return body(std::integral_constant<WeightFormat, INT4>{});
        case INT4_MIN: return body(std::integral_constant<WeightFormat, INT4_MIN>{});
        case INT4_TABLE: return body(std::integral_constant<WeightFormat, INT4_TABLE>{});
        case INT5: return body(std::integral_constant<WeightFormat, INT5>{});
        case INT5_MIN: return body(std::integral_constant<WeightFormat, INT5_MIN>{});
        case INT6: return body(std::integral_constant<WeightFormat, INT6>{});
        case INT8: return body(std::integral_constant<WeightFormat, INT8>{});
        default: throw std::invalid_argument("there is no format " + std::to_string(format) + " of weights");
    }
}

inline int64_t group_bytes(int64_t format) {
    return with_format(format, [](auto f) -> int64_t { return Codes<decltype(f)::value>::BYTES; });
}

// Calls body with the number of each step from BEGIN to END (exclusive), as a constant.
template <int BEGIN, int END, class Body>
ALWAYS_INLINE void each_step(const Body& body) {
    if constexpr (BEGIN < END) {
        body(std::integral_constant<int, BEGIN>{});
        each_step<BEGIN + 1, END>(body);
    }
}

ALWAYS_INLINE void store_depths(float* out, int64_t k, int half, Vec a, Vec b) {
    store(out + k * PANEL + half * LANES, a);
    store(out + (k + 1) * PANEL + half * LANES, b);
}
ALWAYS_INLINE void store_depths(bf16* out, int64_t k, int half, Vec a, Vec b) {
    store_pairs(out + k * PANEL + half * 2 * LANES, a, b);
}

// Converts a panel to a dense one of depth num_groups * GROUP.
template <class S, WeightFormat F>
void widen_panel(const uint8_t* panel, int64_t num_groups, S* out) {
    using C = Codes<F>;
    for (int64_t g = 0; g < num_groups; g++) {
        const uint8_t* group = panel + g * C::BYTES;
        for (int half = 0; half < 2; half++) {
            each_step<0, NUM_STEPS>([&](auto at) {
                const Vec scale = C::scale_of(group, half, at * C::NUM_SCALES / NUM_STEPS);
                const Vec min = C::min_of(group, half, scale);
                const Ints codes = C::template step<at>(group, half);
                const int64_t k = g * GROUP + at * STEP;
                store_depths(out, k, half, fma(byte_of<0>(codes), scale, min), fma(byte_of<1>(codes), scale, min));
                store_depths(out, k + 2, half, fma(byte_of<2>(codes), scale, min), fma(byte_of<3>(codes), scale, min));
            });
        }
    }
}

// Column n of a panel, as floats [num_groups * GROUP].
template <WeightFormat F>
void widen_column(const uint8_t* panel, int64_t num_groups, int column, float* out) {
    using C = Codes<F>;
    const auto half_of = [](uint16_t bits) { return _cvtsh_ss(bits); };
    for (int64_t g = 0; g < num_groups; g++) {
        const uint8_t* group = panel + g * C::BYTES;
        for (int k = 0; k < GROUP; k++) {
            const float scale = half_of(C::scales(group)[k * C::NUM_SCALES / GROUP * PANEL + column]);
            const float min = C::HAS_MINS ? half_of(C::scales(group)[C::NUM_SCALES * PANEL + column]) : -C::OFFSET * scale;
            out[g * GROUP + k] = std::fma(float(C::get(group, column, k)), scale, min);
        }
    }
}

}  // namespace agentflow
