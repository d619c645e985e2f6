"""The kernels in C++ (``native/``): a whole forward pass in one call, on a thread team of its own.

Weights are stored in the order in which the products read them, and Python does no work between the kernels.
The single functions run the same code, one kernel at a time, and are tested against the reference.

First come the ctypes structures and signatures, field by field as in ``native/*.h``; then the functions of
``ops.Kernels``; last, ``NativeForward``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels import torch_ops
from agentflow.kernels.inputs import (
    AttentionBatch,
    BlockMatrix,
    ChoiceRows,
    DecoderWeights,
    ForwardInput,
    IntArray,
    LayerWeights,
    LinearWeight,
    QuantisedPanels,
)
from agentflow.kernels.native_library import load_best

logger = logging.getLogger(__name__)


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
    "af_block_panel_bytes": (c_int64, [c_int64, c_int64]),
    "af_block_format": (c_int64, [c_int64]),
    "af_pack_blocks": (Status, [c_int64, c_void_p, *4 * [c_int64], c_void_p]),
    "af_rows_of": (Status, [c_int, POINTER(NativeWeight), c_void_p, c_int64, c_void_p]),
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
    made = NativeWeight(bias=_pointer(weight.bias), num_in=num_in, num_out=num_out)
    if weight.packed is not None:
        made.segments[0] = NativeSegment(
            weight.packed.data_ptr(), 0, -(-num_out // LANES)
        )  # gated ones are padded
    for number, part in enumerate(weight.quantised):
        place = PANEL_FORMATS.index(part.format)
        made.segments[number] = NativeSegment(part.panels.data_ptr(), place, part.num_panels)
    return made


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
        native_weight(weights.embedding),
        weights.final_norm.data_ptr(),
        weights.frequencies.data_ptr(),
        layers,
    )


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


def native_rows(
    token_ids: IntArray, positions: IntArray, write_slots: IntArray, sampled: IntArray
) -> NativeRows:
    """Returns a structure that points to the arrays, which must outlive it."""
    return NativeRows(
        len(token_ids),
        address(token_ids),
        address(positions),
        address(write_slots),
        len(sampled),
        address(sampled),
    )


@functools.cache
def _library_allowed(cpu: str) -> ctypes.CDLL:
    return declare(load_best())


def library() -> ctypes.CDLL:
    """Returns the compiled kernels for the level that ``AGENTFLOW_CPU`` allows. Raises
    ``NoNativeKernels``."""
    return _library_allowed(os.environ.get("AGENTFLOW_CPU", ""))


def _team() -> ctypes.CDLL:
    """Returns the library, with as many threads as torch has."""
    loaded = library()
    _set_num_threads(loaded)
    return loaded


def _set_num_threads(loaded: ctypes.CDLL) -> None:
    if num_missing := loaded.af_set_num_threads(torch.get_num_threads()):
        _warn_of_missing_threads(num_missing)


@functools.cache
def _warn_of_missing_threads(num_missing: int) -> None:
    """Warns once per number: every forward pass tries again."""
    logger.warning("cannot start %d of the kernels' threads: forward passes take longer", num_missing)


def _is_bf16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def pack_linear(
    weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
) -> LinearWeight:
    num_out, num_in = weight.shape
    team, weight = _team(), weight.contiguous()
    size = team.af_panel_size(_is_bf16(weight), num_out, num_in, gated)
    panels = torch.zeros(size, dtype=weight.dtype)
    team.af_pack(_is_bf16(weight), weight.data_ptr(), num_out, num_in, gated, panels.data_ptr())
    return LinearWeight(None, panels, bias, (num_out, num_in))


def pack_blocks(
    parts: Sequence[BlockMatrix], bias: Tensor | None, *, gated: bool = False
) -> LinearWeight | None:
    if not _are_packable(parts, gated):
        return None
    num_out, num_in = sum(part.shape[0] for part in parts), parts[0].shape[1]
    if gated:
        num_panels = -(-num_out // 2 // LANES)
        panels = _empty_panels(parts[0].type, num_panels, num_in)
        first = 0
        for part in parts:
            _pack_part(part, first, num_out // 2, panels)
            first += part.shape[0]
        return LinearWeight(None, None, bias, (num_out, num_in), (panels,))
    made = []
    for part in parts:
        made.append(_empty_panels(part.type, -(-part.shape[0] // PANEL), num_in))
        _pack_part(part, 0, 0, made[-1])
    return LinearWeight(None, None, bias, (num_out, num_in), tuple(made))


def _are_packable(parts: Sequence[BlockMatrix], gated: bool) -> bool:
    types = {part.type for part in parts}
    if not types.issubset(BLOCK_TYPES) or len(parts) > MAX_SEGMENTS:
        return False
    if gated:
        return len(types) == 1
    return all(part.shape[0] % PANEL == 0 for part in parts[:-1])


def _empty_panels(block_type: str, num_panels: int, num_in: int) -> QuantisedPanels:
    team, number = _team(), BLOCK_TYPES.index(block_type)
    panels = torch.zeros(num_panels * team.af_block_panel_bytes(number, num_in), dtype=torch.uint8)
    return QuantisedPanels(PANEL_FORMATS[team.af_block_format(number)], panels, num_panels)


def _pack_part(part: BlockMatrix, first: int, gated_half: int, to: QuantisedPanels) -> None:
    rows = np.ascontiguousarray(part.rows)
    number = BLOCK_TYPES.index(part.type)
    _team().af_pack_blocks(number, address(rows), *part.shape, first, gated_half, to.panels.data_ptr())


def pack_embedding(weight: Tensor, head: LinearWeight | None) -> LinearWeight:
    return pack_linear(weight, None) if head is None else head


def embed(token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    ids, is_bf16 = token_ids.contiguous(), dtype == torch.bfloat16
    out = torch.empty(len(ids), weight.shape[1], dtype=dtype)
    _team().af_rows_of(is_bf16, native_weight(weight), ids.data_ptr(), len(ids), out.data_ptr())
    return out


def linear(x: Tensor, weight: LinearWeight) -> Tensor:
    return _product(x, weight, x.new_empty(x.shape[0], weight.shape[0]))


def gated_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    return _product(x, weight, x.new_empty(x.shape[0], weight.shape[0] // 2), gated=True)


def exact_linear(x: Tensor, weight: LinearWeight) -> Tensor:
    return _product(x, weight, torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32), exact=True)


def _product(
    x: Tensor, weight: LinearWeight, out: Tensor, *, gated: bool = False, exact: bool = False
) -> Tensor:
    x = x.contiguous()
    _team().af_linear(
        _is_bf16(x), x.data_ptr(), x.shape[0], native_weight(weight), gated, exact, out.data_ptr()
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _team().af_rms_norm(
        _is_bf16(x),
        rows.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        weight.data_ptr(),
        rows.shape[1],
        eps,
        out.data_ptr(),
    )
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


# ``NativeForward`` does not use it; this one serves callers of single kernels.
rope_and_write = torch_ops.rope_and_write


def plan_attention(batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionBatch:
    return batch


def attention(q: Tensor, kv_layer: Tensor, plan: AttentionBatch, scale: float) -> Tensor:
    _, num_heads, head_dim = q.shape
    if q.stride()[1:] != (head_dim, 1):
        q = q.contiguous()
    out = q.new_empty(q.shape[0], num_heads * head_dim)
    _team().af_attention(
        _is_bf16(q),
        q.data_ptr(),
        q.stride(0),
        kv_layer.data_ptr(),
        native_batch(plan),
        num_heads,
        kv_layer.shape[2],
        head_dim,
        scale,
        out.data_ptr(),
    )
    return out


def choose(logits: Tensor, rows: ChoiceRows) -> IntArray:
    logits = logits.contiguous()
    tokens = np.empty(len(logits), dtype=np.int64)
    choices = native_choices(rows, logits.shape[1])
    choices.logits = logits.data_ptr()
    _team().af_choose(choices, address(tokens))
    return tokens


# The parts of a forward pass whose times are measured. ``head``: single products, such as the logits.
PARTS = ("plan", "embed", "norm", "qkv", "rope", "attention", "output", "gate_up", "down", "head", "choice")


def part_seconds() -> dict[str, float]:
    """Returns the seconds spent in each of ``PARTS`` since the last call, in all forward passes of the
    process."""
    seconds = (ctypes.c_double * len(PARTS))()
    library().af_part_seconds(seconds)
    return dict(zip(PARTS, seconds, strict=True))


class NativeForward:
    """``ops.Forward`` of the native kernels."""

    def __init__(self, weights: DecoderWeights, head: LinearWeight) -> None:
        self._weights, self._head = weights, head  # kept alive: the structures point to them
        self._decoder, self._native_head = native_decoder(weights), native_weight(head)
        self._library = library()  # the library that packed the weights
        self._is_bf16 = _is_bf16(weights.final_norm)
        self._layers: tuple[tuple[Tensor, ...], Any] = ((), None)  # the pool's layers and their addresses

    def hidden(self, given: ForwardInput, meanwhile: Callable[[], None]) -> Tensor:
        hidden_size = self._weights.embedding.shape[1]
        out = self._weights.final_norm.new_empty(len(given.rows), hidden_size)
        self._run(given, meanwhile, out.data_ptr(), None, None, None)
        return out

    def tokens(self, given: ForwardInput, choice: ChoiceRows, meanwhile: Callable[[], None]) -> IntArray:
        out = np.empty(len(given.rows), dtype=np.int64)
        choices = native_choices(choice, self._head.shape[0])
        self._run(given, meanwhile, None, self._native_head, choices, address(out))
        return out

    def _run(self, given: ForwardInput, meanwhile: Callable[[], None], *wanted: Any) -> None:
        if given.kv_layers is not self._layers[0]:
            addresses = [layer.data_ptr() for layer in given.kv_layers]
            self._layers = (given.kv_layers, (ctypes.c_void_p * len(addresses))(*addresses))
        _set_num_threads(self._library)
        # These must live until the forward pass has finished.
        rows = native_rows(given.token_ids, given.positions, given.write_slots, given.rows)
        batch = native_batch(given.plan)
        self._library.af_start_forward(self._is_bf16, self._decoder, rows, batch, self._layers[1], *wanted)
        try:
            meanwhile()
        finally:
            self._library.af_finish_forward()


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> NativeForward:
    return NativeForward(weights, head)
