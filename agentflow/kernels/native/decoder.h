// A forward pass through all layers of a Llama-shaped model, in one call.
#pragma once

#include <stdexcept>
#include <string>

#include "attention.h"
#include "choice.h"
#include "linear.h"
#include "low_rank.h"
#include "part_times.h"
#include "row_ops.h"

namespace agentflow {

struct LayerWeights {
    const void* input_norm;
    Weight qkv;
    const void *q_norm, *k_norm;  // null if the model has none
    Weight output;
    const void* mlp_norm;
    Weight gate_up;  // gated
    Weight down;
};

struct DecoderWeights {
    int64_t vocab_size, num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    float norm_eps;
    Weight embedding;  // [vocabulary, hidden_size]; the same panels as the head if they are tied
    const void* final_norm;
    const float* frequencies;  // [head_dim / 2]
    const LayerWeights* layers;
};

// The rows of a forward pass.
struct Rows {
    int64_t num_rows;  // T
    const int64_t *token_ids, *positions, *write_slots;  // [T]
    int64_t num_sampled;
    const int64_t* sampled;  // [num_sampled]: the rows whose hidden states or tokens the pass returns
    int64_t num_given;
    const int64_t* given;    // [num_given]: the rows whose embeddings are given
    const void* embeddings;  // [num_given][hidden_size] of type S
    int64_t num_deep;
    const void* deep;     // [num_deep][num_given][hidden_size] of type S: added to the given rows after each of the first layers
    const float* angles;  // [T][head_dim / 2]: of the rope; null: those of the positions
};

// The changes of the products of a layer by one adapter.
struct LayerAdapter {
    LowRank qkv, output, gate_up, down;
};

// The rows of a batch that use one adapter.
struct AdapterRows {
    const LayerAdapter* layers;  // one for each layer of the model
    const int64_t* rows;  // ascending
    int64_t num_rows;
    const int64_t* sampled;  // the indices in Rows::sampled of the rows that use the adapter
    int64_t num_sampled;
};

struct Adapters {
    int64_t num;
    const AdapterRows* rows;
};

// Buffers for the rows of a forward pass, reused by the next one.
template <class S>
struct Activations {
    std::vector<S> residual, qkv;
    std::vector<RowOf<S>> normed, attended, gated;
    std::vector<float> cos, sin, parts, logits;
    LowRankMemory<S> low_rank;
    int64_t hidden_stride = 0, attended_stride = 0, gated_stride = 0;

    void fit(const DecoderWeights& w, int64_t num_rows) {
        hidden_stride = round_up<int64_t>(w.hidden_size, PANEL);
        attended_stride = round_up<int64_t>(w.num_heads * w.head_dim, PANEL);
        gated_stride = round_up<int64_t>(w.intermediate_size, PANEL);
        grow(residual, num_rows * w.hidden_size);
        grow(qkv, num_rows * (w.num_heads + 2 * w.num_kv_heads) * w.head_dim);
        grow(normed, (num_rows + MAX_TILE_ROWS) * hidden_stride);
        grow(attended, (num_rows + MAX_TILE_ROWS) * attended_stride);
        grow(gated, (num_rows + MAX_TILE_ROWS) * gated_stride);
        grow(cos, num_rows * (w.head_dim / 2));
        grow(sin, num_rows * (w.head_dim / 2));
    }
};

// Throws std::out_of_range if a token id is outside the vocabulary.
inline void check_tokens(const DecoderWeights& weights, const Rows& rows) {
    for (int64_t t = 0; t < rows.num_rows; t++) {
        if (rows.token_ids[t] >= 0 && rows.token_ids[t] < weights.vocab_size) continue;
        throw std::out_of_range("there is no token " + std::to_string(rows.token_ids[t]) + " (row " +
                                std::to_string(t) + " of the batch)");
    }
}

template <class S>
class Forward {
  public:
    Forward(const DecoderWeights& weights, const Rows& rows, const Batch& batch, const Adapters* adapters,
            Activations<S>& memory)
        : w_(weights), rows_(rows), adapters_(adapters), m_(memory), shape_{w_.num_heads, w_.num_kv_heads, w_.head_dim},
          plan_(planned(batch)), qkv_size_((w_.num_heads + 2 * w_.num_kv_heads) * w_.head_dim),
          num_(rows.num_rows) {
        m_.fit(w_, num_);
        grow(m_.parts, num_part_floats(plan_, shape_));
    }

