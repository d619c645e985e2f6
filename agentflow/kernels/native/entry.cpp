// The functions that Python calls through ctypes (native_ops/). Functions that compute hold the team's lock while they
// run. `is_bf16`: values are bfloat16, otherwise float. A function that can fail returns a Status; no exception leaves
// the library.

#include <cstdio>
#include <memory>
#include <new>
#include <stdexcept>

#include "decoder.h"
#include "gguf_blocks.h"
#include "likelihoods.h"
#include "segments.h"

using namespace agentflow;

namespace {

// The keys of FAILURES in native_ops/structures.py.
enum Status : int { OK, OUT_OF_MEMORY, NO_SUCH_INDEX, FAILED, RANK_LOST };

thread_local char failure_text[256];

// Runs body. Returns its exception as a Status, with the message in failure_text.
template <class Body>
int guarded(const Body& body) {
    const auto failed = [](Status status, const char* text) {
        std::snprintf(failure_text, sizeof failure_text, "%s", text);
        return status;
    };
    constexpr const char* NO_MEMORY = "out of memory in the native kernels";
    try {
        body();
        return OK;
    } catch (const std::bad_alloc&) {
        return failed(OUT_OF_MEMORY, NO_MEMORY);
    } catch (const std::length_error&) {  // more than a vector can hold
        return failed(OUT_OF_MEMORY, NO_MEMORY);
    } catch (const std::out_of_range& error) {
        return failed(NO_SUCH_INDEX, error.what());
    } catch (const RankLost& error) {
        return failed(RANK_LOST, error.what());
    } catch (const std::exception& error) {
        return failed(FAILED, error.what());
    }
}

// Calls body with a value of the type S that `is_bf16` selects.
template <class Body>
void as_type(int is_bf16, const Body& body) {
    if (is_bf16) body(bf16{});
    else body(float{});
}

// Like as_type, but holds the team's lock and returns a Status.
template <class Body>
int with_team(int is_bf16, const Body& body) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(team().in_use);
        as_type(is_bf16, body);
    });
}

// Rows x [num][width] in the form that products read: type RowOf<S>, padded with zeros to a whole panel. Copies the rows
// only if they are not in this form.
template <class S>
class ReadableRows {
  public:
    const int64_t stride;

    ReadableRows(const S* x, int64_t num, int64_t width) : stride(round_up<int64_t>(width, PANEL)) {
        if constexpr (std::is_same_v<S, RowOf<S>>) {
            if (stride == width && num % ROWS_AT_ONCE == 0) {
                rows_ = x;
                return;
            }
        }
        copy_.reset(new RowOf<S>[(num + MAX_TILE_ROWS) * stride]);
        rows_ = copy_.get();
        team().loop(num, 16, [&](int64_t first, int64_t end, int) {
            for (int64_t t = first; t < end; t++) {
                RowOf<S>* to = copy_.get() + t * stride;
                copy_row(x + t * width, width, to);
                std::fill(to + width, to + stride, RowOf<S>{});
            }
        });
    }
    const RowOf<S>* data() const { return rows_; }

  private:
    std::unique_ptr<RowOf<S>[]> copy_;
    const RowOf<S>* rows_;
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The message of this thread's last call that failed.
EXPORT const char* af_failure() { return failure_text; }

// Returns the number of threads that could not be started since the last call.
EXPORT int af_set_num_threads(int num) { return team().set_num_threads(num); }

EXPORT int64_t af_panel_size(int is_bf16, int64_t num_out, int64_t num_in, int gated) {
    const int64_t num = gated ? round_up<int64_t>(num_out / 2, LANES) * 2 : num_out;
    return round_up<int64_t>(num, PANEL) * (is_bf16 ? padded_depth<bf16>(num_in) : num_in);
}

EXPORT int af_pack(int is_bf16, const void* matrix, int64_t num_out, int64_t num_in, int gated, void* panels) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        pack<S>(static_cast<const S*>(matrix), num_out, num_in, gated, static_cast<S*>(panels));
    });
}

EXPORT int af_zero_panels(void* panels, int64_t first, int64_t num, int64_t num_in_weight, int64_t panel_bytes) {
    return with_team(false, [&](auto) { zero_panels(static_cast<uint8_t*>(panels), first, num, num_in_weight, panel_bytes); });
}

// The bytes of a panel of blocks of one type.
EXPORT int64_t af_block_panel_bytes(int64_t type, int64_t num_in) {
    return num_in / GROUP * group_bytes(block_shape(type).format);
}

EXPORT int64_t af_block_format(int64_t type) { return block_shape(type).format; }

