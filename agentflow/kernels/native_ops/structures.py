"""The arguments of the native kernels as ctypes structures, with the fields of the structs in ``native/*.h``,
functions that fill them in, and the signatures of the library's functions.

A structure points to arrays and weights, which must outlive it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.activations import ACTIVATIONS
from agentflow.kernels.decoder_weights import DecoderWeights, Experts, LatentWeights, LayerWeights, Mlp, Norm
from agentflow.kernels.inputs import (
    Adapter,
    AttentionBatch,
    ChoiceRows,
    ForwardInput,
    Likelihoods,
    LinearWeight,
    LowRank,
)

# In the order of quantised.h.
PANEL_FORMATS = ("dense", "int4", "int4_min", "int4_table", "int5", "int5_min", "int6", "int8")
# The types of blocks that can be packed, by ggml's names, in the order of gguf_blocks.h.
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
LANES, PANEL = 16, 32
MAX_SEGMENTS = 3
MAX_ROPES = 2


class NativeSegment(Structure):
    _fields_ = (("panels", c_void_p), ("format", c_int64), ("num_panels", c_int64))


class NativeWeight(Structure):
    _fields_ = (
        ("segments", NativeSegment * MAX_SEGMENTS),
        ("bias", c_void_p),
        ("num_in", c_int64),
        ("num_out", c_int64),
    )


class NativeNorm(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("size", c_int64),
        ("eps", c_float),
        ("is_less_one", c_int32),
        ("stride", c_int64),
    )


class NativeRope(Structure):
    _fields_ = (("frequencies", c_void_p), ("num_rotated", c_int64), ("amplitude", c_float))


class NativeMlp(Structure):
    _fields_ = (("gate_up", NativeWeight), ("down", NativeWeight))


class NativeExperts(Structure):
    _fields_ = (
        ("router", NativeWeight),
        ("num", c_int64),
        ("experts", POINTER(NativeMlp)),
        ("shared", POINTER(NativeMlp)),
        ("num_used", c_int64),
        ("normalises", c_int64),
        ("scale", c_float),
        ("num_groups", c_int64),
        ("num_used_groups", c_int64),
    )


class NativeLatent(Structure):
    _fields_ = (
        ("down", NativeWeight),
        ("q_norm", NativeNorm),
        ("q_up", NativeWeight),
        ("kv_norm", NativeNorm),
        ("key_up", POINTER(NativeWeight)),
        ("value_up", POINTER(NativeWeight)),
        ("num_heads", c_int64),
        ("kv_rank", c_int64),
        ("plain_dim", c_int64),
        ("rotated_dim", c_int64),
        ("value_dim", c_int64),
    )


class NativeLayer(Structure):
    _fields_ = (
        ("input_norm", NativeNorm),
        ("qkv", NativeWeight),
        ("latent", POINTER(NativeLatent)),
        ("q_norm", NativeNorm),
        ("k_norm", NativeNorm),
        ("sinks", c_void_p),
        ("output", NativeWeight),
        ("attention_norm", NativeNorm),
        ("mlp_norm", NativeNorm),
        ("mlp", NativeMlp),
        ("experts", POINTER(NativeExperts)),
        ("output_norm", NativeNorm),
        ("window", c_int64),
        ("rope", c_int64),
    )


class NativeDecoder(Structure):
    _fields_ = (
        ("vocab_size", c_int64),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("embedding", NativeWeight),
        ("embedding_scale", c_float),
        ("positions", c_void_p),
        ("position_offset", c_int64),
        ("num_positions", c_int64),
        ("final_norm", NativeNorm),
        ("ropes", NativeRope * MAX_ROPES),
        ("num_ropes", c_int64),
        ("attention_scale", c_float),
        ("attention_cap", c_float),
        ("logit_scale", c_float),
        ("logit_cap", c_float),
        ("activation", c_int64),
        ("is_gated", c_int64),
        ("is_parallel", c_int64),
        ("layers", POINTER(NativeLayer)),
        ("first_token", c_int64),
        ("rank_sum", c_void_p),
        ("rank_context", c_void_p),
    )


class NativeLowRankPart(Structure):
    _fields_ = (("up", NativeWeight), ("first_output", c_int64))


class NativeLowRank(Structure):
    _fields_ = (("down", NativeWeight), ("num_parts", c_int64), ("parts", NativeLowRankPart * MAX_SEGMENTS))


class NativeLayerAdapter(Structure):
    _fields_ = tuple((name, NativeLowRank) for name in ("qkv", "output", "gate_up", "down"))


class NativeChangedRows(Structure):
    _fields_ = (("change", POINTER(NativeLowRank)), ("rows", c_void_p), ("num_rows", c_int64))


class NativeAdapterRows(Structure):
    _fields_ = (
        ("layers", POINTER(NativeLayerAdapter)),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("sampled", c_void_p),
        ("num_sampled", c_int64),
    )


class NativeAdapters(Structure):
    _fields_ = (("num", c_int64), ("rows", POINTER(NativeAdapterRows)))


class NativeInputRows(Structure):
    _fields_ = (
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("write_slots", c_void_p),
        ("num_sampled", c_int64),
        ("sampled", c_void_p),
        ("num_given", c_int64),
        ("given", c_void_p),
        ("embeddings", c_void_p),
        ("num_deep", c_int64),
        ("deep", c_void_p),
        ("angles", c_void_p),
    )


class NativeBatch(Structure):
    paths_array: NDArray[Any] | None = None  # kept alive: the structure points to it
    _fields_ = (
        ("req_to_token", c_void_p),
        ("page_stride", c_int64),
        ("num_requests", c_int64),
        ("req_rows", c_void_p),
        ("query_lens", c_void_p),
        ("kv_lens", c_void_p),
        ("num_trees", c_int64),
        ("tree_req_rows", c_void_p),
        ("prefix_lens", c_void_p),
        ("tree_query_lens", c_void_p),
        ("paths", c_void_p),
        ("path_stride", c_int64),
        ("path_lens", c_void_p),
        ("both_ways", c_void_p),
    )


class NativeChoices(Structure):
    arrays: tuple[NDArray[Any], ...] = ()  # kept alive: the structure points to them
    _fields_ = (
        ("logits", c_void_p),
        ("num_rows", c_int64),
        ("vocab_size", c_int64),
        ("targets", c_void_p),
        ("temperatures", c_void_p),
        ("top_ps", c_void_p),
        ("min_ps", c_void_p),
        ("top_ks", c_void_p),
        ("uniforms", c_void_p),
        ("mask_places", c_void_p),
        ("mask_words", c_void_p),
        ("num_words", c_int64),
        ("highest", c_void_p),
    )


class NativeLikelihoods(Structure):
    _fields_ = (
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("num_top", c_int64),
        ("wants_top", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("num_scored", c_int64),
        ("scored_rows", c_void_p),
        ("scored_ids", c_void_p),
        ("scored_logprobs", c_void_p),
    )


class NativeWanted(Structure):
    _fields_ = (("choices", NativeChoices), ("likelihoods", NativeLikelihoods), ("tokens", c_void_p))


class NativeStatus(c_int):
    """The result of a function that can fail. Any value except 0 becomes an exception."""


FAILURES: dict[int, type[Exception]] = {1: MemoryError, 2: IndexError, 3: RuntimeError, 4: ConnectionError}

# The result and the arguments of each function of the library.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "af_failure": (c_char_p, []),
    "af_set_num_threads": (c_int, [c_int]),
    "af_panel_size": (c_int64, [c_int, c_int64, c_int64, c_int]),
    "af_pack": (NativeStatus, [c_int, c_void_p, c_int64, c_int64, c_int, c_void_p]),
    "af_zero_panels": (NativeStatus, [c_void_p, *4 * [c_int64]]),
    "af_block_panel_bytes": (c_int64, [c_int64, c_int64]),
    "af_block_format": (c_int64, [c_int64]),
    "af_pack_blocks": (NativeStatus, [c_int64, c_void_p, *4 * [c_int64], c_void_p]),
    "af_rows_of": (NativeStatus, [c_int, POINTER(NativeWeight), c_void_p, c_int64, c_void_p]),
    "af_linear": (
        NativeStatus,
        [c_int, c_void_p, c_int64, POINTER(NativeWeight), c_int, c_int64, c_int, *2 * [c_void_p]],
    ),
    "af_low_rank": (
        NativeStatus,
        [c_int, c_void_p, *2 * [c_int64], POINTER(NativeChangedRows), *2 * [c_int64], c_void_p],
    ),
    "af_norm": (
        NativeStatus,
        [c_int, c_void_p, *2 * [c_int64], *2 * [c_void_p], c_int64, c_float, c_void_p],
    ),
    "af_segment_attention": (
        NativeStatus,
        [
            *(c_int, c_void_p, c_int64, c_void_p, c_int64, c_void_p),
            *(*5 * [c_int64], c_float, c_void_p),
        ],
    ),
    "af_attention": (
        NativeStatus,
        [
            *(c_int, c_void_p, c_int64, c_void_p, POINTER(NativeBatch), *3 * [c_int64]),
            *(c_float, c_int64, c_float, *2 * [c_void_p]),
        ],
    ),
    "af_choose": (NativeStatus, [POINTER(NativeChoices), c_void_p]),
    "af_log_sums": (NativeStatus, [c_void_p, *2 * [c_int64], c_void_p]),
    "af_likeliest": (NativeStatus, [c_void_p, *3 * [c_int64], *2 * [c_void_p]]),
    "af_part_seconds": (None, [c_void_p]),
    "af_start_forward": (
        NativeStatus,
        [
            *(c_int, POINTER(NativeDecoder), POINTER(NativeInputRows), POINTER(NativeBatch)),
            *(POINTER(NativeAdapters), c_void_p, c_void_p),
            *(POINTER(NativeWeight), POINTER(NativeWanted)),
        ],
    ),
    "af_finish_forward": (NativeStatus, []),
    "af_ranks_memory": (c_int64, [c_int, c_int64]),
    "af_join_ranks": (c_void_p, [c_void_p, c_int, c_int, c_int64, c_double]),
    "af_leave_ranks": (None, [c_void_p]),
    "af_abort_ranks": (None, [c_void_p]),
    "af_add_in_pass": (c_int, [c_void_p, c_void_p, c_int64, c_int]),
    "af_add_over_ranks": (NativeStatus, [c_void_p, c_void_p, c_int64, c_int]),
    "af_gather_ranks": (NativeStatus, [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the functions of the library. A failing call raises one of ``FAILURES``."""

    def raised(status: NativeStatus, _function: Any, _arguments: Any) -> None:
        if status.value:
            raise FAILURES[status.value](library.af_failure().decode(errors="replace"))

    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        if result is NativeStatus:
            function.errcheck = raised
    return library


