// Products of a batch's rows with a weight, fused with the operations that follow: bias, activation, residual or gating.
#pragma once

#include <vector>

#include "activation.h"
#include "byte_products.h"
#include "product.h"
#include "quantised.h"
#include "team.h"

namespace agentflow {

// Adjacent panels that have the same format.
struct Segment {
    const void* panels;
    int64_t format, num_panels;
};

// W [num_out, num_in] in panels: column n of panel p is output 32 p + n, and outputs beyond the last are zero. In a gated
// weight, panel p holds 16 outputs of the gate projection, then the same 16 outputs of the up projection.
struct Weight {
    static constexpr int MAX_SEGMENTS = 3;
    Segment segments[MAX_SEGMENTS];  // all panels in order; the matrices of one weight may differ in format
    const void* bias;  // [num_out] of type S, or null
    int64_t num_in, num_out;
};

// The place of a row of a gated weight: the two halves are interleaved in groups of 16.
constexpr int64_t gated_place(int64_t n, int64_t half) {
    const int64_t i = n % half;
    return i / LANES * PANEL + i % LANES + (n < half ? 0 : LANES);
}

struct PanelPlace {
    const void* start;
    int64_t format;
};

template <class S>
PanelPlace panel_of(const Weight& weight, int64_t panel) {
    for (const Segment& segment : weight.segments) {
        if (panel >= segment.num_panels) {
            panel -= segment.num_panels;
            continue;
        }
        const int64_t bytes = segment.format == DENSE ? padded_depth<S>(weight.num_in) * PANEL * int64_t(sizeof(S))
                                                      : weight.num_in / GROUP * group_bytes(segment.format);
        return {static_cast<const uint8_t*>(segment.panels) + panel * bytes, segment.format};
    }
    throw std::out_of_range("the weight has no such panel");
}

// Depths `begin` to `begin` + `depth` (exclusive) of a panel, in the form that products of type S read. `begin`: a multiple of
// GROUP.
template <class S>
const S* dense_panel(const PanelPlace& place, int64_t begin, int64_t depth, std::vector<S>& buffer) {
    if (place.format == DENSE) return static_cast<const S*>(place.start) + begin * PANEL;
    grow(buffer, depth * PANEL);
    with_format(place.format, [&](auto format) {
        constexpr WeightFormat F = decltype(format)::value;
        const uint8_t* groups = static_cast<const uint8_t*>(place.start) + begin / GROUP * Codes<F>::BYTES;
        widen_panel<S, F>(groups, depth / GROUP, buffer.data());
    });
    return buffer.data();
}

inline bool is_quantised(const Weight& weight) { return weight.segments[0].format != DENSE; }

// Rows `first` to `first` + `num` (exclusive) of a batch, which are multiplied with one weight. The portions of a product divide its
// rows in order, and their weights have the same shape. One loop computes all portions, because the threads wait for each other at
// the end of a loop, and the products of single experts are short.
struct Portion {
    const Weight* weight;
    int64_t first, num;
};

using Portions = std::vector<Portion>;

inline int64_t num_panels_of(const Weight& weight) { return (weight.num_out + PANEL - 1) / PANEL; }

// How a product is divided. A *unit*, which one thread computes, is a block of rows times one panel. If the private cache of
// a core would hold only a few rows of a deep product, a unit has more rows and processes the depth in slices, so that a panel
// is read from memory once for all rows of the unit (Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix
// Multiplication", section 4). A product of a few rows reads each panel once in any case.
struct Division {
    static constexpr int64_t ROW_BLOCK_BYTES = 448 * 1024;  // the bytes of rows that fit a core's private cache, with the panels
    static constexpr int64_t SLICED_ROWS = 192;             // the number of rows of a unit that processes the depth in slices

    int64_t depth;  // of the product
    int64_t block_rows, num_blocks, slice_depth;

