// Products of a few rows with a panel: 32 columns of a matrix, stored in the order in which they are read.
//
// A panel of depth k (the inner dimension of the product) is [k][32] floats, or [k / 2][32][2] bfloat16: values that
// are adjacent along k are stored in pairs, as the processor's bfloat16 instructions and AMX tiles expect. The depth is padded
// with zeros to a multiple of the depth of one instruction.
//
// Rows are bfloat16 if the processor multiplies bfloat16. Otherwise they are floats that hold bfloat16 values, and
// panels are widened while they are read: the bytes read from memory and the sums stay the same.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "simd.h"
#include "tiles.h"

namespace agentflow {

constexpr int PANEL = 2 * LANES;  // columns

// Resizes a reused buffer, which never shrinks.
template <class T>
void grow(std::vector<T>& buffer, int64_t size) {
    if (int64_t(buffer.size()) < size) buffer.resize(size);
}

#if defined(__AVX512BF16__)
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif

template <class S>
struct Format;

template <>
struct Format<float> {
    using Row = float;
    static constexpr int PAIR = 1;  // values along k that are stored together in a panel
};

template <>
struct Format<bf16> {
    using Row = std::conditional_t<MULTIPLIES_BF16, bf16, float>;
    static constexpr int PAIR = 2;
};

template <class S>
using RowOf = typename Format<S>::Row;

// The inner dimension of a product, padded as in panels and rows.
template <class S>
constexpr int64_t padded_depth(int64_t depth) {
    return round_up<int64_t>(depth, std::is_same_v<S, bf16> ? TILE_DEPTH : 1);
}

#if defined(__AVX512F__)
constexpr int MAX_VECTOR_ROWS = 12;  // 24 registers of sums, 2 of the panel
constexpr int TILE_VECS = 2;
#else
constexpr int MAX_VECTOR_ROWS = 4;
constexpr int TILE_VECS = 1;
#endif

// AMX always multiplies 16 or 32 rows, even if a product has fewer. Therefore its rows must be followed by readable memory, and
// its results by writable memory, for MAX_TILE_ROWS more rows.
#if defined(AGENTFLOW_TILES)
constexpr int MAX_TILE_ROWS = 2 * TILE_SIDE;
constexpr int MIN_ROWS_FOR_TILES = 4;
constexpr int ROWS_AT_ONCE = TILE_SIDE;  // a product whose number of rows is a multiple of this reads no other rows
#else
constexpr int MAX_TILE_ROWS = MAX_VECTOR_ROWS;
constexpr int ROWS_AT_ONCE = 1;
#endif

template <class S>
constexpr int max_rows() {
    return std::is_same_v<S, bf16> ? MAX_TILE_ROWS : MAX_VECTOR_ROWS;
}

ALWAYS_INLINE Vec load_pairs_even(const bf16* p);
ALWAYS_INLINE Vec load_pairs_odd(const bf16* p);

#if defined(__AVX512F__)
ALWAYS_INLINE Vec load_pairs_even(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
ALWAYS_INLINE Vec load_pairs_odd(const bf16* p) {
    const __m512i upper = _mm512_set1_epi32(int(0xFFFF0000));
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), upper))};
}
#else
ALWAYS_INLINE Vec load_pairs_even(const bf16* p) {
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
ALWAYS_INLINE Vec load_pairs_odd(const bf16* p) {
    const __m256i upper = _mm256_set1_epi32(int(0xFFFF0000));
    const __m256i* q = reinterpret_cast<const __m256i*>(p);
    return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), upper)),
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), upper))};
}
#endif

#if defined(__AVX512BF16__)
ALWAYS_INLINE __m512bh pair_of(const bf16* row) {
    int32_t bits;
    std::memcpy(&bits, row, sizeof bits);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}
#endif

// The cache into which a tile prefetches the panels after its own, while it reads its panel from memory.
enum class Prefetch { NOTHING, TO_FIRST_CACHE, TO_SECOND_CACHE };