def array_address(array: NDArray[Any]) -> int:
    """Returns the address of an array, which must live until the call returns."""
    assert array.flags.c_contiguous
    try:  # five times as fast as the code below; each step needs 14 addresses
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    except (TypeError, ValueError):  # the array is read-only or empty
        place: int = array.__array_interface__["data"][0]
        return place


def native_weight(weight: LinearWeight) -> NativeWeight:
    num_out, num_in = weight.shape
    made = NativeWeight(bias=pointer(weight.bias), num_in=num_in, num_out=num_out)
    if weight.packed is not None:
        made.segments[0] = NativeSegment(
            weight.packed.data_ptr(), 0, -(-num_out // LANES)
        )  # gated weights are padded
    for number, part in enumerate(weight.quantised):
        place = PANEL_FORMATS.index(part.format)
        made.segments[number] = NativeSegment(part.panels.data_ptr(), place, part.num_panels)
    return made


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def native_norm(norm: Norm | None) -> NativeNorm:
    if norm is None:
        return NativeNorm()
    size = norm.weight.shape[-1]
    stride = size if norm.weight.ndim == 2 else 0
    return NativeNorm(pointer(norm.weight), pointer(norm.bias), size, norm.eps, norm.is_less_one, stride)


def native_mlp(mlp: Mlp) -> NativeMlp:
    return NativeMlp(native_weight(mlp.gate_up), native_weight(mlp.down))


def native_experts(given: Experts) -> NativeExperts:
    routing = given.routing
    return NativeExperts(
        native_weight(given.router),
        len(given.experts),
        (NativeMlp * len(given.experts))(*map(native_mlp, given.experts)),
        None if given.shared is None else ctypes.pointer(native_mlp(given.shared)),
        routing.num_used,
        routing.normalises,
        routing.scale,
        routing.num_groups,
        routing.num_used_groups,
    )


@dataclass(frozen=True)
class PackedHeads:
    """The matrices of a layer's latent attention, packed for each head."""

    key_up: Sequence[LinearWeight]  # [kv_rank, plain_dim] each
    value_up: Sequence[LinearWeight]  # [value_dim, kv_rank] each

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in (*self.key_up, *self.value_up))