    // `few`: the fewest rows for which reading a panel pays off. The rows of a block are a multiple of few / 4.
    Division(int64_t num_rows, int64_t depth, int64_t value_bytes, int64_t few) : depth(depth) {
        const int64_t fitting = ROW_BLOCK_BYTES / (depth * value_bytes) / (few / 4) * (few / 4);
        const bool is_whole = fitting >= few || num_rows <= few;
        block_rows = is_whole ? std::max(fitting, few) : std::min(num_rows, SLICED_ROWS);
        num_blocks = (num_rows + block_rows - 1) / block_rows;
        const int64_t num_slices = is_whole ? 1 : block_rows * depth * value_bytes / ROW_BLOCK_BYTES + 1;
        slice_depth = is_whole ? depth : round_up<int64_t>(depth / num_slices, GROUP);
    }
};

// The rows and the panel of a unit, for a part of the depth.
struct Slice {
    const Weight* weight;
    int64_t first_row, num_rows, panel, begin, depth;  // `begin`, `depth`: the part of the depth
    float* sums;  // the sums of the rows over the slices before this one
    int64_t stride;  // floats between the sums of two rows; 0: all tiles may use the same memory
    bool is_first, is_last;  // among the unit's slices
};

// Calls body for each slice of a product, on the team's threads. Each thread holds an InUse during its calls. `divide` returns
// the Division for a number of rows.
template <class InUse, class Divide, class Body>
void each_slice(const Portions& portions, int64_t num_panels, const Divide& divide, const Body& body) {
    struct Round {
        const Portion* portion;
        Division by;
        int64_t block;
    };
    std::vector<Round> rounds;
    for (const Portion& portion : portions) {
        const Division by = divide(portion.num);
        for (int64_t block = 0; block < by.num_blocks; block++) rounds.push_back({&portion, by, block});
    }
    team().loop_at_homes(int64_t(rounds.size()), num_panels, [&](Team::Units units) {
        static thread_local std::vector<float> sums;
        const InUse in_use;
        while (units()) {
            const auto& [portion, by, block] = rounds[units.round()];
            const bool is_whole = by.slice_depth == by.depth;
            grow(sums, ((is_whole ? 0 : by.block_rows) + MAX_TILE_ROWS) * PANEL);
            const int64_t row = portion->first + block * by.block_rows, panel = units.item();
            const int64_t num = std::min(by.block_rows, portion->first + portion->num - row);
            for (int64_t begin = 0; begin < by.depth; begin += by.slice_depth) {
                const int64_t depth = std::min(by.slice_depth, by.depth - begin);
                body(Slice{portion->weight, row, num, panel, begin, depth, sums.data(), is_whole ? 0 : PANEL, begin == 0,
                           begin + depth == by.depth});
            }
        }
    });
}

// Receives the tiles of a product: (weight, first row, number of rows, panel, sums [rows][PANEL]). Holds a reference to a body,
// which must outlive it. Products are compiled once for all bodies, because they have many variants.
class PutTile {
  public:
    template <class Body>
    PutTile(const Body& body)
        : body_(&body), call_([](const void* of, const Weight& weight, int64_t row, int num, int64_t panel, const float* sums) {
              (*static_cast<const Body*>(of))(weight, row, num, panel, sums);
          }) {}
    void operator()(const Weight& weight, int64_t row, int num, int64_t panel, const float* sums) const {
        call_(body_, weight, row, num, panel, sums);
    }

