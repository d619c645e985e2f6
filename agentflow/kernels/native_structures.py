"""The arguments of the native kernels as ctypes structures, with the fields of the structs in ``native/*.h``;
the functions that fill them in; and the signatures of the library's functions.

A structure points to arrays and weights, which must outlive it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.inputs import (
    Adapter,
    AttentionBatch,
    ChoiceRows,
    DecoderWeights,
    ForwardInput,
    LayerWeights,
    LinearWeight,
    LowRank,
)

# In the order of quantised.h.
PANEL_FORMATS = ("dense", "int4", "int4_min", "int4_table", "int5", "int5_min", "int6", "int8")
# The types of blocks that can be packed, by ggml's names, in the order of gguf_blocks.h.
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL")
LANES, PANEL = 16, 32
MAX_SEGMENTS = 3


class NativeSegment(Structure):
    _fields_ = (("panels", c_void_p), ("format", c_int64), ("num_panels", c_int64))


class NativeWeight(Structure):
    _fields_ = (
        ("segments", NativeSegment * MAX_SEGMENTS),
        ("bias", c_void_p),
        ("num_in", c_int64),
        ("num_out", c_int64),
    )


class NativeLayer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", NativeWeight),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("output", NativeWeight),
        ("mlp_norm", c_void_p),
        ("gate_up", NativeWeight),
        ("down", NativeWeight),
    )


class NativeDecoder(Structure):
    _fields_ = (
        ("vocab_size", c_int64),
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("norm_eps", c_float),
        ("embedding", NativeWeight),
        ("final_norm", c_void_p),
        ("frequencies", c_void_p),
        ("layers", POINTER(NativeLayer)),
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


class NativeRows(Structure):
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
    arrays: tuple[NDArray[Any], ...] = ()  # kept alive: the structure points to it
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
    )


class Status(c_int):
    """The result of a function that can fail; anything but 0 becomes an exception."""


FAILURES: dict[int, type[Exception]] = {1: MemoryError, 2: IndexError, 3: RuntimeError}

# Results and arguments of the library's functions.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "af_failure": (c_char_p, []),
    "af_set_num_threads": (c_int, [c_int]),
    "af_panel_size": (c_int64, [c_int, c_int64, c_int64, c_int]),
    "af_pack": (Status, [c_int, c_void_p, c_int64, c_int64, c_int, c_void_p]),
    "af_zero_panels": (Status, [c_void_p, *4 * [c_int64]]),
    "af_block_panel_bytes": (c_int64, [c_int64, c_int64]),
    "af_block_format": (c_int64, [c_int64]),
    "af_pack_blocks": (Status, [c_int64, c_void_p, *4 * [c_int64], c_void_p]),
    "af_rows_of": (Status, [c_int, POINTER(NativeWeight), c_void_p, c_int64, c_void_p]),
    "af_linear": (Status, [c_int, c_void_p, c_int64, POINTER(NativeWeight), c_int, c_int, *2 * [c_void_p]]),
    "af_low_rank": (
        Status,
        [c_int, c_void_p, *2 * [c_int64], POINTER(NativeChangedRows), *2 * [c_int64], c_void_p],
    ),
    "af_rms_norm": (Status, [c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_float, c_void_p]),
    "af_attention": (
        Status,
        [c_int, c_void_p, c_int64, c_void_p, POINTER(NativeBatch), *3 * [c_int64], c_float, c_void_p],
    ),
    "af_choose": (Status, [POINTER(NativeChoices), c_void_p]),
    "af_part_seconds": (None, [c_void_p]),
    "af_start_forward": (
        Status,
        [
            *(c_int, POINTER(NativeDecoder), POINTER(NativeRows), POINTER(NativeBatch)),
            *(POINTER(NativeAdapters), c_void_p, c_void_p),
            *(POINTER(NativeWeight), POINTER(NativeChoices), c_void_p),
        ],
    ),
    "af_finish_forward": (Status, []),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the functions of the library. A call that fails raises one of ``FAILURES``."""

    def raised(status: Status, _function: Any, _arguments: Any) -> None:
        if status.value:
            raise FAILURES[status.value](library.af_failure().decode(errors="replace"))

    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        if result is Status:
            function.errcheck = raised
    return library


