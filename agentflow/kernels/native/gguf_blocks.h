// Unpacks blocks of quantised values in GGUF files (ggml's formats) to codes, scales and minimums.
#pragma once

#include <cstring>

#include "quantised.h"

namespace agentflow {

// In the order of BLOCK_TYPES in native_ops/structures.py.
enum BlockType : int64_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL };

// GROUP values of a row: `scale * code + min`.
struct Unpacked {
    uint8_t codes[GROUP];
    float scales[2], min;  // `scales`: the scale of each half; they differ only in Q6_K
};

inline float half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return _cvtsh_ss(bits);
}

// The bytes of a block, the number of its groups, and the panel format for it.
struct BlockShape {
    int64_t bytes, num_groups;
    WeightFormat format;
};

inline BlockShape block_shape(int64_t type) {
    switch (type) {
        case Q4_0: return {18, 1, INT4};
        case Q4_1: return {20, 1, INT4_MIN};
        case Q5_0: return {22, 1, INT5};
        case Q5_1: return {24, 1, INT5_MIN};
        case Q8_0: return {34, 1, INT8};
        case Q4_K: return {144, 8, INT4_MIN};
        case Q5_K: return {176, 8, INT5_MIN};
        case Q6_K: return {210, 8, INT6};
        case IQ4_NL: return {18, 1, INT4_TABLE};
        default: throw std::invalid_argument("there is no type " + std::to_string(type) + " of blocks");
    }
}

// The lower 4 bits of 16 bytes, then the upper 4 bits.
inline void unpack_nibbles(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < GROUP / 2; i++) {
        codes[i] = from[i] & 0x0F;
        codes[i + GROUP / 2] = from[i] >> 4;
    }
}

// The 6-bit scale and minimum of group g of a K block: 12 bytes hold 8 of each.
inline void scale_and_min(const uint8_t* packed, int g, int& scale, int& min) {
    if (g < 4) {
        scale = packed[g] & 63;
        min = packed[g + 4] & 63;
    } else {
        scale = (packed[g + 4] & 0x0F) | packed[g - 4] >> 6 << 4;
        min = packed[g + 4] >> 4 | packed[g] >> 6 << 4;
    }
}

// Unpacks group g of a block.
inline void unpack(int64_t type, const uint8_t* block, int g, Unpacked& out) {
    out.scales[0] = out.scales[1] = half_at(block);
    out.min = 0;
    switch (type) {
        case Q4_0:
        case IQ4_NL: unpack_nibbles(block + 2, out.codes); return;
        case Q4_1:
            out.min = half_at(block + 2);
            unpack_nibbles(block + 4, out.codes);
            return;
        case Q5_0:
        case Q5_1: {
            const uint8_t* upper = block + (type == Q5_1 ? 4 : 2);
            if (type == Q5_1) out.min = half_at(block + 2);
            unpack_nibbles(upper + 4, out.codes);
            for (int i = 0; i < GROUP; i++) out.codes[i] |= (upper[i / 8] >> i % 8 & 1) << 4;
            return;
        }
        case Q8_0:
            for (int i = 0; i < GROUP; i++) out.codes[i] = block[2 + i] ^ 0x80;
            return;
        case Q4_K:
        case Q5_K: {
            int scale, min;
            scale_and_min(block + 4, g, scale, min);
            out.scales[0] = half_at(block) * float(scale);
            out.min = -half_at(block + 2) * float(min);
            const uint8_t* upper = block + 16;
            const uint8_t* lower = (type == Q5_K ? upper + 32 : upper) + g / 2 * GROUP;
            for (int i = 0; i < GROUP; i++) {
                out.codes[i] = lower[i] >> g % 2 * 4 & 0x0F;
                if (type == Q5_K) out.codes[i] |= (upper[i] >> g & 1) << 4;
            }
            return;
        }
        case Q6_K: {
            // Two halves of 4 groups; group q of a half has its lower bits in 32 of 64 bytes, and bits 2 q of 32 bytes.
            const int half = g / 4, q = g % 4;
            const uint8_t* lower = block + half * 64 + q % 2 * GROUP;
            const uint8_t* upper = block + 128 + half * 32;
            const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + g * 2;
            const float scale = half_at(block + 208);
            for (int i = 0; i < 2; i++) out.scales[i] = scale * float(scales[i]);
            for (int i = 0; i < GROUP; i++) {
                out.codes[i] = (lower[i] >> q / 2 * 4 & 0x0F) | (upper[i] >> q * 2 & 3) << 4;
            }
            return;
        }
    }
}

// Writes rows of blocks, `num_in` values each, to columns of `panels`, which must be zeroed. Row n becomes column first + n, or,
// with `gated_half`, the column of row first + n of a gated weight whose halves have this size.
inline void pack_blocks(int64_t type, const uint8_t* rows, int64_t num_rows, int64_t num_in, int64_t first,
                        int64_t gated_half, uint8_t* panels) {
    const BlockShape shape = block_shape(type);
    const int64_t num_groups = num_in / GROUP, row_bytes = num_groups / shape.num_groups * shape.bytes;
    with_format(shape.format, [&](auto format) {
        using C = Codes<decltype(format)::value>;
        const int64_t panel_bytes = num_groups * C::BYTES;
        team().loop(num_rows, 16, [&](int64_t begin, int64_t end, int) {
            Unpacked values;
            for (int64_t n = begin; n < end; n++) {
                const int64_t place = gated_half ? gated_place(first + n, gated_half) : first + n;
                uint8_t* panel = panels + place / PANEL * panel_bytes;
                const int column = int(place % PANEL);
                for (int64_t g = 0; g < num_groups; g++) {
                    const int64_t block = g / shape.num_groups;
                    unpack(type, rows + n * row_bytes + block * shape.bytes, int(g % shape.num_groups), values);
                    uint8_t* group = panel + g * C::BYTES;
                    for (int k = 0; k < GROUP; k++) C::put(group, column, k, values.codes[k]);
                    for (int i = 0; i < C::NUM_SCALES; i++) C::scales(group)[i * PANEL + column] = _cvtss_sh(values.scales[i], 0);
                    if (C::HAS_MINS) C::scales(group)[C::NUM_SCALES * PANEL + column] = _cvtss_sh(values.min, 0);
                }
            }
        });
    });
}

}  // namespace agentflow
