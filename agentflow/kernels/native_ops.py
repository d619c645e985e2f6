"""The kernels in C++ (``native/``): a whole forward pass in one call, on a separate team of threads.

Weights are stored in the order in which the products read them, and Python does no work between the kernels.
The functions for single kernels run the same code, and are tested against the reference.

First come the functions of ``ops.Kernels``, then ``NativeForward``. ``native_structures`` describes the
library's arguments.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels import torch_ops
from agentflow.kernels.activations import ACTIVATIONS, Activation
from agentflow.kernels.attention.backend import AttentionBackend, AttentionRule
from agentflow.kernels.decoder_weights import DecoderWeights, LatentWeights
from agentflow.kernels.inputs import (
    Adapter,
    AdapterRows,
    AttentionBatch,
    BlockMatrix,
    ChoiceRows,
    ForwardInput,
    IntArray,
    LinearWeight,
    LowRank,
    QuantisedPanels,
)
from agentflow.kernels.linear.method import LinearMethod
from agentflow.kernels.native_library import load_best, native_level
from agentflow.kernels.native_structures import (
    BLOCK_TYPES,
    LANES,
    MAX_SEGMENTS,
    PANEL,
    PANEL_FORMATS,
    NativeAdapterRows,
    NativeAdapters,
    NativeChangedRows,
    NativeLayerAdapter,
    PackedHeads,
    address,
    declare,
    native_adapter,
    native_batch,
    native_choices,
    native_decoder,
    native_low_rank,
    native_rows,
    native_weight,
    pointer,
)
from agentflow.kernels.page_advice import advise_huge_pages, release_file_pages
from agentflow.kernels.sampling.sampler import Sampler

logger = logging.getLogger(__name__)


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


class NativeLinear(LinearMethod):
    """``LinearMethod`` of the native kernels."""

    block_types = BLOCK_TYPES

    def pack(
        self, weight: Tensor, bias: Tensor | None, *, exact_output: bool = False, gated: bool = False
    ) -> LinearWeight:
        num_out, num_in = weight.shape
        team, weight = _team(), weight.contiguous()
        size = team.af_panel_size(_is_bf16(weight), num_out, num_in, gated)
        num_panels = -(-num_out // 2 // LANES) if gated else -(-num_out // PANEL)
        panels = _zeroed_panels(torch.empty(size, dtype=weight.dtype), 0, num_panels, num_panels)
        team.af_pack(_is_bf16(weight), weight.data_ptr(), num_out, num_in, gated, panels.data_ptr())
        return LinearWeight(None, panels, bias, (num_out, num_in), is_gated=gated)

    def pack_blocks(
        self,
        parts: Sequence[BlockMatrix],
        bias: Tensor | None,
        *,
        gated: bool = False,
        device: torch.device | None = None,
    ) -> LinearWeight | None:
        if not _are_packable(parts, gated):
            return None
        num_out, num_in = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if gated:
            num_panels = -(-num_out // 2 // LANES)
            panels = _empty_panels(parts[0].type, num_in, 0, num_panels, num_panels)
            first = 0
            for part in parts:
                _pack_part(part, first, num_out // 2, panels)
                first += part.shape[0]
            return LinearWeight(None, None, bias, (num_out, num_in), (panels,), is_gated=True)
        made: list[QuantisedPanels] = []
        for part in parts:
            first, num = sum(one.num_panels for one in made), -(-part.shape[0] // PANEL)
            made.append(_empty_panels(part.type, num_in, first, num, -(-num_out // PANEL)))
            _pack_part(part, 0, 0, made[-1])
        return LinearWeight(None, None, bias, (num_out, num_in), tuple(made))

    def pack_embedding(self, weight: Tensor, head: LinearWeight | None) -> LinearWeight:
        return self.pack(weight, None) if head is None else head

    def embed(self, token_ids: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
        ids, is_bf16 = token_ids.contiguous(), dtype == torch.bfloat16
        out = torch.empty(len(ids), weight.shape[1], dtype=dtype)
        _team().af_rows_of(is_bf16, native_weight(weight), ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def multiply(
        self,
        x: Tensor,
        weight: LinearWeight,
        added: Tensor | None = None,
        *,
        activation: Activation | None = None,
    ) -> Tensor:
        num_out = weight.shape[0] // 2 if weight.is_gated else weight.shape[0]
        return _product(x, weight, x.new_empty(x.shape[0], num_out), added, activation)

    def add_product(self, hidden: Tensor, x: Tensor, weight: LinearWeight) -> None:
        assert hidden.is_contiguous()
        _product(x, weight, hidden, hidden)

    def multiply_exactly(self, x: Tensor, weight: LinearWeight) -> Tensor:
        return _product(x, weight, torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32), is_exact=True)

    def low_rank(self, x: Tensor, num_out: int, changes: Sequence[tuple[LowRank, Tensor]]) -> Tensor:
        x, out = x.contiguous(), x.new_empty(x.shape[0], num_out)
        natives = [native_low_rank(change) for change, _ in changes]
        made = [
            NativeChangedRows(ctypes.pointer(native), rows.data_ptr(), len(rows))
            for native, (_, rows) in zip(natives, changes, strict=True)
        ]
        array = (NativeChangedRows * len(made))(*made)
        _team().af_low_rank(
            _is_bf16(x), x.data_ptr(), x.shape[0], x.shape[1], array, len(made), num_out, out.data_ptr()
        )
        return out


def _product(
    x: Tensor,
    weight: LinearWeight,
    out: Tensor,
    added: Tensor | None = None,
    activation: Activation | None = None,
    *,
    is_exact: bool = False,
) -> Tensor:
    """Writes a product to ``out``, and returns it."""
    assert activation is not None or not weight.is_gated
    x, added = x.contiguous(), None if added is None else added.contiguous()
    function = len(ACTIVATIONS) if activation is None else ACTIVATIONS.index(activation)
    _team().af_linear(
        *(_is_bf16(x), x.data_ptr(), x.shape[0], native_weight(weight)),
        *(weight.is_gated, function, is_exact, pointer(added), out.data_ptr()),
    )
    return out


def _zeroed_panels(memory: Tensor, first: int, num: int, num_in_weight: int) -> Tensor:
    """Zeroes memory for panels and returns it. It is on large pages where the system has them, since each
    decode step reads all of it.

    Args:
        memory: the uninitialised memory.
        first: the number in the weight of the memory's first panel.
        num: the panels in the memory.
        num_in_weight: the panels of the whole weight.
    """
    advise_huge_pages(memory)
    _team().af_zero_panels(memory.data_ptr(), first, num, num_in_weight, memory.nbytes // num)
    return memory


def _are_packable(parts: Sequence[BlockMatrix], gated: bool) -> bool:
    types = {part.type for part in parts}
    if not types.issubset(BLOCK_TYPES) or len(parts) > MAX_SEGMENTS:
        return False
    if gated:
        return len(types) == 1
    return all(part.shape[0] % PANEL == 0 for part in parts[:-1])


def _empty_panels(block_type: str, num_in: int, first: int, num: int, num_in_weight: int) -> QuantisedPanels:
    team, number = _team(), BLOCK_TYPES.index(block_type)
    memory = torch.empty(num * team.af_block_panel_bytes(number, num_in), dtype=torch.uint8)
    panels = _zeroed_panels(memory, first, num, num_in_weight)
    return QuantisedPanels(PANEL_FORMATS[team.af_block_format(number)], panels, num)


_SLICE_BYTES = 16 << 20
"""The pages of a file that are in memory while it is packed, in addition to the panels."""


def _pack_part(part: BlockMatrix, first: int, gated_half: int, to: QuantisedPanels) -> None:
    rows, num_in = np.ascontiguousarray(part.rows), part.shape[1]
    number, is_mapped = BLOCK_TYPES.index(part.type), part.is_mapped and rows is part.rows
    step = max(PANEL, _SLICE_BYTES // rows.shape[1] // PANEL * PANEL) if is_mapped else len(rows)
    for begin in range(0, len(rows), step):
        some = rows[begin : begin + step]
        panels = to.panels.data_ptr()
        _team().af_pack_blocks(number, address(some), len(some), num_in, first + begin, gated_half, panels)
        if is_mapped:
            release_file_pages(some.ctypes.data, some.nbytes)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _norm(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _norm(x, weight, None, eps)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _team().af_norm(
        _is_bf16(x),
        rows.data_ptr(),
        rows.shape[0],
        rows.stride(0),
        weight.data_ptr(),
        pointer(bias),
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


class NativeAttention(AttentionBackend):
    """``AttentionBackend`` of the native kernels, which plan a batch themselves."""

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> AttentionBatch:
        return batch

    def attend(
        self,
        q: Tensor,
        kv_layer: Tensor,
        plan: AttentionBatch,
        rule: AttentionRule,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _, num_heads, head_dim = q.shape
        sinks = None if sinks is None else sinks.to(q.dtype)
        if q.stride()[1:] != (head_dim, 1):
            q = q.contiguous()
        out = q.new_empty(q.shape[0], num_heads * head_dim)
        _team().af_attention(
            *(_is_bf16(q), q.data_ptr(), q.stride(0), kv_layer.data_ptr(), native_batch(plan)),
            *(num_heads, kv_layer.shape[2], head_dim, rule.scale, rule.window, rule.cap),
            *(pointer(sinks), out.data_ptr()),
        )
        return out

    def attend_segments(self, q: Tensor, kv: Tensor, starts: IntArray, first: int, scale: float) -> Tensor:
        num_rows, num_heads, head_dim = q.shape
        q = _with_whole_rows(q)
        kv = _with_whole_rows(kv)
        starts = np.ascontiguousarray(starts, dtype=np.int64)
        out = q.new_empty(num_rows, num_heads * head_dim)
        _team().af_segment_attention(
            *(_is_bf16(q), q.data_ptr(), q.stride(0), kv.data_ptr(), kv.stride(0)),
            *(address(starts), len(starts) - 1, first, first + num_rows),
            *(num_heads, head_dim, scale, out.data_ptr()),
        )
        return out


def _with_whole_rows(x: Tensor) -> Tensor:
    """Returns x, or a copy of it, in which each x[i] is contiguous."""
    return x if x[:1].is_contiguous() else x.contiguous()


class NativeSampler(Sampler):
    """``Sampler`` of the native kernels."""

    def choose(self, logits: Tensor, staged: ChoiceRows) -> Tensor:
        logits = logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        choices = native_choices(staged, logits.shape[1])
        choices.logits = logits.data_ptr()
        _team().af_choose(choices, tokens.data_ptr())
        return tokens


QUEUES_WORK = False
linear = NativeLinear()
sampler = NativeSampler()
attention = NativeAttention()


# The measured parts of a forward pass, in the order of part_times.h. ``head``: single products, such as the
# logits. ``ranks``: the sums over all ranks of a model that several processes compute, with the waits.
PARTS = (
    *("plan", "embed", "norm", "qkv", "rope", "attention"),
    *("output", "gate_up", "down", "head", "choice", "ranks"),
)


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
        self._heads = [_packed_heads(layer.qkv) for layer in weights.layers]
        self._decoder, self._native_head = native_decoder(weights, self._heads), native_weight(head)
        self._library = library()  # the library that packed the weights
        self.keeps_order = native_level() != "amx"
        self.nbytes = sum(heads.nbytes for heads in self._heads if heads is not None)
        self._dtype = weights.final_norm.weight.dtype
        self._layers: tuple[tuple[Tensor, ...], Any] = ((), None)  # the pool's layers and their addresses
        self._adapters: WeakKeyDictionary[Adapter, Any] = WeakKeyDictionary()  # their structures

    def start_hidden(self, given: ForwardInput) -> Callable[[], Tensor]:
        hidden_size = self._weights.embedding.shape[1]
        out = torch.empty(len(given.rows), hidden_size, dtype=self._dtype)
        finish = self._start(given, out.data_ptr(), None, None, None)

        def hidden() -> Tensor:
            finish()
            return out

        return hidden

    def start_tokens(self, given: ForwardInput, choice: ChoiceRows) -> Callable[[], IntArray]:
        out = np.empty(len(given.rows), dtype=np.int64)
        choices = native_choices(choice, self._head.shape[0])
        finish = self._start(given, None, self._native_head, choices, address(out))

        def tokens() -> IntArray:
            finish()
            return out

        return tokens

    def _start(self, given: ForwardInput, *wanted: Any) -> Callable[[], None]:
        """Starts the forward pass. Returns a function that waits for its end."""
        if given.kv_layers is not self._layers[0]:
            addresses = [layer.data_ptr() for layer in given.kv_layers]
            self._layers = (given.kv_layers, (ctypes.c_void_p * len(addresses))(*addresses))
        _set_num_threads(self._library)
        angles = self._angles(given)
        rows = native_rows(given, angles)
        batch = native_batch(given.plan)
        adapters = self._native_adapters(given.adapters) if given.adapters else None
        arguments = (rows, batch, adapters, self._layers[1], *wanted)
        self._library.af_start_forward(self._dtype == torch.bfloat16, self._decoder, *arguments)

        def finish(_kept_alive: Any = (given, angles, arguments)) -> None:
            self._library.af_finish_forward()

        return finish

    def _angles(self, given: ForwardInput) -> NDArray[np.float32] | None:
        """Returns the rope's angles [T, frequencies] if its axes differ in this batch."""
        if given.given is None or given.given.axis_positions is None:
            return None
        (rope,) = self._weights.ropes
        assert rope.axes is not None
        places = given.given.axis_positions.astype(np.float32)[rope.axes.numpy()]
        return np.ascontiguousarray(places.T * rope.frequencies.numpy())

    def _native_adapters(self, rows: Sequence[AdapterRows]) -> NativeAdapters:
        made = []
        for one in rows:
            layers = self._adapters.get(one.adapter)
            if layers is None:
                layers = self._adapters[one.adapter] = native_adapter(one.adapter)
            place = ctypes.cast(layers, POINTER(NativeLayerAdapter))
            made.append(
                NativeAdapterRows(
                    place, address(one.rows), len(one.rows), address(one.sampled), len(one.sampled)
                )
            )
        return NativeAdapters(len(made), (NativeAdapterRows * len(made))(*made))


def _packed_heads(latent: LinearWeight | LatentWeights) -> PackedHeads | None:
    if isinstance(latent, LinearWeight):
        return None
    return PackedHeads(
        [linear.pack(matrix.t(), None) for matrix in latent.key_up],
        [linear.pack(matrix.t(), None) for matrix in latent.value_up],
    )


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> NativeForward:
    return NativeForward(weights, head)
