// A forward pass through all layers of a decoder, in one call. `decoder_weights.py` has the same records, and documents their
// fields.
#pragma once

#include <map>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "choice.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "low_rank.h"
#include "part_times.h"
#include "row_ops.h"
#include "shared_ranks.h"

namespace agentflow {

static_assert(RUN == PANEL);

struct LayerWeights {
    Norm input_norm;
    Weight qkv;
    const Latent* latent;  // replaces `qkv`; or null
    Norm q_norm, k_norm;  // over single heads, or over all heads together, by their size
    const void* sinks;    // [heads] of type S, or null
    Weight output;
    Norm attention_norm;  // the norm of the attention's output
    Norm mlp_norm;
    Mlp mlp;
    const Experts* experts;  // replaces `mlp`; or null
    Norm output_norm;        // the norm of the MLP's output
    int64_t window;          // the number of keys to which a row attends; 0: all
    int64_t rope;            // the index in DecoderWeights::ropes; -1: heads are not rotated
};

struct DecoderWeights {
    static constexpr int MAX_ROPES = 2;
    int64_t vocab_size, num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
    Weight embedding;  // [vocabulary, hidden_size]; the same panels as the head if they are tied
    float embedding_scale;
    const void* positions;  // [num_positions, hidden_size] of type S, added to the embeddings, or null
    int64_t position_offset, num_positions;  // `position_offset`: the row of position 0
    Norm final_norm;
    Rope ropes[MAX_ROPES];
    int64_t num_ropes;
    float attention_scale, attention_cap, logit_scale, logit_cap;  // a cap of 0: no cap
    int64_t activation, is_gated;  // of the MLPs
    int64_t is_parallel;  // the attention and the MLP of a layer read the same residual
    const LayerWeights* layers;
    int64_t first_token;  // the token of the first row of `embedding`
    RankSum ranks;  // adds over the processes that compute the model together; then heads and matrices are this rank's part

    Gating gating() const { return {Activation(activation), is_gated != 0}; }
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
    const float* angles;  // [T][head_dim / 2]: the angles of the rope; null: they follow from `positions`
};

// An adapter's changes to the products of a layer.
struct LayerAdapter {
    LowRank qkv, output, gate_up, down;
};

// The rows of a batch that use one adapter.
struct AdapterRows {
    const LayerAdapter* layers;  // one for each layer of the model
    const int64_t* rows;  // ascending
    int64_t num_rows;
    const int64_t* sampled;  // the indices in Rows::sampled of rows that use the adapter
    int64_t num_sampled;
};

struct Adapters {
    int64_t num;
    const AdapterRows* rows;
};

// Buffers for the rows of a forward pass. The next pass reuses them.
template <class S>
struct Activations {
    std::vector<S> residual, qkv;
    std::vector<S> block;  // the output of a block before it is added to the residual
    std::vector<RowOf<S>> normed, attended;
    std::vector<float> cos, sin, parts, logits, highest;
    LowRankMemory<S> low_rank;
    MlpMemory<S> mlp;
    LatentMemory<S> latent;
    int64_t hidden_stride = 0, attended_stride = 0;

    void fit(const DecoderWeights& w, int64_t num_rows) {
        hidden_stride = round_up<int64_t>(w.hidden_size, PANEL);
        attended_stride = round_up<int64_t>(w.num_heads * w.head_dim, PANEL);
        grow(residual, num_rows * w.hidden_size);
        grow(block, num_rows * w.hidden_size);
        grow(qkv, num_rows * (w.num_heads + 2 * w.num_kv_heads) * w.head_dim);
        grow(normed, (num_rows + MAX_TILE_ROWS) * hidden_stride);
        grow(attended, (num_rows + MAX_TILE_ROWS) * attended_stride);
        grow(cos, w.num_ropes * num_rows * (w.head_dim / 2));
        grow(sin, w.num_ropes * num_rows * (w.head_dim / 2));
    }
};

// Throws std::out_of_range if a token id is outside the vocabulary, or a position outside the table of learned positions.
inline void check_rows(const DecoderWeights& weights, const Rows& rows) {
    const auto check = [](const char* what, int64_t t, int64_t value, int64_t offset, int64_t num) {
        if (value + offset >= 0 && value + offset < num) return;
        throw std::out_of_range(std::string("there is no ") + what + " " + std::to_string(value) + " (row " + std::to_string(t) +
                                " of the batch)");
    };
    for (int64_t t = 0; t < rows.num_rows; t++) {
        check("token", t, rows.token_ids[t], 0, weights.vocab_size);
        if (weights.positions) check("position", t, rows.positions[t], weights.position_offset, weights.num_positions);
    }
}

template <class S>
class Forward {
  public:
    Forward(const DecoderWeights& weights, const Rows& rows, const Batch& batch, const Adapters* adapters,
            Activations<S>& memory)
        : w_(weights), rows_(rows), batch_(batch), adapters_(adapters), m_(memory),
          shape_{w_.num_heads, w_.num_kv_heads, w_.head_dim}, qkv_size_((w_.num_heads + 2 * w_.num_kv_heads) * w_.head_dim),
          longest_(longest_text(batch)), num_(rows.num_rows) {
        m_.fit(w_, num_);
    }

