"""A whole forward pass in one call of the native kernels, without Python between kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentflow.kernels.decoder_weights import DecoderWeights, LatentWeights
from agentflow.kernels.inputs import (
    Adapter,
    AdapterRows,
    ChoiceRows,
    ForwardInput,
    IntArray,
    Likelihoods,
    LinearWeight,
)
from agentflow.kernels.native_library import native_level
from agentflow.kernels.native_ops.native_linear import NativeLinear
from agentflow.kernels.native_ops.structures import (
    NativeAdapterRows,
    NativeAdapters,
    NativeLayerAdapter,
    NativeWanted,
    PackedHeads,
    array_address,
    fill_choices,
    fill_likelihoods,
    native_adapter,
    native_batch,
    native_decoder,
    native_rows,
    native_weight,
)
from agentflow.kernels.native_ops.team import library, set_num_threads


class NativeForward:
    """``WholeForward`` of the native kernels."""

    def __init__(self, weights: DecoderWeights, head: LinearWeight) -> None:
        self._weights, self._head = weights, head  # kept alive: the structures point to them
        self._heads = [_packed_heads(layer.qkv) for layer in weights.layers]
        self._decoder, self._native_head = native_decoder(weights, self._heads), native_weight(head)
        self._library = library()  # the library that packed the weights
        self.keeps_order = native_level() != "amx"
        self.nbytes = sum(heads.nbytes for heads in self._heads if heads is not None)
        self._dtype = weights.final_norm.weight.dtype
        self._is_bf16 = self._dtype == torch.bfloat16
        self._layers: tuple[tuple[Tensor, ...], Any] = ((), None)  # the pool's layers and their addresses
        self._adapters: WeakKeyDictionary[Adapter, Any] = WeakKeyDictionary()  # their structures

    def start_hidden(self, given: ForwardInput) -> Callable[[], Tensor]:
        hidden_size = self._weights.embedding.shape[1]
        out = torch.empty(len(given.rows), hidden_size, dtype=self._dtype)
        finish = self._prepare(given, out.data_ptr(), None, None)()

        def hidden() -> Tensor:
            finish()
            return out

        return hidden

    def prepare_tokens(
        self,
        given: ForwardInput,
        make_choice: Callable[[], ChoiceRows],
        make_likelihoods: Callable[[], Likelihoods | None] = lambda: None,
    ) -> Callable[[], Callable[[], tuple[IntArray, Likelihoods | None]]]:
        out = np.empty(len(given.rows), dtype=np.int64)
        wanted = NativeWanted()
        start = self._prepare(given, None, self._native_head, wanted)

        def start_tokens() -> Callable[[], tuple[IntArray, Likelihoods | None]]:
            finish = start()

            def tokens() -> tuple[IntArray, Likelihoods | None]:
                choices = wanted.choices
                try:
                    choice = make_choice()
                    fill_choices(choices, choice, self._head.shape[0])
                    likelihoods = make_likelihoods()
                    if likelihoods is not None:
                        fill_likelihoods(wanted.likelihoods, likelihoods)
                    wanted.tokens = array_address(out)
                finally:  # waits for the pass in any case; without ``wanted.tokens``, it writes nothing
                    finish()
                return out, likelihoods

            return tokens

        return start_tokens

    def _prepare(self, given: ForwardInput, *wanted: Any) -> Callable[[], Callable[[], None]]:
        """Prepares a forward pass. Returns a function that starts it, which returns one that waits for its
        end."""
        if given.kv_layers is not self._layers[0]:
            addresses = [layer.data_ptr() for layer in given.kv_layers]
            self._layers = (given.kv_layers, (ctypes.c_void_p * len(addresses))(*addresses))
        angles = self._angles(given)
        rows = native_rows(given, angles)
        batch = native_batch(given.plan)
        adapters = self._native_adapters(given.adapters) if given.adapters else None
        arguments = (self._is_bf16, self._decoder, rows, batch, adapters, self._layers[1], *wanted)

        def start() -> Callable[[], None]:
            set_num_threads(self._library)
            self._library.af_start_forward(*arguments)
            return finish

        def finish(_kept_alive: Any = (given, angles, arguments)) -> None:
            self._library.af_finish_forward()

        return start

    def _angles(self, given: ForwardInput) -> NDArray[np.float32] | None:
        """Returns the rope's angles [T, frequencies] if the positions differ between its axes in this batch;
        else None."""
        if given.given_rows is None or given.given_rows.axis_positions is None:
            return None
        (rope,) = self._weights.ropes
        assert rope.axes is not None
        places = given.given_rows.axis_positions.astype(np.float32)[rope.axes.numpy()]
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
                    place,
                    array_address(one.rows),
                    len(one.rows),
                    array_address(one.sampled),
                    len(one.sampled),
                )
            )
        return NativeAdapters(len(made), (NativeAdapterRows * len(made))(*made))


def _packed_heads(latent: LinearWeight | LatentWeights) -> PackedHeads | None:
    if isinstance(latent, LinearWeight):
        return None
    return PackedHeads(
        [NativeLinear().pack(matrix.t(), None) for matrix in latent.key_up],
        [NativeLinear().pack(matrix.t(), None) for matrix in latent.value_up],
    )