def native_latent(latent: LatentWeights, packed: PackedHeads, rotated_dim: int) -> NativeLatent:
    q_norm = None if latent.q_norm is None else Norm(latent.q_norm, None, latent.eps)
    return NativeLatent(
        down=native_weight(latent.down),
        q_norm=native_norm(q_norm),
        q_up=NativeWeight() if latent.q_up is None else native_weight(latent.q_up),
        kv_norm=native_norm(Norm(latent.kv_norm, None, latent.eps)),
        key_up=(NativeWeight * len(packed.key_up))(*map(native_weight, packed.key_up)),
        value_up=(NativeWeight * len(packed.value_up))(*map(native_weight, packed.value_up)),
        num_heads=len(packed.key_up),
        kv_rank=latent.kv_rank,
        plain_dim=latent.plain_dim,
        rotated_dim=rotated_dim,
        value_dim=packed.value_up[0].shape[0],
    )


def native_layer(layer: LayerWeights, packed: PackedHeads | None, head_dim: int) -> NativeLayer:
    made = NativeLayer(
        input_norm=native_norm(layer.input_norm),
        qkv=native_weight(layer.qkv) if isinstance(layer.qkv, LinearWeight) else NativeWeight(),
        q_norm=native_norm(layer.q_norm),
        k_norm=native_norm(layer.k_norm),
        sinks=pointer(layer.sinks),
        output=native_weight(layer.output),
        attention_norm=native_norm(layer.attention_norm),
        mlp_norm=native_norm(layer.mlp_norm),
        output_norm=native_norm(layer.output_norm),
        window=layer.window,
        rope=-1 if layer.rope is None else layer.rope,
    )
    if packed is not None:
        assert isinstance(layer.qkv, LatentWeights)
        latent = native_latent(layer.qkv, packed, head_dim - layer.qkv.kv_rank)
        made.latent = ctypes.pointer(latent)
    if isinstance(layer.mlp, Mlp):
        made.mlp = native_mlp(layer.mlp)
    else:
        made.experts = ctypes.pointer(native_experts(layer.mlp))
    return made


