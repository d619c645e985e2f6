"""The kernels in C++ (``native/``): a whole forward pass in one call, by a team of threads of their own.

Bytes are read once and in order, in the layout that the products want, and nothing is dispatched between
them. The single functions are the same code, one at a time: the tests hold each against the reference.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentflow.kernels import torch_ops as cpu_ops
from agentflow.kernels.choice_rows import ChoiceRows
from agentflow.kernels.decoder_weights import DecoderWeights
from agentflow.kernels.forward_input import ForwardInput
from agentflow.kernels.inputs import AttentionBatch, IntArray
from agentflow.kernels.linear_weight import LinearWeight
from agentflow.kernels.native_library import load_best
from agentflow.kernels.native_structs import (
    address,
    declare,
    native_batch,
    native_choices,
    native_decoder,
    native_rows,
    native_weight,
)

logger = logging.getLogger(__name__)


@functools.cache
def _library_allowed(cpu: str) -> ctypes.CDLL:
    return declare(load_best())


def library() -> ctypes.CDLL:
    """The compiled kernels, for what ``AGENTFLOW_CPU`` allows. NoNativeKernels where they cannot be had."""
    return _library_allowed(os.environ.get("AGENTFLOW_CPU", ""))


def _team() -> ctypes.CDLL:
    """The library, with as many threads as torch has."""
    loaded = library()
    _set_num_threads(loaded)
    return loaded


def _set_num_threads(loaded: ctypes.CDLL) -> None:
    if num_refused := loaded.af_set_num_threads(torch.get_num_threads()):
        _warn_of_refused_threads(num_refused)


@functools.cache
def _warn_of_refused_threads(num_refused: int) -> None:
    """Once for each number: it is tried again in every forward."""
    logger.warning("the system refuses %d of the kernels' threads: forwards take longer", num_refused)


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


# Between the two products of the forward, which does it on its own.
rope_and_write = cpu_ops.rope_and_write


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


PARTS = ("plan", "embed", "norm", "qkv", "rope", "attention", "output", "gate_up", "down", "head", "choice")
"""What the time of a forward is spent on; ``head``: single products, the logits' among them."""


def part_seconds() -> dict[str, float]:
    """Seconds of each of ``PARTS`` since the last call, in all forwards of this process."""
    seconds = (ctypes.c_double * len(PARTS))()
    library().af_part_seconds(seconds)
    return dict(zip(PARTS, seconds, strict=True))


class NativeForward:
    """``ops.Forward`` of the native kernels."""

    def __init__(self, weights: DecoderWeights, head: LinearWeight) -> None:
        self._weights, self._head = weights, head  # keeps alive what the structures point to
        self._decoder, self._native_head = native_decoder(weights), native_weight(head)
        self._library = library()  # the one that the weights were laid out for
        self._is_bf16 = _is_bf16(weights.embedding)
        self._layers: tuple[tuple[Tensor, ...], Any] = ((), None)  # a pool's layers, and their addresses

    def hidden(self, given: ForwardInput, meanwhile: Callable[[], None]) -> Tensor:
        embedding = self._weights.embedding
        out = embedding.new_empty(len(given.rows), embedding.shape[1])
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
        # They live until the forward has ended.
        rows = native_rows(given.token_ids, given.positions, given.write_slots, given.rows)
        batch = native_batch(given.plan)
        self._library.af_start_forward(self._is_bf16, self._decoder, rows, batch, self._layers[1], *wanted)
        try:
            meanwhile()
        finally:
            self._library.af_finish_forward()


def whole_forward(weights: DecoderWeights, head: LinearWeight) -> NativeForward:
    return NativeForward(weights, head)
