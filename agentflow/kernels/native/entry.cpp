// What Python calls, by ctypes (native_library.py). Every function takes the team for as long as it runs.
// `is_bf16`: whether values are bfloat16 or float. What can fail returns a Status; no exception leaves the library.

#include <cstdio>
#include <new>
#include <stdexcept>

#include "decoder.h"

using namespace agentflow;

namespace {

// As native_ops.FAILURES names them.
enum Status : int { OK, OUT_OF_MEMORY, NO_SUCH_INDEX, FAILED };

thread_local char failure_text[256];

// What body threw, as a status, with its text in failure_text.
template <class Body>
int guarded(const Body& body) {
    const auto failed = [](Status status, const char* text) {
        std::snprintf(failure_text, sizeof failure_text, "%s", text);
        return status;
    };
    constexpr const char* NO_MEMORY = "there is no memory for what the native kernels compute";
    try {
        body();
        return OK;
    } catch (const std::bad_alloc&) {
        return failed(OUT_OF_MEMORY, NO_MEMORY);
    } catch (const std::length_error&) {  // more than a vector can hold
        return failed(OUT_OF_MEMORY, NO_MEMORY);
    } catch (const std::out_of_range& error) {
        return failed(NO_SUCH_INDEX, error.what());
    } catch (const std::exception& error) {
        return failed(FAILED, error.what());
    }
}

// Calls body with a value of the type that values have.
template <class Body>
void as_type(int is_bf16, const Body& body) {
    if (is_bf16) body(bf16{});
    else body(float{});
}

// The same with the team.
template <class Body>
int with_team(int is_bf16, const Body& body) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(team().in_use);
        as_type(is_bf16, body);
    });
}

// Rows of any width as a product takes them: of its type, with zeros up to a whole panel.
template <class S>
std::vector<RowOf<S>> padded_rows(const S* x, int64_t num_rows, int64_t width, int64_t stride) {
    std::vector<RowOf<S>> rows((num_rows + MAX_TILE_ROWS) * stride);
    for (int64_t t = 0; t < num_rows; t++) copy_row(x + t * width, width, rows.data() + t * stride);
    return rows;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Of the last call of this thread that returned another status than OK.
EXPORT const char* af_failure() { return failure_text; }

// Returns how many threads could not be started since the last call.
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

// out: S, or float where `exact`. Of a gated weight the gated product.
EXPORT int af_linear(int is_bf16, const void* x, int64_t num_rows, const Weight* weight, int gated, int exact, void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        const int64_t stride = round_up<int64_t>(weight->num_in, PANEL);
        const Timed timed(HEAD);
        const auto rows = padded_rows(static_cast<const S*>(x), num_rows, weight->num_in, stride);
        if (gated) {
            gated_linear<S>(rows.data(), stride, num_rows, *weight, static_cast<S*>(out), weight->num_out / 2);
        } else if (exact) {
            linear<S>(rows.data(), stride, num_rows, *weight, static_cast<float*>(out), weight->num_out);
        } else {
            linear<S>(rows.data(), stride, num_rows, *weight, static_cast<S*>(out), weight->num_out);
        }
    });
}

EXPORT int af_rms_norm(int is_bf16, const void* x, int64_t num_rows, int64_t stride, const void* weight, int64_t size,
                        float eps, void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        for (int64_t t = 0; t < num_rows; t++) {
            rms_norm(static_cast<const S*>(x) + t * stride, static_cast<const S*>(weight), size, eps,
                     static_cast<S*>(out) + t * size);
        }
    });
}

EXPORT int af_attention(int is_bf16, const void* q, int64_t q_stride, const void* kv_layer, const Batch* batch,
                         int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float scale, void* out) {
    return with_team(is_bf16, [&](auto type) {
        using S = decltype(type);
        const HeadShape shape{num_heads, num_kv_heads, head_dim};
        const Plan plan(*batch, shape, team().num_threads());
        const int64_t width = num_heads * head_dim;
        std::vector<float> parts(num_part_floats(plan, shape));
        std::vector<RowOf<S>> rows(plan.num_rows() * width);
        const Queries<S> queries{static_cast<const S*>(q), q_stride, rows.data(), width, scale};
        attend<S>(plan, shape, queries, {static_cast<const S*>(kv_layer), num_kv_heads, head_dim}, parts.data());
        for (int64_t t = 0; t < plan.num_rows(); t++) {
            copy_row(rows.data() + t * width, width, static_cast<S*>(out) + t * width);
        }
    });
}

EXPORT int af_choose(const Choices* choices, int64_t* tokens) {
    return guarded([&] {
        const std::lock_guard<std::mutex> lock(team().in_use);
        const Timed timed(CHOICE);
        choose(*choices, tokens);
    });
}

// Seconds of each `Part` since the last call, to out [NUM_PARTS].
EXPORT void af_part_seconds(double* out) {
    const std::lock_guard<std::mutex> lock(team().in_use);
    std::copy(part_seconds, part_seconds + NUM_PARTS, out);
    std::fill(part_seconds, part_seconds + NUM_PARTS, 0.0);
}

// Begins a forward pass; af_finish_forward ends it, and until then all arguments must live. For the sampled rows it
// returns the tokens if `choices` is given, else the normed hidden states. With a status other than OK, nothing has
// begun: NO_SUCH_INDEX for a token that does not exist.
EXPORT int af_start_forward(int is_bf16, const DecoderWeights* weights, const Rows* rows, const Batch* batch,
                            void* const* kv_layers, void* hidden, const Weight* head, const Choices* choices,
                            int64_t* tokens) {
    return guarded([&] {
        check_tokens(*weights, *rows);
        std::unique_lock<std::mutex> lock(team().in_use);
        team().start([=] {
            as_type(is_bf16, [&](auto type) {
                using S = decltype(type);
                static Activations<S> memory;
                Forward<S> forward(*weights, *rows, *batch, memory);
                forward.run(kv_layers);
                if (choices) forward.choose_tokens(*head, *choices, tokens);
                else forward.write_hidden(static_cast<S*>(hidden));
            });
        });
        lock.release();
    });
}

// For the thread that began it, which works on it now.
EXPORT int af_finish_forward() {
    return guarded([] {
        const std::lock_guard<std::mutex> lock(team().in_use, std::adopt_lock);
        team().finish();
    });
}