  private:
    const void* body_;
    void (*call_)(const void*, const Weight&, int64_t, int, int64_t, const float*);
};

#if defined(__AVX512VNNI__)
// The most rows that are multiplied as bytes. With AMX, bfloat16 tiles are faster, but only for many rows, because they need a
// converted panel: a step of the default model in Q4_1 on two cores of a Xeon took 8.2 ms with bytes and 22.4 ms with tiles for 4
// rows, 21.2 and 29.8 for 16, 37 and 41 for 32, 1,582 and 831 for 2,000.
inline int64_t max_byte_rows() {
#if defined(AGENTFLOW_TILES)
    constexpr int64_t BESIDE_TILES = 32;
    if (allow_tiles()) return BESIDE_TILES;
#endif
    return std::numeric_limits<int64_t>::max();
}

// `multiply` for quantised weights. Quantises the rows too.
template <class Row>
void multiply_bytes(const Row* rows, int64_t stride, const Portions& portions, int64_t num_panels, const PutTile& put) {
    struct Nothing {
        Nothing() {}
    };
    const int64_t num_rows = portions.back().first + portions.back().num, depth = portions[0].weight->num_in;
    ByteRows& bytes = byte_rows();
    bytes.fit(num_rows, depth);
    team().loop(num_rows, 8, [&](int64_t first, int64_t end, int) {
        for (int64_t t = first; t < end; t++) bytes.set(t, rows + t * stride);
    });
    const auto divide = [&](int64_t num) { return Division(num, depth, 1, 8 * MAX_BYTE_ROWS); };
    each_slice<Nothing>(portions, num_panels, divide, [&](const Slice& slice) {
        const PanelPlace place = panel_of<bf16>(*slice.weight, slice.panel);
        with_format(place.format, [&](auto format) {
            constexpr WeightFormat F = decltype(format)::value;
            const int64_t group = slice.begin / GROUP;
            const uint8_t* codes = static_cast<const uint8_t*>(place.start) + group * Codes<F>::BYTES;
            multiply_panel<F>(bytes.at(slice.first_row, group), slice.num_rows, codes, slice.depth / GROUP, slice.sums, slice.stride,
                              !slice.is_first, [&](int64_t row, int num, const float* sums) {
                                  if (slice.is_last) put(*slice.weight, slice.first_row + row, num, slice.panel, sums);
                              });
        });
    });
}
#endif

// `multiply` for dense weights, and for quantised weights that are converted to S.
template <class S>
void multiply_dense(const RowOf<S>* rows, int64_t stride, const Portions& portions, int64_t num_panels, const PutTile& put) {
    const int64_t depth = padded_depth<S>(portions[0].weight->num_in);
    const auto divide = [&](int64_t num) { return Division(num, depth, sizeof(RowOf<S>), 4 * max_rows<S>()); };
    each_slice<TilesInUse>(portions, num_panels, divide, [&](const Slice& slice) {
        static thread_local std::vector<S> widened;
        const bool is_streamed = !is_quantised(*slice.weight);  // otherwise `columns` are in the cache already
        const S* columns = dense_panel<S>(panel_of<S>(*slice.weight, slice.panel), slice.begin, slice.depth, widened);
        const auto multiply_tile = [&](int64_t at, int num) {
            const int64_t row = slice.first_row + at;
            float* sums = slice.sums + at * slice.stride;
            tile<S>(num, rows + row * stride + slice.begin, stride, columns, slice.depth, sums, !slice.is_first,
                    is_streamed && at == 0);
            if (slice.is_last) put(*slice.weight, row, num, slice.panel, sums);
        };
        if (is_streamed) each_tile_of_new_panel<S>(slice.num_rows, multiply_tile);
        else each_tile<S>(slice.num_rows, multiply_tile);
    });
}

// Calls put for every tile of a product, in `num_panels` panels. `rows` must be followed by readable memory for MAX_TILE_ROWS
// more rows. `stride`: 0 if all rows are the same.
template <class S>
void multiply(const RowOf<S>* rows, int64_t stride, const Portions& portions, int64_t num_panels, const PutTile& put) {
#if defined(__AVX512VNNI__)
    if constexpr (std::is_same_v<S, bf16>) {
        Portions as_bytes, as_dense;
        for (const Portion& portion : portions) {
            (is_quantised(*portion.weight) && portion.num <= max_byte_rows() ? as_bytes : as_dense).push_back(portion);
        }
        if (!as_bytes.empty()) multiply_bytes(rows, stride, as_bytes, num_panels, put);
        if (!as_dense.empty()) multiply_dense<S>(rows, stride, as_dense, num_panels, put);
        return;
    }
#endif
    multiply_dense<S>(rows, stride, portions, num_panels, put);
}

// Adds the bias to LANES sums of one row.
template <class S>
ALWAYS_INLINE Vec biased(const float* sums, const Weight& weight, int64_t column, int num) {
    Vec value = load(sums);
    if (weight.bias) value = add(value, load_first(static_cast<const S*>(weight.bias) + column, num));
    return value;
}

// `value` rounded to S; with `added`, their sum, also rounded to S.
template <class S>
ALWAYS_INLINE Vec changed(Vec value, const S* added, int num) {
    const Vec product = rounded<S>(value);
    return added ? rounded<S>(add(product, load_first(added, num))) : product;
}

template <class S>
ALWAYS_INLINE const S* place_in(const S* added, int64_t place) {
    return added ? added + place : nullptr;
}

template <class S, class Put>
ALWAYS_INLINE void each_vec(const float* sums, const Weight& weight, int64_t panel, const Put& put) {
    for (int v = 0; v < 2; v++) {
        const int64_t column = panel * PANEL + v * LANES;
        const int num = int(std::min<int64_t>(LANES, weight.num_out - column));
        if (num > 0) put(column, num, biased<S>(sums + v * LANES, weight, column, num));
    }
}

// out [num_rows][num_out] of type Out = rows W^T + b, or its activation, which is rounded to S. `added` [num_rows][num_out], here
// and below: a summand of the product, which is rounded to S before; null: nothing is added.
template <class S, class Out>
void linear(const RowOf<S>* rows, int64_t stride, const Portions& portions, Out* out, int64_t out_stride, const S* added = nullptr,
            Activation activation = NUM_ACTIVATIONS) {
    const bool is_activated = activation != NUM_ACTIVATIONS;
    const auto put = [&](const Weight& weight, int64_t row, int num, int64_t panel, const float* sums) {
        for (int i = 0; i < num; i++) {
            each_vec<S>(sums + i * PANEL, weight, panel, [&](int64_t column, int width, Vec value) {
                const S* change = place_in(added, (row + i) * weight.num_out + column);
                if (change || is_activated) value = changed<S>(value, change, width);
                if (is_activated) value = activated<S>(activation, value);
                store_first(out + (row + i) * out_stride + column, value, width);
            });
        }
    };
    multiply<S>(rows, stride, portions, num_panels_of(*portions[0].weight), put);
}

template <class S, class Out>
void linear(const RowOf<S>* rows, int64_t stride, int64_t num_rows, const Weight& weight, Out* out,
            int64_t out_stride, const S* added = nullptr, Activation activation = NUM_ACTIVATIONS) {
    linear<S>(rows, stride, {{&weight, 0, num_rows}}, out, out_stride, added, activation);
}

// How logits follow from the products of the head: scaled, then capped.
struct LogitMap {
    float scale, cap;  // a cap of 0: no cap
};

// logits [num_rows][num_out] = rows W^T + b, scaled and capped. Writes the highest logit of each panel to highest
// [num_rows][panels], or infinity if a logit is NaN, so that the choice of tokens need not read all logits again.
template <class S>
void head_linear(const RowOf<S>* rows, int64_t stride, int64_t num_rows, const Weight& weight, LogitMap by, float* logits,
                 float* highest) {
    const int64_t num_panels = num_panels_of(weight);
    const auto put = [&](const Weight&, int64_t row, int num, int64_t panel, const float* sums) {
        for (int64_t i = 0; i < num; i++) {
            Vec most = broadcast(MINUS_INFINITY);
            uint32_t are_numbers = 0xFFFF;
            each_vec<S>(sums + i * PANEL, weight, panel, [&](int64_t column, int width, Vec value) {
                if (by.scale != 1) value = mul(value, broadcast(by.scale));
                if (by.cap != 0) value = capped(value, 1, by.cap);
                store_first(logits + (row + i) * weight.num_out + column, value, width);
                value = first_lanes(value, width, MINUS_INFINITY);
                are_numbers &= at_least(value, broadcast(MINUS_INFINITY));
                most = max(most, value);
            });
            highest[(row + i) * num_panels + panel] = are_numbers == 0xFFFF ? largest(most) : -MINUS_INFINITY;
        }
    };
    multiply<S>(rows, stride, {{&weight, 0, num_rows}}, num_panels, put);
}

// residual += rows W^T + b; the product and the sum are each rounded to S.
template <class S>
void linear_add(const RowOf<S>* rows, int64_t stride, int64_t num_rows, const Weight& weight, S* residual,
                int64_t residual_stride, const S* added = nullptr) {
    const auto put = [&](const Weight&, int64_t row, int num, int64_t panel, const float* sums) {
        for (int i = 0; i < num; i++) {
            each_vec<S>(sums + i * PANEL, weight, panel, [&](int64_t column, int width, Vec value) {
                S* place = residual + (row + i) * residual_stride + column;
                const S* change = place_in(added, (row + i) * weight.num_out + column);
                store_first(place, add(load_first(place, width), changed<S>(value, change, width)), width);
            });
        }
    };
    multiply<S>(rows, stride, {{&weight, 0, num_rows}}, num_panels_of(weight), put);
}

// out [num_rows][num_out / 2] = activation(rows Wg^T) * (rows Wu^T) for a gated weight. Both products, the activation and
// the result are each rounded to S.
template <class S, class Out>
void gated_linear(const RowOf<S>* rows, int64_t stride, const Portions& portions, Activation activation, Out* out, int64_t out_stride,
                  const S* added = nullptr) {
    const int64_t num_out = portions[0].weight->num_out, half = num_out / 2;
    const auto put = [&](const Weight& weight, int64_t row, int num, int64_t panel, const float* sums) {
        const int64_t column = panel * LANES;  // of both halves; the last panel may be padded
        const int width = int(std::min<int64_t>(LANES, half - column));
        for (int i = 0; i < num; i++) {
            const S* change = place_in(added, (row + i) * num_out + column);
            const Vec g = changed<S>(biased<S>(sums + i * PANEL, weight, column, width), change, width);
            const Vec u = changed<S>(biased<S>(sums + i * PANEL + LANES, weight, half + column, width), place_in(change, half), width);
            store_first(out + (row + i) * out_stride + column, gated<S>(activation, g, u), width);
        }
    };
    multiply<S>(rows, stride, portions, (half + LANES - 1) / LANES, put);
}

template <class S, class Out>
void gated_linear(const RowOf<S>* rows, int64_t stride, int64_t num_rows, const Weight& weight, Activation activation, Out* out,
                  int64_t out_stride, const S* added = nullptr) {
    gated_linear<S>(rows, stride, {{&weight, 0, num_rows}}, activation, out, out_stride, added);
}

// Row n of W, [num_in].
template <class S>
void row_of(const Weight& weight, int64_t n, S* out) {
    if (n < 0 || n >= weight.num_out) throw std::out_of_range("there is no row " + std::to_string(n));
    const PanelPlace place = panel_of<S>(weight, n / PANEL);
    const int column = int(n % PANEL);
    if (place.format == DENSE) {
        constexpr int PAIR = Format<S>::PAIR;
        const S* panel = static_cast<const S*>(place.start) + column * PAIR;
        for (int64_t k = 0; k < weight.num_in; k++) out[k] = panel[k / PAIR * PAIR * PANEL + k % PAIR];
        return;
    }
    static thread_local std::vector<float> row;
    grow(row, weight.num_in);
    with_format(place.format, [&](auto format) {
        widen_column<decltype(format)::value>(static_cast<const uint8_t*>(place.start), weight.num_in / GROUP, column, row.data());
    });
    for (int64_t k = 0; k < weight.num_in; k += LANES) store_first(out + k, load(row.data() + k), int(std::min<int64_t>(LANES, weight.num_in - k)));
}

// Zeroes `num` panels, from `first` on, of a weight with `num_in_weight` panels. Each panel is first touched on the NUMA node of
// the threads that will multiply with it.
inline void zero_panels(uint8_t* panels, int64_t first, int64_t num, int64_t num_in_weight, int64_t panel_bytes) {
    team().loop_at_homes(1, num_in_weight, [&](Team::Units units) {
        while (units()) {
            const int64_t panel = units.item() - first;
            if (panel >= 0 && panel < num) std::memset(panels + panel * panel_bytes, 0, panel_bytes);
        }
    });
}

// Writes W [num_out, num_in] to `panels`, which must be zeroed. `gated`: the two halves of W's rows are interleaved in
// groups of 16.
template <class S>
void pack(const S* matrix, int64_t num_out, int64_t num_in, bool gated, S* panels) {
    constexpr int PAIR = Format<S>::PAIR;
    const int64_t depth = padded_depth<S>(num_in), half = num_out / 2;
    team().loop(num_out, 64, [&](int64_t first, int64_t end, int) {
        for (int64_t n = first; n < end; n++) {
            const int64_t place = gated ? gated_place(n, half) : n;
            S* panel = panels + place / PANEL * PANEL * depth + place % PANEL * PAIR;
            const S* row = matrix + n * num_in;
            for (int64_t k = 0; k < num_in; k++) panel[k / PAIR * PAIR * PANEL + k % PAIR] = row[k];
        }
    });
}

}  // namespace agentflow