EXPORT int af_pack_blocks(int64_t type, const void* rows, int64_t num_rows, int64_t num_in, int64_t first,
                          int64_t gated_half, void* panels) {
    return with_team(false, [&](auto) {
        pack_blocks(type, static_cast<const uint8_t*>(rows), num_rows, num_in, first, gated_half, static_cast<uint8_t*>(panels));
    });
}

// Writes rows `ids` of a weight to out [num_ids][num_in] of type S.
EXPORT int af_rows_of(int is_bf16, const Weight* weight, const int64_t* ids, int64_t num_ids, void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        for (int64_t i = 0; i < num_ids; i++) row_of<S>(*weight, ids[i], static_cast<S*>(out) + i * weight->num_in);
    });
}

// `out` has type S, or float if `exact`. `activation`: the Activation of the product, or of its gate if `gated`; NUM_ACTIVATIONS:
// none. `added` [num_rows][num_out] has type S, or is null.
EXPORT int af_linear(int is_bf16, const void* x, int64_t num_rows, const Weight* weight, int gated, int64_t activation, int exact,
                     const void* added, void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        const Timed timed(HEAD);
        const ReadableRows<S> rows(static_cast<const S*>(x), num_rows, weight->num_in);
        const int64_t stride = rows.stride;
        const S* change = static_cast<const S*>(added);
        if (gated) {
            gated_linear<S>(rows.data(), stride, num_rows, *weight, Activation(activation), static_cast<S*>(out), weight->num_out / 2,
                            change);
        } else if (exact) {
            linear<S>(rows.data(), stride, num_rows, *weight, static_cast<float*>(out), weight->num_out, change);
        } else {
            linear<S>(rows.data(), stride, num_rows, *weight, static_cast<S*>(out), weight->num_out, change, Activation(activation));
        }
    });
}

// Writes to out [num_rows][num_out] the sum that the changes add to a product of x [num_rows][num_in].
EXPORT int af_low_rank(int is_bf16, const void* x, int64_t num_rows, int64_t num_in, const ChangedRows* changes,
                       int64_t num_changes, int64_t num_out, void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        const ReadableRows<S> rows(static_cast<const S*>(x), num_rows, num_in);
        LowRankMemory<S> memory;
        const S* added = low_rank<S>(rows.data(), rows.stride, num_rows, num_out, {changes, changes + num_changes}, memory);
        std::copy_n(added, num_rows * num_out, static_cast<S*>(out));
    });
}

// `bias`: the bias of a layer norm; null: an RMS norm.
EXPORT int af_norm(int is_bf16, const void* x, int64_t num_rows, int64_t stride, const void* weight, const void* bias, int64_t size,
                   float eps, void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        const Norm norm{weight, bias, size, eps, 0, 0};
        team().loop(num_rows, 16, [&](int64_t first, int64_t end, int) {
            for (int64_t t = first; t < end; t++) normalize(static_cast<const S*>(x) + t * stride, norm, static_cast<S*>(out) + t * size);
        });
    });
}

// `window`, `cap`, `sinks`: as in LayerWeights and DecoderWeights.
EXPORT int af_attention(int is_bf16, const void* q, int64_t q_stride, const void* kv_layer, const Batch* batch,
                         int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float scale, int64_t window, float cap,
                         const void* sinks, void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        const HeadShape shape{num_heads, num_kv_heads, head_dim};
        const Plan plan(*batch, shape, team().num_threads(), window);
        const int64_t width = num_heads * head_dim;
        std::vector<float> parts(num_part_floats(plan, shape));
        std::vector<RowOf<S>> rows(plan.num_rows() * width);
        const Queries<S> queries{static_cast<const S*>(q), q_stride, rows.data(), width, scale, cap, static_cast<const S*>(sinks)};
        attend<S>(plan, shape, queries, {static_cast<const S*>(kv_layer), num_kv_heads, head_dim}, parts.data());
        for (int64_t t = 0; t < plan.num_rows(); t++) {
            copy_row(rows.data() + t * width, width, static_cast<S*>(out) + t * width);
        }
    });
}

// Like AttentionBackend.attend_segments. `starts`: [num_segments + 1]. The rows of q and kv may be parts of wider rows.
EXPORT int af_segment_attention(int is_bf16, const void* q, int64_t q_stride, const void* kv, int64_t kv_stride, const int64_t* starts,
                                int64_t num_segments, int64_t first, int64_t end, int64_t num_heads, int64_t head_dim, float scale,
                                void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        const SegmentRows<S> rows{static_cast<const S*>(q), q_stride, static_cast<S*>(out), first, end, num_heads, scale};
        attend_segments<S>(rows, {static_cast<const S*>(kv), num_heads, head_dim, kv_stride}, starts, num_segments);
    });
}