def address(array: NDArray[Any]) -> int:
    """Returns the address of an array, which must live until the call returns."""
    assert array.flags.c_contiguous
    place: int = array.__array_interface__["data"][0]
    return place


def native_weight(weight: LinearWeight) -> NativeWeight:
    num_out, num_in = weight.shape
    made = NativeWeight(bias=pointer(weight.bias), num_in=num_in, num_out=num_out)
    if weight.packed is not None:
        made.segments[0] = NativeSegment(
            weight.packed.data_ptr(), 0, -(-num_out // LANES)
        )  # gated ones are padded
    for number, part in enumerate(weight.quantised):
        place = PANEL_FORMATS.index(part.format)
        made.segments[number] = NativeSegment(part.panels.data_ptr(), place, part.num_panels)
    return made


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def native_layer(layer: LayerWeights) -> NativeLayer:
    return NativeLayer(
        pointer(layer.input_norm),
        native_weight(layer.qkv),
        pointer(layer.q_norm),
        pointer(layer.k_norm),
        native_weight(layer.output),
        pointer(layer.mlp_norm),
        native_weight(layer.gate_up),
        native_weight(layer.down),
    )


def native_decoder(weights: DecoderWeights) -> NativeDecoder:
    layers = (NativeLayer * len(weights.layers))(*map(native_layer, weights.layers))
    return NativeDecoder(
        weights.embedding.shape[0],
        len(weights.layers),
        weights.embedding.shape[1],
        weights.layers[0].down.shape[1],
        weights.num_heads,
        weights.num_kv_heads,
        weights.head_dim,
        weights.norm_eps,
        native_weight(weights.embedding),
        weights.final_norm.data_ptr(),
        weights.frequencies.data_ptr(),
        layers,
    )


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
        table.__array_interface__["data"][0],  # rows need not be adjacent
        table.strides[0] // 4,
        len(batch.req_rows),
        address(batch.req_rows),
        address(batch.query_lens),
        address(batch.kv_lens),
    )
    if batch.both_ways is not None:
        made.both_ways = address(batch.both_ways)
    trees = batch.trees
    if trees is not None:
        made.num_trees = len(trees.req_rows)
        made.tree_req_rows = address(trees.req_rows)
        made.prefix_lens = address(trees.prefix_lens)
        made.tree_query_lens = address(trees.query_lens)
        made.paths_array = np.ascontiguousarray(trees.paths)  # indexing may have left any memory order
        made.paths = address(made.paths_array)
        made.path_stride = made.paths_array.shape[1]
        made.path_lens = address(trees.path_lens)
    return made


def native_choices(rows: ChoiceRows, vocab_size: int) -> NativeChoices:
    """Returns a structure that points to the arrays, which must outlive it. ``logits`` is not set."""
    made = NativeChoices(None, len(rows.targets), vocab_size)
    made.targets = address(rows.targets)
    made.temperatures = address(rows.temperatures)
    made.top_ps = address(rows.top_ps)
    made.min_ps = address(rows.min_ps)
    made.top_ks = address(rows.top_ks)
    made.uniforms = address(rows.uniforms)
    if rows.masked_rows is not None and rows.mask_words is not None:
        places = np.full(len(rows.targets), -1, dtype=np.int64)
        places[rows.masked_rows] = np.arange(len(rows.masked_rows))
        made.arrays = (places, np.ascontiguousarray(rows.mask_words))
        made.mask_places, made.mask_words = map(address, made.arrays)
        made.num_words = rows.mask_words.shape[1]
    return made


def native_rows(given: ForwardInput, angles: NDArray[np.float32] | None) -> NativeRows:
    """Returns a structure that points to the arrays and tensors, which must outlive it. ``angles``
    [T, head_dim / 2]: of the rope, if its axes differ."""
    made = NativeRows(
        len(given.token_ids),
        address(given.token_ids),
        address(given.positions),
        address(given.write_slots),
        len(given.rows),
        address(given.rows),
    )
    embedded = given.given
    if embedded is not None:
        made.num_given, made.given = len(embedded.rows), address(embedded.rows)
        made.embeddings = embedded.values.data_ptr()
        if embedded.deep is not None:
            made.num_deep, made.deep = len(embedded.deep), embedded.deep.data_ptr()
    if angles is not None:
        made.angles = address(angles)
    return made
