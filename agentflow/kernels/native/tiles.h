// AMX tile registers: one instruction multiplies 16 rows by 16 columns, 32 values deep.
#pragma once

#if defined(AGENTFLOW_TILES)

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "simd.h"

namespace agentflow {

constexpr int TILE_SIDE = 16;
constexpr int TILE_DEPTH = 32;  // bfloat16 values: 64 bytes, a tile's width

// Inline assembly instead of intrinsics, because gcc 12 does not know that the intrinsics access memory.
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

// Asks Linux, once per process, for permission to use tiles. Returns false if it refuses.
inline bool allow_tiles() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

// Configures this thread's tiles as 16 rows of 64 bytes. The destructor releases them, because a core with tiles in use cannot
// enter deep sleep states.
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

// out [rows][32] = rows [16 or 32][depth] times one panel, or += if `adds`; `depth` is a multiple of TILE_DEPTH. Tiles 0 to 3
// hold the sums, 4 and 5 the rows, 6 and 7 the columns.
template <bool IS_TALL>
ALWAYS_INLINE void multiply_by_tiles(const bf16* rows, int64_t stride, const bf16* panel, int64_t depth, float* out, bool adds) {
    constexpr int64_t COLUMNS = 2 * TILE_SIDE, PAIR_BYTES = 2 * COLUMNS * int64_t(sizeof(bf16));
    constexpr int64_t OUT_BYTES = COLUMNS * int64_t(sizeof(float));
    const int64_t row_bytes = stride * int64_t(sizeof(bf16));
    if (adds) {
        load_tile<0>(out, OUT_BYTES);
        load_tile<1>(out + TILE_SIDE, OUT_BYTES);
        if constexpr (IS_TALL) {
            load_tile<2>(out + TILE_SIDE * COLUMNS, OUT_BYTES);
            load_tile<3>(out + TILE_SIDE * COLUMNS + TILE_SIDE, OUT_BYTES);
        }
    } else {
        zero_tile<0>();
        zero_tile<1>();
        if constexpr (IS_TALL) zero_tile<2>(), zero_tile<3>();
    }
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