def native_decoder(weights: DecoderWeights, heads: Sequence[PackedHeads | None]) -> NativeDecoder:
    """Returns a structure that points to the weights, which must outlive it. ``heads``: for each layer; None
    without latent attention."""
    hidden_size, part = weights.embedding.shape[1], weights.part
    layers = [
        native_layer(layer, packed, weights.head_dim)
        for layer, packed in zip(weights.layers, heads, strict=True)
    ]
    made = NativeDecoder(
        vocab_size=weights.embedding.shape[0] if part is None else part.vocab_size,
        num_layers=len(weights.layers),
        hidden_size=hidden_size,
        num_heads=weights.num_heads,
        num_kv_heads=weights.num_kv_heads,
        head_dim=weights.head_dim,
        embedding=native_weight(weights.embedding),
        embedding_scale=weights.embedding_scale,
        positions=pointer(weights.positions),
        position_offset=weights.position_offset,
        num_positions=0 if weights.positions is None else len(weights.positions),
        final_norm=native_norm(weights.final_norm),
        num_ropes=len(weights.ropes),
        attention_scale=weights.attention_scale,
        attention_cap=weights.attention_cap,
        logit_scale=weights.logit_scale,
        logit_cap=weights.logit_cap,
        activation=ACTIVATIONS.index(weights.activation),
        is_gated=weights.is_gated,
        is_parallel=weights.is_parallel,
        layers=(NativeLayer * len(layers))(*layers),
    )
    if part is not None:
        made.first_token = part.first_token
        made.rank_sum, made.rank_context = part.ranks.native_sum()
    for place, rope in enumerate(weights.ropes):
        made.ropes[place] = NativeRope(pointer(rope.frequencies), 2 * len(rope.frequencies), rope.amplitude)
    return made


def native_low_rank(change: LowRank | None) -> NativeLowRank:
    """Returns a structure that points to the weights, which must outlive it."""
    if change is None:
        return NativeLowRank()
    parts = [NativeLowRankPart(native_weight(part.up), part.first_output) for part in change.parts]
    made = NativeLowRank(native_weight(change.down), len(parts))
    made.parts[: len(parts)] = parts
    return made