EXPORT int af_choose(const Choices* choices, int64_t* tokens) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(team().in_use);
        const Timed timed(CHOICE);
        choose(*choices, tokens);
    });
}

// Writes log(sum(exp(logit))) of each row of logits [num_rows][vocab_size].
EXPORT int af_log_sums(const float* logits, int64_t num_rows, int64_t vocab_size, float* out) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(team().in_use);
        const Timed timed(CHOICE);
        team().loop(num_rows, Team::ONE_BY_ONE, [&](int64_t first, int64_t end, int) {
            for (int64_t row = first; row < end; row++) out[row] = log_sum(logits + row * vocab_size, vocab_size);
        });
    });
}

// Writes the `num` highest logits of each row to `values`, and their tokens to `tokens`, each [num_rows][num].
EXPORT int af_likeliest(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t num, float* values, int64_t* tokens) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(team().in_use);
        const Timed timed(CHOICE);
        team().loop(num_rows, Team::ONE_BY_ONE, [&](int64_t first, int64_t end, int) {
            for (int64_t row = first; row < end; row++) {
                likeliest(logits + row * vocab_size, vocab_size, num, values + row * num, tokens + row * num);
            }
        });
    });
}

// Writes the seconds spent in each Part since the last call to out [NUM_PARTS].
EXPORT void af_part_seconds(double* out) {
    const std::lock_guard<std::mutex> lock(team().in_use);
    std::copy(part_seconds, part_seconds + NUM_PARTS, out);
    std::fill(part_seconds, part_seconds + NUM_PARTS, 0.0);
}

// Starts a forward pass. af_finish_forward ends it; all arguments must live until then. The pass writes the results that
// `wanted` selects; the caller may fill it in until it calls af_finish_forward. If `wanted` is null, the pass writes the normed
// hidden states of the sampled rows. `adapters`: null if no row uses one. If the status is not OK, no pass was started;
// NO_SUCH_INDEX means that a token or a position does not exist.
EXPORT int af_start_forward(int is_bf16, const DecoderWeights* weights, const Rows* rows, const Batch* batch,
                            const Adapters* adapters, void* const* kv_layers, void* hidden, const Weight* head,
                            const Wanted* wanted) {
    return guarded([&] {
        check_rows(*weights, *rows);
        std::unique_lock<std::mutex> lock(team().in_use);
        team().start([=] {
            as_type(is_bf16, [&](auto type) {
                using S = decltype(type);
                static Activations<S>* const memory = new Activations<S>;  // never destroyed, like the team
                Forward<S> forward(*weights, *rows, *batch, adapters, *memory);
                forward.run(kv_layers);
                if (wanted) forward.choose_tokens(*head, *wanted);
                else forward.write_hidden(static_cast<S*>(hidden));
            });
        });
        lock.release();
    });
}

// Works with the team until the forward pass is done. Must be called on the thread that started it.
EXPORT int af_finish_forward() {
    return guarded([] {
        const std::lock_guard<std::mutex> lock(team().in_use, std::adopt_lock);
        team().finish();
    });
}

EXPORT int64_t af_ranks_memory(int size, int64_t slot_bytes) { return SharedRanks::memory_bytes(size, slot_bytes); }

// Joins the ranks that share `memory`, which must outlive the result. After waiting `limit_s` seconds for a rank, the others count
// it as lost.
EXPORT void* af_join_ranks(void* memory, int rank, int size, int64_t slot_bytes, double limit_s) {
    return new (std::nothrow) SharedRanks(memory, rank, size, slot_bytes, limit_s);
}

EXPORT void af_leave_ranks(void* ranks) { delete static_cast<SharedRanks*>(ranks); }

// May be called on another thread.
EXPORT void af_abort_ranks(void* ranks) { static_cast<SharedRanks*>(ranks)->abort(); }

// The RankSum of SharedRanks. Only a forward pass calls it, because the caller must hold the team's lock.
EXPORT int af_add_in_pass(void* ranks, void* values, int64_t count, int is_bf16) {
    return guarded([&] {
        as_type(is_bf16, [&](auto type) {
            using S = decltype(type);
            static_cast<SharedRanks*>(ranks)->add(static_cast<S*>(values), count);
        });
    });
}

EXPORT int af_add_over_ranks(void* ranks, void* values, int64_t count, int is_bf16) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        static_cast<SharedRanks*>(ranks)->add(static_cast<S*>(values), count);
    });
}

EXPORT int af_gather_ranks(void* ranks, const float* part, int64_t num_rows, const int64_t* widths, float* out) {
    return guarded([&] { static_cast<SharedRanks*>(ranks)->gather(part, num_rows, widths, out); });
}