    // Writes the KV of all rows to kv_layers.
    void run(void* const* kv_layers) {
        begin();
        for (int64_t i = 0; i < w_.num_layers; i++) {
            const LayerWeights& layer = w_.layers[i];
            const bool is_last = i + 1 == w_.num_layers;
            prepare(layer.input_norm);
            if (layer.latent) project_latent(*layer.latent, layer.rope);
            else project(i);
            rotate_and_write(layer, static_cast<S*>(kv_layers[i]));
            if (is_last && rows_.num_sampled == 0) return;  // no row is sampled, only KV is needed
            attend_layer(layer, static_cast<const S*>(kv_layers[i]));
            if (is_last) keep_sampled();
            if (w_.is_parallel) prepare(layer.mlp_norm);
            add_attention(i);
            if (!w_.is_parallel) prepare(layer.mlp_norm);
            if (layer.experts) add_mixture(layer);
            else add_mlp(i);
            if (i < rows_.num_deep) add_deep(static_cast<const S*>(rows_.deep) + i * rows_.num_given * w_.hidden_size);
        }
    }

    // Writes the normed hidden states of the sampled rows to out [num_sampled][hidden_size].
    void write_hidden(S* out) {
        for (int64_t t = 0; t < rows_.num_sampled; t++) normalize(residual(t), w_.final_norm, out + t * w_.hidden_size);
    }

    // Writes the results that `wanted` selects for the sampled rows, once the caller has filled it in and joined the team.
    void choose_tokens(const Weight& head, const Wanted& wanted) {
        if (rows_.num_sampled == 0) return;
        prepare(w_.final_norm);
        grow(m_.logits, num_ * head.num_out);
        grow(m_.highest, num_ * ((head.num_out + PANEL - 1) / PANEL));
        {
            const Timed timed(HEAD);
            const LogitMap by{w_.logit_scale, w_.logit_cap};
            head_linear<S>(m_.normed.data(), m_.hidden_stride, num_, head, by, m_.logits.data(), m_.highest.data());
        }
        team().await_caller();
        if (!wanted.tokens) return;  // the caller has failed
        const Timed timed(CHOICE);
        Choices choices = wanted.choices;
        choices.logits = m_.logits.data();
        choices.highest = m_.highest.data();
        choose(choices, wanted.tokens, &wanted.likelihoods);
    }

  private:
    // The plan of a layer's attention. A window that is at least as long as the longest text is ignored.
    const Plan& plan_of(const LayerWeights& layer) {
        const int64_t window = layer.window < longest_ ? layer.window : 0;
        const auto found = plans_.find(window);
        if (found != plans_.end()) return found->second;
        const Timed timed(PLAN);
        const Plan& made = plans_.try_emplace(window, batch_, shape_, team().num_threads(), window).first->second;
        grow(m_.parts, num_part_floats(made, shape_));
        return made;
    }

    static int64_t longest_text(const Batch& batch) {
        int64_t longest = 0, row = 0;
        for (int64_t r = 0; r < batch.num_requests; r++) longest = std::max(longest, batch.kv_lens[r]);
        for (int64_t g = 0; g < batch.num_trees; g++) {
            for (int64_t i = 0; i < batch.tree_query_lens[g]; i++, row++) {
                longest = std::max(longest, batch.prefix_lens[g] + batch.path_lens[row]);
            }
        }
        return longest;
    }

    S* residual(int64_t t) { return m_.residual.data() + t * w_.hidden_size; }

    template <class Body>
    void each_row(const Body& body) {
        team().loop(num_, 4, [&](int64_t first, int64_t end, int) {
            for (int64_t t = first; t < end; t++) body(t);
        });
    }

    // The summand that the batch's adapters add to a product of layer i; null if they do not change it.
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