def native_adapter(adapter: Adapter) -> Any:
    """Returns an array of one structure for each layer. The weights must outlive it."""
    layers = [
        NativeLayerAdapter(*map(native_low_rank, (layer.qkv, layer.output, layer.gate_up, layer.down)))
        for layer in adapter.layers
    ]
    return (NativeLayerAdapter * len(layers))(*layers)


def native_batch(batch: AttentionBatch) -> NativeBatch:
    """Returns a structure that points to the batch's arrays, which must outlive it."""
    table = batch.req_to_token
    assert table.dtype == np.int32
    assert table.strides[1] == 4
    made = NativeBatch(
        array_address(table) if table.flags.c_contiguous else table.__array_interface__["data"][0],
        table.strides[0] // 4,
        len(batch.req_rows),
        array_address(batch.req_rows),
        array_address(batch.query_lens),
        array_address(batch.kv_lens),
    )
    if batch.both_ways is not None:
        made.both_ways = array_address(batch.both_ways)
    trees = batch.trees
    if trees is not None:
        made.num_trees = len(trees.req_rows)
        made.tree_req_rows = array_address(trees.req_rows)
        made.prefix_lens = array_address(trees.prefix_lens)
        made.tree_query_lens = array_address(trees.query_lens)
        made.paths_array = np.ascontiguousarray(trees.paths)  # indexing may have left any memory order
        made.paths = array_address(made.paths_array)
        made.path_stride = made.paths_array.shape[1]
        made.path_lens = array_address(trees.path_lens)
    return made


def native_choices(rows: ChoiceRows, vocab_size: int) -> NativeChoices:
    """Returns a structure that points to the arrays, which must outlive it. ``logits`` is not set."""
    made = NativeChoices()
    fill_choices(made, rows, vocab_size)
    return made


def fill_choices(made: NativeChoices, rows: ChoiceRows, vocab_size: int) -> None:
    """Sets all fields of an empty structure except ``logits``, as in ``native_choices``."""
    made.num_rows, made.vocab_size = len(rows.targets), vocab_size
    made.targets = array_address(rows.targets)
    made.temperatures = array_address(rows.temperatures)
    made.top_ps = array_address(rows.top_ps)
    made.min_ps = array_address(rows.min_ps)
    made.top_ks = array_address(rows.top_ks)
    made.uniforms = array_address(rows.uniforms)
    if rows.masked_rows is not None and rows.mask_words is not None:
        places = np.full(len(rows.targets), -1, dtype=np.int64)
        places[rows.masked_rows] = np.arange(len(rows.masked_rows))
        made.arrays = (places, np.ascontiguousarray(rows.mask_words))
        made.mask_places, made.mask_words = map(array_address, made.arrays)
        made.num_words = rows.mask_words.shape[1]


def fill_likelihoods(made: NativeLikelihoods, given: Likelihoods) -> None:
    """Makes an empty structure point to the arrays, which must outlive it."""
    made.logprobs = array_address(given.logprobs)
    if given.ranks is not None:
        made.ranks = array_address(given.ranks)
    if given.top_ids is not None and given.top_logprobs is not None:
        made.num_top = given.top_ids.shape[1]
        made.top_ids, made.top_logprobs = array_address(given.top_ids), array_address(given.top_logprobs)
        if given.wants_top is not None:
            made.wants_top = array_address(given.wants_top)
    if given.scored_logprobs is not None:
        assert given.scored_rows is not None
        assert given.scored_ids is not None
        made.num_scored = len(given.scored_rows)
        made.scored_rows, made.scored_ids = map(array_address, (given.scored_rows, given.scored_ids))
        made.scored_logprobs = array_address(given.scored_logprobs)


def native_rows(given: ForwardInput, angles: NDArray[np.float32] | None) -> NativeInputRows:
    """Returns a structure that points to the arrays and tensors, which must outlive it. ``angles``
    [T, head_dim / 2]: the angles of the rope, if the positions differ between its axes."""
    made = NativeInputRows(
        len(given.token_ids),
        array_address(given.token_ids),
        array_address(given.positions),
        array_address(given.write_slots),
        len(given.rows),
        array_address(given.rows),
    )
    given_rows = given.given_rows
    if given_rows is not None:
        made.num_given, made.given = len(given_rows.rows), array_address(given_rows.rows)
        made.embeddings = given_rows.values.data_ptr()
        if given_rows.deep is not None:
            made.num_deep, made.deep = len(given_rows.deep), given_rows.deep.data_ptr()
    if angles is not None:
        made.angles = array_address(angles)
    return made