// A panel that more rows will read again stays in the first cache only if nothing else is prefetched into it.
constexpr Prefetch prefetch_for(int64_t num_rows) {
    constexpr int64_t MOST_TO_FIRST_CACHE = 6;
    return num_rows <= MOST_TO_FIRST_CACHE ? Prefetch::TO_FIRST_CACHE : Prefetch::TO_SECOND_CACHE;
}

// Prefetches part PART of NUM_PARTS of BYTES at some distance after p. Panels are read in order, but while a core multiplies them
// with a few rows, the hardware prefetcher falls behind: without this, 4 to 16 rows took up to twice the time. The parts
// of a group alternate with its products, because many prefetches at once fill the processor's queues, and its loads must wait.
template <int BYTES, int PART = 0, int NUM_PARTS = 1>
ALWAYS_INLINE void prefetch_ahead(const void* p, Prefetch to) {
    constexpr int64_t DISTANCE = 12 * 1024;
    constexpr int LINE = 64, NUM_LINES = (BYTES + LINE - 1) / LINE;
    constexpr int BEGIN = PART * NUM_LINES / NUM_PARTS, END = (PART + 1) * NUM_LINES / NUM_PARTS;
    const char* ahead = static_cast<const char*>(p) + DISTANCE;
    if (to == Prefetch::TO_FIRST_CACHE) {
        for (int i = BEGIN; i < END; i++) _mm_prefetch(ahead + i * LINE, _MM_HINT_T0);
    } else if (to == Prefetch::TO_SECOND_CACHE) {
        for (int i = BEGIN; i < END; i++) _mm_prefetch(ahead + i * LINE, _MM_HINT_T1);
    }
}

// Adds the products at depth k (for pairs, also at k + 1) to the sums of ROWS rows.
template <int ROWS, int VECS>
ALWAYS_INLINE void multiply_add(Vec (&sums)[ROWS][VECS], const float* row, int64_t stride, int64_t k,
                                const float* panel) {
    Vec columns[VECS];
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) columns[v] = load(panel + k * PANEL + v * LANES);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
        const Vec value = broadcast(row[i * stride + k]);
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) sums[i][v] = fma(value, columns[v], sums[i][v]);
    }
}

template <int ROWS, int VECS>
ALWAYS_INLINE void multiply_add(Vec (&sums)[ROWS][VECS], const float* row, int64_t stride, int64_t k,
                                const bf16* panel) {
    Vec even[VECS], odd[VECS];
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) {
        even[v] = load_pairs_even(panel + k * PANEL + v * 2 * LANES);
        odd[v] = load_pairs_odd(panel + k * PANEL + v * 2 * LANES);
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
        const Vec first = broadcast(row[i * stride + k]), second = broadcast(row[i * stride + k + 1]);
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) {
            sums[i][v] = fma(second, odd[v], fma(first, even[v], sums[i][v]));
        }
    }
}

#if defined(__AVX512BF16__)
template <int ROWS, int VECS>
ALWAYS_INLINE void multiply_add(Vec (&sums)[ROWS][VECS], const bf16* row, int64_t stride, int64_t k,
                                const bf16* panel) {
    __m512bh columns[VECS];
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) {
        columns[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + k * PANEL + v * 2 * LANES));
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
        const __m512bh value = pair_of(row + i * stride + k);
#pragma GCC unroll 2
        for (int v = 0; v < VECS; v++) sums[i][v].v = _mm512_dpbf16_ps(sums[i][v].v, value, columns[v]);
    }
}
#endif