    // Writes the KV of all rows to kv_layers.
    void run(void* const* kv_layers) {
        begin();
        for (int64_t i = 0; i < w_.num_layers; i++) {
            const LayerWeights& layer = w_.layers[i];
            const bool is_last = i + 1 == w_.num_layers;
            normalize(layer.input_norm);
            project(i);
            rotate_and_write(layer, static_cast<S*>(kv_layers[i]));
            if (is_last && rows_.num_sampled == 0) return;  // a chunk of a prompt: only its KV is needed
            attend_layer(static_cast<const S*>(kv_layers[i]));
            if (is_last) keep_sampled();
            add_to_residual(OUTPUT, m_.attended, m_.attended_stride, i, layer.output, &LayerAdapter::output);
            normalize(layer.mlp_norm);
            gate(i);
            add_to_residual(DOWN, m_.gated, m_.gated_stride, i, layer.down, &LayerAdapter::down);
            if (i < rows_.num_deep) add_deep(static_cast<const S*>(rows_.deep) + i * rows_.num_given * w_.hidden_size);
        }
    }

    // Writes the normed hidden states of the sampled rows to out [num_sampled][hidden_size].
    void write_hidden(S* out) {
        for (int64_t t = 0; t < rows_.num_sampled; t++) {
            rms_norm(residual(t), static_cast<const S*>(w_.final_norm), w_.hidden_size, w_.norm_eps, out + t * w_.hidden_size);
        }
    }

    // Chooses the tokens of the sampled rows and writes them to out [num_sampled].
    void choose_tokens(const Weight& head, Choices choices, int64_t* out) {
        if (rows_.num_sampled == 0) return;
        normalize(w_.final_norm);
        grow(m_.logits, num_ * head.num_out);
        {
            const Timed timed(HEAD);
            linear<S>(m_.normed.data(), m_.hidden_stride, num_, head, m_.logits.data(), head.num_out);
        }
        const Timed timed(CHOICE);
        choices.logits = m_.logits.data();
        choose(choices, out);
    }

  private:
    Plan planned(const Batch& batch) const {
        const Timed timed(PLAN);
        return Plan(batch, shape_, team().num_threads());
    }

    S* residual(int64_t t) { return m_.residual.data() + t * w_.hidden_size; }

    template <class Body>
    void each_row(const Body& body) {
        team().loop(num_, 4, [&](int64_t first, int64_t end, int) {
            for (int64_t t = first; t < end; t++) body(t);
        });
    }

    // The sum that the batch's adapters add to a product of layer i; null if they do not change it.
    const S* added(const RowOf<S>* x, int64_t stride, int64_t i, const Weight& weight, LowRank LayerAdapter::*product) {
        if (!adapters_) return nullptr;
        std::vector<ChangedRows> changes;
        for (int64_t a = 0; a < adapters_->num; a++) {
            const AdapterRows& adapter = adapters_->rows[a];
            const LowRank& change = adapter.layers[i].*product;
            if (!change.num_parts) continue;
            if (has_only_sampled_) changes.push_back({&change, adapter.sampled, adapter.num_sampled});
            else changes.push_back({&change, adapter.rows, adapter.num_rows});
        }
        return changes.empty() ? nullptr : low_rank<S>(x, stride, num_, weight.num_out, changes, m_.low_rank);
    }

    void project(int64_t i) {
        const Timed timed(QKV);
        const Weight& weight = w_.layers[i].qkv;
        const S* change = added(m_.normed.data(), m_.hidden_stride, i, weight, &LayerAdapter::qkv);
        linear<S>(m_.normed.data(), m_.hidden_stride, num_, weight, m_.qkv.data(), qkv_size_, change);
    }

    void gate(int64_t i) {
        const Timed timed(GATE_UP);
        const Weight& weight = w_.layers[i].gate_up;
        const S* change = added(m_.normed.data(), m_.hidden_stride, i, weight, &LayerAdapter::gate_up);
        gated_linear<S>(m_.normed.data(), m_.hidden_stride, num_, weight, m_.gated.data(), m_.gated_stride, change);
        fill_up(m_.gated, w_.intermediate_size, m_.gated_stride);
    }

    void add_to_residual(Part part, const std::vector<RowOf<S>>& rows, int64_t stride, int64_t i, const Weight& weight,
                         LowRank LayerAdapter::*product) {
        const Timed timed(part);
        const S* change = added(rows.data(), stride, i, weight, product);
        linear_add<S>(rows.data(), stride, num_, weight, m_.residual.data(), w_.hidden_size, change);
    }