    void project_latent(const Latent& latent, int64_t rope) {
        const Timed timed(QKV);
        const auto angles_of = [&](int64_t t) { return std::pair(angles(m_.cos, rope, t), angles(m_.sin, rope, t)); };
        latent_queries(m_.normed.data(), m_.hidden_stride, num_, latent, angles_of, m_.latent, m_.qkv.data());
    }

    void add_attention(int64_t i) {
        const LayerWeights& layer = w_.layers[i];
        if (!layer.latent) {
            return add_product(OUTPUT, m_.attended, m_.attended_stride, i, layer.output, &LayerAdapter::output, layer.attention_norm);
        }
        const int64_t stride = latent_values(m_.attended.data(), m_.attended_stride, num_, *layer.latent, m_.latent);
        add_product(OUTPUT, m_.latent.values, stride, i, layer.output, &LayerAdapter::output, layer.attention_norm);
    }

    void add_mlp(int64_t i) {
        const LayerWeights& layer = w_.layers[i];
        MlpPortions mlp;
        mlp.add(layer.mlp, num_);
        int64_t stride;
        {
            const Timed timed(GATE_UP);
            const S* change = added(m_.normed.data(), m_.hidden_stride, i, layer.mlp.gate_up, &LayerAdapter::gate_up);
            stride = inner_rows(m_.normed.data(), m_.hidden_stride, mlp, w_.gating(), m_.mlp, change);
        }
        add_product(DOWN, m_.mlp.inner, stride, i, layer.mlp.down, &LayerAdapter::down, layer.output_norm);
    }

    void add_mixture(const LayerWeights& layer) {
        {
            const Timed timed(GATE_UP);
            mixture(m_.normed.data(), m_.hidden_stride, num_, *layer.experts, w_.gating(), m_.mlp, m_.block.data());
        }
        sum_over_ranks(m_.block);
        const Timed timed(NORM);
        each_row([&](int64_t t) { add_block(t, layer.output_norm); });
    }

    // Adds a product of layer i to the residual, after its norm if there is one.
    void add_product(Part part, const std::vector<RowOf<S>>& rows, int64_t stride, int64_t i, const Weight& weight,
                     LowRank LayerAdapter::*product, const Norm& norm) {
        {
            const Timed timed(part);
            const S* change = added(rows.data(), stride, i, weight, product);
            if (!norm && !w_.ranks) return linear_add<S>(rows.data(), stride, num_, weight, m_.residual.data(), w_.hidden_size, change);
            linear<S>(rows.data(), stride, num_, weight, m_.block.data(), w_.hidden_size, change);
        }
        sum_over_ranks(m_.block);
        const Timed timed(NORM);
        each_row([&](int64_t t) { add_block(t, norm); });
    }

    // Replaces the values of all rows with their sums over all ranks.
    void sum_over_ranks(std::vector<S>& values) {
        if (!w_.ranks) return;
        const Timed timed(RANKS);
        if (w_.ranks.add(w_.ranks.context, values.data(), num_ * w_.hidden_size, std::is_same_v<S, bf16>)) {
            throw RankLost("another rank of the model has ended or does not answer");
        }
    }

    // Adds row t of the last block's output to the residual, after its norm if there is one.
    void add_block(int64_t t, const Norm& norm) {
        S* row = m_.block.data() + t * w_.hidden_size;
        if (norm) normalize(row, norm, row);
        add_row(row, w_.hidden_size, residual(t));
    }

    // Writes the embeddings of all tokens to the residual. A rank has the embeddings of some tokens, and adds zeros for the others.
    void embed() {
        {
            const Timed timed(EMBED);
            each_row([&](int64_t t) {
                const int64_t row = rows_.token_ids[t] - w_.first_token;
                if (row >= 0 && row < w_.embedding.num_out) row_of<S>(w_.embedding, row, residual(t));
                else std::fill_n(residual(t), w_.hidden_size, S{});
            });
        }
        sum_over_ranks(m_.residual);
    }