// out [ROWS][PANEL] = rows [ROWS][depth] times one panel, or += if `adds`. `depth` is padded, and so are the rows. `is_new`: the
// panel is not in the cache yet.
template <int ROWS, class S>
void tile(const RowOf<S>* rows, int64_t stride, const S* panel, int64_t depth, float* out, bool adds, bool is_new) {
    const Prefetch to = is_new ? prefetch_for(ROWS) : Prefetch::NOTHING;
    for (int first = 0; first < PANEL; first += TILE_VECS * LANES) {
        Vec sums[ROWS][TILE_VECS];
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECS; v++) sums[i][v] = adds ? load(out + i * PANEL + first + v * LANES) : zero();
        }
        const S* columns = panel + first * Format<S>::PAIR;
        for (int64_t k = 0; k < depth; k += Format<S>::PAIR) {
            prefetch_ahead<TILE_VECS * LANES * Format<S>::PAIR * int(sizeof(S))>(columns + k * PANEL, to);
            multiply_add<ROWS, TILE_VECS>(sums, rows, stride, k, columns);
        }
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECS; v++) store(out + i * PANEL + first + v * LANES, sums[i][v]);
        }
    }
}

template <class S, int ROWS>
void tile_of(int num_rows, const RowOf<S>* rows, int64_t stride, const S* panel, int64_t depth, float* out, bool adds, bool is_new) {
    if constexpr (ROWS > 1) {
        if (num_rows < ROWS) return tile_of<S, ROWS - 1>(num_rows, rows, stride, panel, depth, out, adds, is_new);
    }
    tile<ROWS, S>(rows, stride, panel, depth, out, adds, is_new);
}

// Does the same for any number of rows up to max_rows. With AMX, this thread must hold a TilesInUse.
template <class S>
void tile(int num_rows, const RowOf<S>* rows, int64_t stride, const S* panel, int64_t depth, float* out,
          bool adds = false, bool is_new = false) {
#if defined(AGENTFLOW_TILES)
    if constexpr (std::is_same_v<S, bf16>) {
        if (num_rows >= MIN_ROWS_FOR_TILES && allow_tiles()) {
            if (num_rows > TILE_SIDE) return multiply_by_tiles<true>(rows, stride, panel, depth, out, adds);
            return multiply_by_tiles<false>(rows, stride, panel, depth, out, adds);
        }
    }
#endif
    for (; num_rows > MAX_VECTOR_ROWS; num_rows -= MAX_VECTOR_ROWS) {
        tile<MAX_VECTOR_ROWS, S>(rows, stride, panel, depth, out, adds, is_new);
        rows += MAX_VECTOR_ROWS * stride;
        out += MAX_VECTOR_ROWS * PANEL;
    }
    tile_of<S, MAX_VECTOR_ROWS>(num_rows, rows, stride, panel, depth, out, adds, is_new);
}

// Divides rows 0 to num_rows into tiles of about equal height, at most `most` rows, and calls body(first, num) for each.
template <class Body>
ALWAYS_INLINE void each_even_tile(int64_t num_rows, int64_t most, const Body& body) {
    const int64_t num_tiles = (num_rows + most - 1) / most;
    for (int64_t i = 0, first = 0; i < num_tiles; i++) {
        const int64_t end = num_rows * (i + 1) / num_tiles;
        body(first, int(end - first));
        first = end;
    }
}

// Does the same with at most max_rows. With AMX, where a tile takes the same time at any height, all tiles but the last have
// max_rows.
template <class S, class Body>
ALWAYS_INLINE void each_tile(int64_t num_rows, const Body& body) {
    constexpr int MOST = max_rows<S>();
    if constexpr (MOST <= MAX_VECTOR_ROWS) return each_even_tile(num_rows, MOST, body);
    for (int64_t first = 0; first < num_rows; first += MOST) body(first, int(std::min<int64_t>(num_rows - first, MOST)));
}

// Does the same for a panel that is not in the cache yet. The first tile reads the panel from memory, so it is as high as
// possible: its products overlap with the reads, which leaves fewer rows for the other tiles.
template <class S, class Body>
ALWAYS_INLINE void each_tile_of_new_panel(int64_t num_rows, const Body& body) {
    const int64_t first = std::min<int64_t>(num_rows, max_rows<S>());
    body(0, int(first));
    each_tile<S>(num_rows - first, [&](int64_t at, int num) { body(first + at, num); });
}

}  // namespace agentflow
