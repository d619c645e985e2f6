"""The structures that Python and the native kernels share, field by field as in ``native/*.h``."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.choice_rows import ChoiceRows
from agentflow.kernels.decoder_weights import DecoderWeights, LayerWeights
from agentflow.kernels.inputs import AttentionBatch, IntArray
from agentflow.kernels.linear_weight import LinearWeight


class NativeWeight(Structure):
    _fields_ = (
        ("panels", c_void_p),
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
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("frequencies", c_void_p),
        ("layers", POINTER(NativeLayer)),
    )


class NativeRows(Structure):
    _fields_ = (
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("write_slots", c_void_p),
        ("num_sampled", c_int64),
        ("sampled", c_void_p),
    )


class NativeBatch(Structure):
    paths_array: NDArray[Any] | None = None  # that it refers to and nobody else holds
    _fields_ = (
        ("page_table", c_void_p),
        ("page_stride", c_int64),
        ("num_requests", c_int64),
        ("page_rows", c_void_p),
        ("query_lens", c_void_p),
        ("kv_lens", c_void_p),
        ("num_trees", c_int64),
        ("tree_page_rows", c_void_p),
        ("prefix_lens", c_void_p),
        ("tree_query_lens", c_void_p),
        ("paths", c_void_p),
        ("path_stride", c_int64),
        ("path_lens", c_void_p),
    )


class NativeChoices(Structure):
    arrays: tuple[NDArray[Any], ...] = ()  # that it refers to and nobody else holds
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
    """What a function returns that can fail; anything but 0 is raised."""


FAILURES: dict[int, type[Exception]] = {1: MemoryError, 2: IndexError, 3: RuntimeError}

SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "af_failure": (c_char_p, []),
    "af_set_num_threads": (c_int, [c_int]),
    "af_panel_size": (c_int64, [c_int, c_int64, c_int64, c_int]),
    "af_pack": (Status, [c_int, c_void_p, c_int64, c_int64, c_int, c_void_p]),
    "af_linear": (Status, [c_int, c_void_p, c_int64, POINTER(NativeWeight), c_int, c_int, c_void_p]),
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
            *(c_int, POINTER(NativeDecoder), POINTER(NativeRows), POINTER(NativeBatch), c_void_p),
            *(c_void_p, POINTER(NativeWeight), POINTER(NativeChoices), c_void_p),
        ],
    ),
    "af_finish_forward": (Status, []),
}
"""What a function of the library returns and takes."""


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Gives the library's functions their types. A call that returns a failure raises one of ``FAILURES``."""

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
    """Where an array begins. It must live until the call is over."""
    assert array.flags.c_contiguous
    place: int = array.__array_interface__["data"][0]
    return place


def native_weight(weight: LinearWeight) -> NativeWeight:
    assert weight.packed is not None
    num_out, num_in = weight.shape
    return NativeWeight(weight.packed.data_ptr(), _pointer(weight.bias), num_in, num_out)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def native_layer(layer: LayerWeights) -> NativeLayer:
    return NativeLayer(
        _pointer(layer.input_norm),
        native_weight(layer.qkv),
        _pointer(layer.q_norm),
        _pointer(layer.k_norm),
        native_weight(layer.output),
        _pointer(layer.mlp_norm),
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
        weights.embedding.data_ptr(),
        weights.final_norm.data_ptr(),
        weights.frequencies.data_ptr(),
        layers,
    )


def native_batch(batch: AttentionBatch) -> NativeBatch:
    """It refers to the batch's arrays, which must outlive it."""
    table = batch.page_table
    assert table.dtype == np.int32
    assert table.strides[1] == 4
    made = NativeBatch(
        table.__array_interface__["data"][0],  # rows may be apart
        table.strides[0] // 4,
        len(batch.page_rows),
        address(batch.page_rows),
        address(batch.query_lens),
        address(batch.kv_lens),
    )
    branches = batch.branches
    if branches is not None:
        made.num_trees = len(branches.page_rows)
        made.tree_page_rows = address(branches.page_rows)
        made.prefix_lens = address(branches.prefix_lens)
        made.tree_query_lens = address(branches.query_lens)
        made.paths_array = np.ascontiguousarray(branches.paths)  # made by indexing, in any order
        made.paths = address(made.paths_array)
        made.path_stride = made.paths_array.shape[1]
        made.path_lens = address(branches.path_lens)
    return made


def native_choices(rows: ChoiceRows, vocab_size: int) -> NativeChoices:
    """It refers to the arrays, which must outlive it. Where the logits are is not said yet."""
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


def native_rows(
    token_ids: IntArray, positions: IntArray, write_slots: IntArray, sampled: IntArray
) -> NativeRows:
    """It refers to the arrays, which must outlive it."""
    return NativeRows(
        len(token_ids),
        address(token_ids),
        address(positions),
        address(write_slots),
        len(sampled),
        address(sampled),
    )