    void begin() {
        embed();
        const Timed timed(EMBED);
        each_row([&](int64_t t) {
            if (w_.embedding_scale != 1) scale_row(residual(t), w_.hidden_size, w_.embedding_scale);
            if (w_.positions) {
                const int64_t place = rows_.positions[t] + w_.position_offset;
                add_row(static_cast<const S*>(w_.positions) + place * w_.hidden_size, w_.hidden_size, residual(t));
            }
            for (int64_t rope = 0; rope < w_.num_ropes; rope++) {
                const Rope& by = w_.ropes[rope];
                const float* given = rows_.angles ? rows_.angles + t * (by.num_rotated / 2) : nullptr;
                rope_angles<S>(rows_.positions[t], by, given, angles(m_.cos, rope, t), angles(m_.sin, rope, t));
            }
        });
        const S* embeddings = static_cast<const S*>(rows_.embeddings);
        for (int64_t e = 0; e < rows_.num_given; e++) {
            std::copy_n(embeddings + e * w_.hidden_size, w_.hidden_size, residual(rows_.given[e]));
        }
    }

    // Adds `values` to the given rows. The sums are rounded to S.
    void add_deep(const S* values) {
        for (int64_t e = 0; e < rows_.num_given; e++) {
            S* to = residual(rows_.given[e]);
            for (int64_t k = 0; k < w_.hidden_size; k += LANES) {
                const int num = int(std::min<int64_t>(LANES, w_.hidden_size - k));
                store_first(to + k, add(load_first(to + k, num), load_first(values + e * w_.hidden_size + k, num)), num);
            }
        }
    }

    // The cosines or sines of one rope for row t.
    float* angles(std::vector<float>& of_all, int64_t rope, int64_t t) const {
        return of_all.data() + (rope * rows_.num_rows + t) * (w_.head_dim / 2);
    }

    // Copies the residual to `normed`, the input of products, and applies the norm if there is one.
    void prepare(const Norm& norm) {
        const Timed timed(NORM);
        each_row([&](int64_t t) {
            RowOf<S>* to = m_.normed.data() + t * m_.hidden_stride;
            if (norm) normalize(residual(t), norm, to);
            else copy_row(residual(t), w_.hidden_size, to);
            std::fill(to + w_.hidden_size, to + m_.hidden_stride, RowOf<S>{});
        });
    }

    void rotate_and_write(const LayerWeights& layer, S* kv_layer) {
        const Timed timed(ROPE);
        const int64_t dim = w_.head_dim, num_queries = w_.num_heads * dim, num_keys = w_.num_kv_heads * dim;
        const int64_t slot_size = 2 * num_keys;
        each_row([&](int64_t t) {
            S* row = m_.qkv.data() + t * qkv_size_;
            normalize_parts(row, num_queries, layer.q_norm);
            normalize_parts(row + num_queries, num_keys, layer.k_norm);
            if (layer.rope >= 0 && !layer.latent) {
                const float *cos = angles(m_.cos, layer.rope, t), *sin = angles(m_.sin, layer.rope, t);
                const int64_t half = w_.ropes[layer.rope].num_rotated / 2;
                for (int64_t at = 0; at < num_queries + num_keys; at += dim) rotate(row + at, half, cos, sin);
            }
            std::memcpy(kv_layer + rows_.write_slots[t] * slot_size, row + num_queries, slot_size * sizeof(S));
        });
    }

    static void normalize_parts(S* row, int64_t size, Norm norm) {
        if (!norm) return;
        for (int64_t at = 0; at < size; at += norm.size) {
            normalize(row + at, norm, row + at);
            norm.weight = static_cast<const S*>(norm.weight) + norm.stride;
            if (norm.bias) norm.bias = static_cast<const S*>(norm.bias) + norm.stride;
        }
    }

    void attend_layer(const LayerWeights& layer, const S* kv_layer) {
        const Plan& plan = plan_of(layer);
        const Timed timed(ATTENTION);
        const Queries<S> queries{m_.qkv.data(), qkv_size_, m_.attended.data(), m_.attended_stride,
                                 w_.attention_scale, w_.attention_cap, static_cast<const S*>(layer.sinks)};
        attend<S>(plan, shape_, queries, KvLayer<S>{kv_layer, w_.num_kv_heads, w_.head_dim}, m_.parts.data());
        const int64_t size = w_.num_heads * w_.head_dim;
        if (size == m_.attended_stride) return;
        each_row([&](int64_t t) { fill_up(m_.attended.data() + t * m_.attended_stride, size, m_.attended_stride); });
    }

    // Drops all rows except the sampled rows, so that the rest of the last layer is computed only for these.
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
    const Batch& batch_;
    const Adapters* adapters_;
    Activations<S>& m_;
    const HeadShape shape_;
    const int64_t qkv_size_, longest_;
    std::map<int64_t, Plan> plans_;  // by window
    int64_t num_;
    bool has_only_sampled_ = false;
};

}  // namespace agentflow
