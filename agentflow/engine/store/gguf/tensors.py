"""Tensors of a GGUF file in the layout of the torch model.

The layouts differ in three ways. A rotation combines adjacent rows of queries and keys in the file, and rows
half a head apart in the model. The file may store norm weights plus 1. The model may store matrices as inputs
by outputs, as stacks of experts, or several in one tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agentflow.engine.store.gguf.container import StoredTensor

_PLAIN: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_JOINED_BYTES: Final = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor of the model that is a stored tensor or a part of one."""

    stored: StoredTensor
    shape: tuple[int, ...]  # in the torch model
    first: int  # the start of the part on the stored tensor's slowest axis
    count: int  # the length of the part on that axis
    is_transposed: bool = False  # the model stores inputs by outputs, the file outputs by inputs
    shift: float = 0.0  # added to each value
    paired_heads: int = 0  # the number of heads, if the file stores their rows in pairs; else 0

    @property
    def type_name(self) -> str:
        """The type of the stored values, such as "Q4_K" or "F16"."""
        return self.stored.type_name

    @property
    def is_block_matrix(self) -> bool:
        """Whether ``raw`` is a matrix of the model, output by output, in blocks of quantised values."""
        return len(self.shape) == 2 and self.is_quantised and not self.shift

    @property
    def is_quantised(self) -> bool:
        """Whether the values are stored in quantised blocks."""
        return self.type_name not in ("F32", "F16", "BF16", "F64")

    @property
    def raw(self) -> NDArray[np.uint8]:
        """uint8 [rows, bytes of a row], before ``shift``. A row has the weights of one output, even if
        ``is_transposed``. The matrices of a stack of experts are concatenated. A vector is one row with all
        values of the stored tensor. A view of the mapped file, or a copy if the file stores rows in pairs."""
        if len(self.stored.shape) == 1:
            return self.stored.rows
        per_slice = len(self.stored.rows) // self.stored.shape[0]
        rows = self.stored.rows[self.first * per_slice : (self.first + self.count) * per_slice]
        return _halves_apart(rows, self.paired_heads) if self.paired_heads else rows

    def dequantised(self) -> NDArray[np.float32]:
        """Returns the values as ggml dequantises them, in float32 and the model's layout. May be
        read-only."""
        values = dequantise(self.raw, self.type_name)
        if len(self.stored.shape) == 1:
            values = values.reshape(-1)[self.first : self.first + self.count]
            values = _halves_apart(values, self.paired_heads) if self.paired_heads else values
        if self.is_transposed:
            *stack, num_inputs, num_outputs = self.shape
            values = values.reshape(*stack, num_outputs, num_inputs).swapaxes(-1, -2)
        if self.shift:
            values = values + np.float32(self.shift)
        return values.reshape(self.shape)


def whole_tensor(stored: StoredTensor) -> GgufTensor:
    """Returns a stored tensor as a tensor of the model."""
    return GgufTensor(stored=stored, shape=stored.shape, first=0, count=stored.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Tensors of the file that are one tensor of the model."""

    parts: tuple[GgufTensor, ...]
    shape: tuple[int, ...]  # in the torch model

    @property
    def type_name(self) -> str:
        """The type of the first part's stored values."""
        return self.parts[0].type_name

    def _values(self) -> list[NDArray[np.float32]]:
        return [part.dequantised() for part in self.parts]


class InterleavedTensor(_Parts):
    """Two tensors whose values alternate on the last axis."""

    __slots__ = ()

    def dequantised(self) -> NDArray[np.float32]:
        """float32 in the model's layout."""
        return np.stack(self._values(), axis=-1).reshape(self.shape)


class JoinedTensor(_Parts):
    """Tensors that are concatenated on the first axis, such as queries, keys and values."""

    __slots__ = ()

    def dequantised(self) -> NDArray[np.float32]:
        """float32 in the model's layout."""
        return np.concatenate(self._values()).reshape(self.shape)


class FramesTensor(_Parts):
    """The patch embedding of a tower for two frames: [out, channels, height, width] each in the file, and
    [out, channels, frames, height, width] in the model."""

    __slots__ = ()

    def dequantised(self) -> NDArray[np.float32]:
        """float32 in the model's layout."""
        return np.stack(self._values(), axis=2).reshape(self.shape)


class LatentTensor(_Parts):
    """The matrix that expands latents to keys and values. The file stores two stacks with a matrix for each
    head: latents by keys, and values by latents. In the model, the rows of a head's keys come before the rows
    of its values."""

    __slots__ = ()

    def dequantised(self) -> NDArray[np.float32]:
        """float32 in the model's layout."""
        keys, values = self._values()
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(self.shape)


ModelTensor = GgufTensor | InterleavedTensor | JoinedTensor | FramesTensor | LatentTensor


def dequantise(rows: NDArray[np.uint8], type_name: str) -> NDArray[np.float32]:
    """Dequantises ``rows`` [rows, bytes of a row] to float32 [rows, values in a row]."""
    if (plain := _PLAIN.get(type_name)) is not None:
        stored: NDArray[Any] = rows.view(plain)
        return stored.astype(np.float32, copy=False)
    from gguf import GGMLQuantizationType, dequantize  # 0.2 s

    # ``dequantize`` converts 16 rows at a time, which is slow for short rows. Blocks are independent, so rows
    # can be joined.
    num_joined = math.gcd(len(rows), 1 << max(0, (_JOINED_BYTES // rows.shape[1]).bit_length() - 1))
    joined = rows.reshape(len(rows) // num_joined, -1)
    values: NDArray[np.float32] = dequantize(joined, GGMLQuantizationType[type_name])
    return values.reshape(len(rows), -1)


def _halves_apart(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Reorders the rows of each head: rows 2i and 2i + 1 of the file are rows i and i + half a head of the
    model."""
    pairs = rows.reshape(num_heads, len(rows) // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
