// The tile registers of AMX: products of 16 rows with 16 columns, 32 values deep, in one instruction.
//
// With AGENTFLOW_EMULATE_TILES the instructions are written out in C++, so that everything around them can be tested
// on a processor that has none.
#pragma once

#if defined(AGENTFLOW_TILES) || defined(AGENTFLOW_EMULATE_TILES)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace agentflow {

constexpr int TILE_SIDE = 16;
constexpr int TILE_DEPTH = 32;  // bfloat16 values: 64 bytes, a tile's width

#if defined(AGENTFLOW_EMULATE_TILES)

struct Tile {
    unsigned char bytes[TILE_SIDE][64];
};
inline Tile& tile_register(int number) {
    thread_local Tile registers[8];
    return registers[number];
}
template <int T>
inline void load_tile(const void* from, int64_t stride) {
    for (int i = 0; i < TILE_SIDE; i++) {
        std::memcpy(tile_register(T).bytes[i], static_cast<const char*>(from) + i * stride, 64);
    }
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
    for (int i = 0; i < TILE_SIDE; i++) {
        std::memcpy(static_cast<char*>(to) + i * stride, tile_register(T).bytes[i], 64);
    }
}
template <int T>
inline void zero_tile() {
    std::memset(&tile_register(T), 0, sizeof(Tile));
}
template <int C, int A, int B>
inline void multiply_tiles() {
    for (int i = 0; i < TILE_SIDE; i++) {
        float sums[TILE_SIDE];
        bf16 row[TILE_DEPTH];
        std::memcpy(sums, tile_register(C).bytes[i], 64);
        std::memcpy(row, tile_register(A).bytes[i], 64);
        for (int pair = 0; pair < TILE_SIDE; pair++) {
            bf16 columns[TILE_DEPTH];
            std::memcpy(columns, tile_register(B).bytes[pair], 64);
            for (int j = 0; j < TILE_SIDE; j++) {
                sums[j] += to_float(row[2 * pair]) * to_float(columns[2 * j]);
                sums[j] += to_float(row[2 * pair + 1]) * to_float(columns[2 * j + 1]);
            }
        }
        std::memcpy(tile_register(C).bytes[i], sums, 64);
    }
}
inline bool allow_tiles() { return true; }

class TilesInUse {
  public:
    TilesInUse() {}
};

#else

// As assembler and not as the compiler's functions: gcc 12 does not know that those read and write memory.
template <int T>
ALWAYS_INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
ALWAYS_INLINE void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T>
ALWAYS_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int C, int A, int B>
ALWAYS_INLINE void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Asks Linux for the right to use tiles, once for the process. False: it does not give it.
inline bool allow_tiles() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

// While it lives, this thread's tiles are 16 rows of 64 bytes. Afterwards they are given back: a core whose tiles are
// in use cannot sleep deeply.
class TilesInUse {
  public:
    TilesInUse() {
        alignas(64) static constexpr struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } FORM;
        if (allow_tiles()) asm volatile("ldtilecfg %0" ::"m"(FORM));
    }
    ~TilesInUse() {
        if (allow_tiles()) asm volatile("tilerelease");
    }
    TilesInUse(const TilesInUse&) = delete;
};

#endif

// out [rows][32] = rows [16 or 32][depth] times one panel, for `depth` a multiple of TILE_DEPTH. Tiles 0 to 3 hold
// the sums, 4 and 5 rows, 6 and 7 columns.
template <bool IS_TALL>
ALWAYS_INLINE void multiply_by_tiles(const bf16* rows, int64_t stride, const bf16* panel, int64_t depth, float* out) {
    constexpr int64_t COLUMNS = 2 * TILE_SIDE, PAIR_BYTES = 2 * COLUMNS * int64_t(sizeof(bf16));
    const int64_t row_bytes = stride * int64_t(sizeof(bf16));
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (IS_TALL) zero_tile<2>(), zero_tile<3>();
    for (int64_t k = 0; k < depth; k += TILE_DEPTH) {
        load_tile<6>(panel + k * COLUMNS, PAIR_BYTES);
        load_tile<7>(panel + k * COLUMNS + 2 * TILE_SIDE, PAIR_BYTES);
        load_tile<4>(rows + k, row_bytes);
        multiply_tiles<0, 4, 6>();
        multiply_tiles<1, 4, 7>();
        if constexpr (IS_TALL) {
            load_tile<5>(rows + TILE_SIDE * stride + k, row_bytes);
            multiply_tiles<2, 5, 6>();
            multiply_tiles<3, 5, 7>();
        }
    }
    constexpr int64_t OUT_BYTES = COLUMNS * int64_t(sizeof(float));
    store_tile<0>(out, OUT_BYTES);
    store_tile<1>(out + TILE_SIDE, OUT_BYTES);
    if constexpr (IS_TALL) {
        store_tile<2>(out + TILE_SIDE * COLUMNS, OUT_BYTES);
        store_tile<3>(out + TILE_SIDE * COLUMNS + TILE_SIDE, OUT_BYTES);
    }
}

}  // namespace agentflow

#else

namespace agentflow {

constexpr int TILE_DEPTH = 2;  // pairs

class TilesInUse {
  public:
    TilesInUse() {}
};

}  // namespace agentflow

#endif
