"""The tensors of a folder with quantised matrices, under their names in the unquantised model.

A matrix ``NAME.weight`` is stored as several tensors:

* AWQ and GPTQ: ``NAME.qweight``, ``NAME.qzeros``, ``NAME.scales`` and, in GPTQ, ``NAME.g_idx``
* compressed-tensors in words: ``NAME.weight_packed``, ``NAME.weight_scale``, ``NAME.weight_shape`` and, if
  there are any, ``NAME.weight_zero_point`` and ``NAME.weight_g_idx``
* bytes and fp8: ``NAME.weight`` with ``NAME.weight_scale`` or, in blocks, ``NAME.weight_scale_inv``

The stacked experts ``NAME`` of GPT-OSS are ``NAME_blocks`` and ``NAME_scales``. Scales of activations are
ignored: the kernels do not quantise activations as the checkpoint specifies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from agentflow.engine.models.weights.checkpoint import Checkpoint
from agentflow.engine.models.weights.packed_matrices import (
    GroupedMatrix,
    awq_matrix,
    gptq_matrix,
    mxfp4_blocks,
    mxfp4_values,
    packed_matrix,
    scaled_matrix,
)
from agentflow.engine.store.weight_scheme import Scheme
from agentflow.errors import BadModelFolder
from agentflow.kernels.inputs import BlockMatrix

_PARTS: Final = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point"),
    *("weight_scale", "weight_scale_inv"),
)
_MARKS: Final = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")
_IGNORED: Final = (
    *(".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".input_scale_ub"),
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".activation_scale"),
)


class PackedCheckpoint(Checkpoint):
    """Like ``Checkpoint``. Matrices are dequantised, except by ``take_blocks`` and
    ``take_stacked_blocks``."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, scheme: Scheme) -> None:
        super().__init__(folder, dtype, device)
        self._scheme = scheme
        self._names: frozenset[str] = frozenset()
        self._matrices: frozenset[str] = frozenset()  # without .weight
        self._stacks: frozenset[str] = frozenset()

    def __enter__(self) -> PackedCheckpoint:
        super().__enter__()
        stored = self._files.keys()
        self._matrices = frozenset(
            name.removesuffix(mark) for name in stored for mark in _MARKS if name.endswith(mark)
        )
        self._stacks = frozenset(name.removesuffix("_blocks") for name in stored if name.endswith("_blocks"))
        parts = {f"{name}.{part}" for name in self._matrices for part in _PARTS}
        parts |= {f"{name}_{part}" for name in self._stacks for part in ("blocks", "scales")}
        plain = {name for name in stored if name not in parts and not name.endswith(_IGNORED)}
        self._names = frozenset(plain | {f"{name}.weight" for name in self._matrices} | self._stacks)
        return self

    @property
    def names(self) -> Collection[str]:
        return self._names

    def take_blocks(self, name: str, *shape: int) -> BlockMatrix | None:
        stem = name.removesuffix(".weight")
        if stem == name or stem not in self._matrices:
            return None
        matrix = self._matrix(stem)
        if matrix.codes.shape != self._whole_shape(name, shape):
            return None  # ``take`` reports the error
        self._taken.add(name)
        blocks = matrix.blocks(is_symmetric=self._scheme.is_symmetric)
        return None if blocks is None else self._cut_blocks(name, blocks)

    def is_output_first(self, name: str) -> bool:
        return f"{name.removesuffix('.weight')}.qweight" in self._files

    def take_stacked_blocks(self, name: str, *shape: int) -> list[BlockMatrix] | None:
        if name not in self._stacks:
            return None
        blocks, scales = self._stack(name)
        count, num_in, num_out = shape
        if blocks.shape != (count, num_out, num_in // 32, 16) or num_in % 32:
            return None
        self._taken.add(name)
        return [mxfp4_blocks(blocks[i], scales[i]) for i in range(count)]

    @contextmanager
    def _stored(self, name: str) -> Iterator[Tensor]:
        if name in self._stacks:
            values = mxfp4_values(*self._stack(name))
            yield values.transpose(1, 2)
        elif (stem := name.removesuffix(".weight")) != name and stem in self._matrices:
            yield self._matrix(stem).dequantised()
        else:
            with super()._stored(name) as stored:
                yield stored

    def _stack(self, name: str) -> tuple[Tensor, Tensor]:
        blocks, scales = self._part(f"{name}_blocks"), self._part(f"{name}_scales")
        if blocks.ndim != 4 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
            raise self._misfit(name, f"blocks {tuple(blocks.shape)}, scales {tuple(scales.shape)}")
        return blocks, scales

    def _matrix(self, stem: str) -> GroupedMatrix:
        try:
            return self._read_matrix(stem)
        except (ValueError, RuntimeError, IndexError) as error:  # the tensors' shapes do not fit together
            raise self._misfit(f"{stem}.weight", str(error)) from error

    def _read_matrix(self, stem: str) -> GroupedMatrix:
        scheme = self._scheme
        if f"{stem}.qweight" in self._files:
            words, zeros, scales = (self._part(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))
            if scheme.method == "awq":
                return awq_matrix(words, zeros, scales)
            order = self._part_if_there(f"{stem}.g_idx")
            return gptq_matrix(words, zeros, scales, order, scheme.bits, scheme.zero_offset)
        zero_point = self._part_if_there(f"{stem}.weight_zero_point")
        if f"{stem}.weight_packed" in self._files:
            rows, columns = self._part(f"{stem}.weight_shape").tolist()
            return packed_matrix(
                self._part(f"{stem}.weight_packed"),
                self._part(f"{stem}.weight_scale"),
                zero_point,
                self._part_if_there(f"{stem}.weight_g_idx"),
                (int(rows), int(columns)),
                scheme.bits,
            )
        has_inverse = f"{stem}.weight_scale_inv" in self._files
        scale = self._part(f"{stem}.weight_scale_inv" if has_inverse else f"{stem}.weight_scale")
        return scaled_matrix(self._part(f"{stem}.weight"), scale, zero_point, scheme.block)

    def _part(self, name: str) -> Tensor:
        if name not in self._files:
            raise BadModelFolder(f"{self._path} has no tensor {name}: its weights are incomplete", param=name)
        with super()._stored(name) as stored:
            return stored

    def _part_if_there(self, name: str) -> Tensor | None:
        return self._part(name) if name in self._files else None

    def _misfit(self, name: str, why: str) -> BadModelFolder:
        return BadModelFolder(
            f"{self._path}: the tensors of the quantised matrix {name} do not fit together ({why})",
            param=name,
        )