    void begin() {
        const Timed timed(EMBED);
        const int64_t half = w_.head_dim / 2;
        each_row([&](int64_t t) {
            row_of<S>(w_.embedding, rows_.token_ids[t], residual(t));
            const float* angles = rows_.angles ? rows_.angles + t * half : nullptr;
            rope_angles<S>(rows_.positions[t], w_.frequencies, angles, half, m_.cos.data() + t * half, m_.sin.data() + t * half);
        });
        const S* embeddings = static_cast<const S*>(rows_.embeddings);
        for (int64_t e = 0; e < rows_.num_given; e++) {
            std::copy_n(embeddings + e * w_.hidden_size, w_.hidden_size, residual(rows_.given[e]));
        }
    }

    // Adds to the given rows; their sums are rounded to S.
    void add_deep(const S* values) {
        for (int64_t e = 0; e < rows_.num_given; e++) {
            S* to = residual(rows_.given[e]);
            for (int64_t k = 0; k < w_.hidden_size; k += LANES) {
                const int num = int(std::min<int64_t>(LANES, w_.hidden_size - k));
                store_first(to + k, add(load_first(to + k, num), load_first(values + e * w_.hidden_size + k, num)), num);
            }
        }
    }

    void normalize(const void* weight) {
        const Timed timed(NORM);
        each_row([&](int64_t t) {
            RowOf<S>* to = m_.normed.data() + t * m_.hidden_stride;
            rms_norm(residual(t), static_cast<const S*>(weight), w_.hidden_size, w_.norm_eps, to);
            std::fill(to + w_.hidden_size, to + m_.hidden_stride, RowOf<S>{});
        });
    }

    void rotate_and_write(const LayerWeights& layer, S* kv_layer) {
        const Timed timed(ROPE);
        const int64_t dim = w_.head_dim, half = dim / 2, num_rotated = w_.num_heads + w_.num_kv_heads;
        const int64_t slot_size = 2 * w_.num_kv_heads * dim;
        each_row([&](int64_t t) {
            S* row = m_.qkv.data() + t * qkv_size_;
            for (int64_t head = 0; head < num_rotated; head++) {
                const void* norm = head < w_.num_heads ? layer.q_norm : layer.k_norm;
                if (norm) rms_norm(row + head * dim, static_cast<const S*>(norm), dim, w_.norm_eps, row + head * dim);
                rotate(row + head * dim, half, m_.cos.data() + t * half, m_.sin.data() + t * half);
            }
            std::memcpy(kv_layer + rows_.write_slots[t] * slot_size, row + w_.num_heads * dim, slot_size * sizeof(S));
        });
    }

    void attend_layer(const S* kv_layer) {
        const Timed timed(ATTENTION);
        const float scale = 1.0f / std::sqrt(float(w_.head_dim));
        const Queries<S> queries{m_.qkv.data(), qkv_size_, m_.attended.data(), m_.attended_stride, scale};
        attend<S>(plan_, shape_, queries, KvLayer<S>{kv_layer, w_.num_kv_heads, w_.head_dim}, m_.parts.data());
        fill_up(m_.attended, w_.num_heads * w_.head_dim, m_.attended_stride);
    }

    // Pads rows with zeros to a whole panel, because products read that far.
    void fill_up(std::vector<RowOf<S>>& rows, int64_t size, int64_t stride) {
        if (size == stride) return;
        each_row([&](int64_t t) { std::fill(rows.data() + t * stride + size, rows.data() + (t + 1) * stride, RowOf<S>{}); });
    }

    // Drops all rows except the sampled ones, so that the rest of the last layer is computed for these only.
    void keep_sampled() {
        std::vector<S> kept(rows_.num_sampled * w_.hidden_size);
        std::vector<RowOf<S>> attended(rows_.num_sampled * m_.attended_stride);
        for (int64_t i = 0; i < rows_.num_sampled; i++) {
            const int64_t t = rows_.sampled[i];
            std::copy_n(residual(t), w_.hidden_size, kept.data() + i * w_.hidden_size);
            std::copy_n(m_.attended.data() + t * m_.attended_stride, m_.attended_stride, attended.data() + i * m_.attended_stride);
        }
        num_ = rows_.num_sampled;
        has_only_sampled_ = true;
        m_.fit(w_, num_);
        std::copy(kept.begin(), kept.end(), m_.residual.begin());
        std::copy(attended.begin(), attended.end(), m_.attended.begin());
    }

    const DecoderWeights& w_;
    const Rows& rows_;
    const Adapters* adapters_;
    Activations<S>& m_;
    const HeadShape shape_;
    const Plan plan_;
    const int64_t qkv_size_;
    int64_t num_;
    bool has_only_sampled_ = false;
};

}  // namespace agentflow
