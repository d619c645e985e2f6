// Latent attention (DeepSeek-V2, arXiv 2405.04434), as in latent_attention.py: the pool holds the latents of keys and values, and
// the rotated key that all heads share. The matrices that would expand the latents are applied to queries and outputs instead.
#pragma once

#include <vector>

#include "low_rank.h"
#include "row_ops.h"

namespace agentflow {

struct Latent {
    Weight down;  // computes the queries or their latents; the latent of keys and values; and the shared key
    Norm q_norm;  // the norm of the queries' latents; none: the queries have no latents
    Weight q_up;
    Norm kv_norm;
    const Weight *key_up, *value_up;  // [heads]: [kv_rank, plain_dim] and [value_dim, kv_rank]
    int64_t num_heads, kv_rank, plain_dim, rotated_dim, value_dim;

    int64_t pool_dim() const { return kv_rank + rotated_dim; }
    int64_t query_dim() const { return plain_dim + rotated_dim; }
    int64_t queries_size() const { return down.num_out - pool_dim(); }
};

// Buffers that all layers reuse.
template <class S>
struct LatentMemory {
    std::vector<S> down, queries;
    std::vector<RowOf<S>> normed, plain, values;
};

// Multiplies each head's rows with its matrix, and calls put(head, row, column, width, values). rows_of(head) returns the rows,
// which must be followed by readable memory for MAX_TILE_ROWS more rows.
template <class S, class RowsOf, class Put>
void each_head(int64_t num_heads, int64_t num_rows, const Weight* weights, int64_t stride, const RowsOf& rows_of, const Put& put) {
    const int64_t num_panels = (weights[0].num_out + PANEL - 1) / PANEL;
    team().loop(num_heads * num_panels, 1, [&](int64_t first, int64_t end, int) {
        const TilesInUse tiles;
        for (int64_t unit = first; unit < end; unit++) {
            const int64_t head = unit / num_panels;
            few_rows<S>(rows_of(head), stride, num_rows, weights[head], unit % num_panels,
                        [&](int64_t row, int64_t column, int width, Vec value) { put(head, row, column, width, value); });
        }
    });
}

// Rotates pairs of adjacent dimensions. In the result, the two dimensions of a pair are dim / 2 apart, which does not change the
// products of queries and keys.
template <class S>
void rotate_adjacent(const S* from, int64_t dim, const float* cos, const float* sin, S* to) {
    for (int64_t i = 0; i < dim / 2; i++) to[i] = from[2 * i], to[dim / 2 + i] = from[2 * i + 1];
    rotate(to, dim / 2, cos, sin);
}

// Computes qkv [num_rows][(heads + 2) * pool_dim]: the queries, and the pool's entry twice, as key and as value. `angles` returns
// the cosines and sines of a row.
template <class S, class Angles>
void latent_queries(const RowOf<S>* x, int64_t stride, int64_t num_rows, const Latent& w, const Angles& angles, LatentMemory<S>& memory,
                    S* qkv) {
    const int64_t pool = w.pool_dim(), qkv_size = (w.num_heads + 2) * pool, down_size = w.down.num_out;
    grow(memory.down, num_rows * down_size);
    linear<S>(x, stride, num_rows, w.down, memory.down.data(), down_size);
    const S* queries = memory.down.data();
    int64_t queries_stride = down_size;
    if (w.q_norm) {
        const int64_t normed_stride = round_up<int64_t>(w.q_up.num_in, PANEL);
        grow(memory.normed, (num_rows + MAX_TILE_ROWS) * normed_stride);
        for (int64_t t = 0; t < num_rows; t++) {
            RowOf<S>* to = memory.normed.data() + t * normed_stride;
            normalize(queries + t * down_size, w.q_norm, to);
            std::fill(to + w.q_up.num_in, to + normed_stride, RowOf<S>{});
        }
        queries_stride = w.q_up.num_out;
        grow(memory.queries, num_rows * queries_stride);
        linear<S>(memory.normed.data(), normed_stride, num_rows, w.q_up, memory.queries.data(), queries_stride);
        queries = memory.queries.data();
    }
    const int64_t plain_stride = round_up<int64_t>(w.plain_dim, PANEL), head_size = (num_rows + MAX_TILE_ROWS) * plain_stride;
    grow(memory.plain, w.num_heads * head_size);
    team().loop(num_rows, 4, [&](int64_t first, int64_t end, int) {
        for (int64_t t = first; t < end; t++) {
            S* row = qkv + t * qkv_size;
            const auto [cos, sin] = angles(t);
            for (int64_t head = 0; head < w.num_heads; head++) {
                const S* query = queries + t * queries_stride + head * w.query_dim();
                RowOf<S>* plain = memory.plain.data() + head * head_size + t * plain_stride;
                copy_row(query, w.plain_dim, plain);
                std::fill(plain + w.plain_dim, plain + plain_stride, RowOf<S>{});
                rotate_adjacent(query + w.plain_dim, w.rotated_dim, cos, sin, row + head * pool + w.kv_rank);
            }
            const S* latent = memory.down.data() + t * down_size + w.queries_size();
            S* key = row + w.num_heads * pool;
            normalize(latent, w.kv_norm, key);
            rotate_adjacent(latent + w.kv_rank, w.rotated_dim, cos, sin, key + w.kv_rank);
            std::copy_n(key, pool, key + pool);
        }
    });
    each_head<S>(
        w.num_heads, num_rows, w.key_up, plain_stride, [&](int64_t head) { return memory.plain.data() + head * head_size; },
        [&](int64_t head, int64_t row, int64_t column, int width, Vec value) {
            store_first(qkv + row * qkv_size + head * pool + column, value, width);
        });
}

// Expands the attention's output [num_rows][heads * pool_dim] from latents to memory.values [num_rows][heads * value_dim]. Returns
// the stride of its rows.
template <class S>
int64_t latent_values(const RowOf<S>* attended, int64_t stride, int64_t num_rows, const Latent& w, LatentMemory<S>& memory) {
    const int64_t size = w.num_heads * w.value_dim, values_stride = round_up<int64_t>(size, PANEL);
    grow(memory.values, (num_rows + MAX_TILE_ROWS) * values_stride);
    each_head<S>(
        w.num_heads, num_rows, w.value_up, stride, [&](int64_t head) { return attended + head * w.pool_dim(); },
        [&](int64_t head, int64_t row, int64_t column, int width, Vec value) {
            store_first(memory.values.data() + row * values_stride + head * w.value_dim + column, rounded<S>(value), width);
        });
    for (int64_t t = 0; t < num_rows; t++) {
        std::fill_n(memory.values.data() + t * values_stride + size, values_stride - size, RowOf<S>{});
    }
    return values_stride;
}

}  // namespace agentflow
