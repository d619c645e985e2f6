"""Reads the tensors of a model by name, for the loader.

``Checkpoint`` reads them from safetensors files, ``GgufCheckpoint`` from a GGUF file, and
``PackedCheckpoint`` (``packed_checkpoint``) from safetensors files with quantised matrices. All map their
files and release the pages of a tensor once it is copied, so that the files occupy little memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentflow.engine.models.weights.cuts import WHOLE, Cut, Cuts
from agentflow.engine.models.weights.packed_matrices import gguf_mxfp4_blocks
from agentflow.engine.store.gguf.file import open_gguf
from agentflow.engine.store.gguf.tensors import GgufTensor
from agentflow.engine.store.model_folder import weight_files
from agentflow.errors import BadModelFolder
from agentflow.kernels.inputs import BlockMatrix
from agentflow.kernels.page_advice import release_file_pages

_ROWS_COMPARED = 1024
_VALUES_CONVERTED = 1 << 22  # in one slice: 16 MB as float32


class TensorSource(ABC):
    """Named tensors, cast to ``dtype`` on ``device`` when they are taken. A context manager: the files stay
    mapped until it exits. Raises ``BadModelFolder`` if a file is damaged, or if a tensor is missing, has the
    wrong shape or is left over."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._path = path
        self.dtype = dtype
        self.device = device
        self._taken: set[str] = set()
        self.cuts: Cuts = WHOLE  # the parts to read; shapes in arguments are the shapes of these parts

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    @abstractmethod
    @contextmanager
    def _stored(self, name: str) -> Iterator[Tensor]:
        """Yields an existing tensor as stored, and releases its memory afterwards."""

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor by name. Its shape must be ``shape``."""
        with self._fitting(name, shape) as stored:
            return torch.empty(shape, dtype=self.dtype, device=self.device).copy_(stored)

    def take_rows(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Tensor:
        """Returns matrices of ``width`` columns, stacked. ``sizes``: the number of rows of each."""
        taken: Tensor | None = None
        begin = 0
        for name, size in zip(names, sizes, strict=True):
            with self._fitting(name, (size, width)) as stored:
                if taken is None:
                    taken = torch.empty(sum(sizes), width, dtype=self.dtype, device=self.device)
                taken[begin : begin + size].copy_(stored)
            begin += size
        assert taken is not None
        return taken

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        """Like ``take``; None if there is no such tensor, or if another rank adds it."""
        if name in self.cuts.absent:
            self._taken.add(name)
            return None
        return self.take(name, *shape) if name in self.names else None

    def take_biases(self, names: Sequence[str], sizes: Sequence[int]) -> Tensor | None:
        """Returns vectors, joined, with zeros for those that ``take_if_there`` does not return; None if it
        returns none."""
        found = [self.take_if_there(name, size) for name, size in zip(names, sizes, strict=True)]
        if all(one is None for one in found):
            return None
        zeros = torch.zeros(max(sizes), dtype=self.dtype, device=self.device)
        return torch.cat(
            [zeros[:size] if one is None else one for one, size in zip(found, sizes, strict=True)]
        )

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors that exist have the same shape and values."""
        with self._stored(first) as one, self._stored(second) as other:
            if one.shape != other.shape:
                return False
            # In parts: tensors that differ mostly do so in the first one.
            parts = [slice(i, i + _ROWS_COMPARED) for i in range(0, len(one), _ROWS_COMPARED)]
            return all(torch.equal(one[part], other[part]) for part in parts)

    def take_blocks(self, name: str, *shape: int) -> BlockMatrix | None:
        """Returns a matrix [out, in] in the blocks of quantised values in which the file stores it, output by
        output; None if it does not store such blocks. Valid until ``release_blocks`` or until the files are
        closed."""
        return None

    def take_stacked_blocks(self, name: str, *shape: int) -> list[BlockMatrix] | None:
        """Like ``take_blocks``: returns the matrices [out, in] of a stack of shape [count, in, out]."""
        return None

    def is_output_first(self, name: str) -> bool:
        """Whether the files store this matrix as [out, in] although its architecture stores [in, out]."""
        return False

    def release_blocks(self, names: Collection[str]) -> None:
        """Releases the memory of matrices that ``take_blocks`` returned."""
        return

    def skip(self, beginning: str) -> None:
        """Marks the tensors whose names start with ``beginning`` as taken: the model does not use them."""
        self._taken.update([name for name in self.names if name.startswith(beginning)])

    def refuse_leftovers(
        self, *ignored_endings: str, ignored_parts: tuple[str, ...] = (), only: tuple[str, ...] = ("",)
    ) -> None:
        """Raises ``BadModelFolder`` if a tensor was not taken: the weights belong to another architecture.
        ``only``: check only names that start with one of these."""
        left = sorted(n for n in self.names if n not in self._taken and not n.endswith(ignored_endings))
        left = [name for name in left if name.startswith(only) and not name.startswith(ignored_parts)]
        if left:
            raise BadModelFolder(
                f"{self._path} has tensors that its config does not use ({', '.join(left[:3])}"
                f"{', …' if len(left) > 3 else ''}): take the config and the weights of one model",
                param=left[0],
            )

    @contextmanager
    def _fitting(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """Yields the tensor, or its part, as stored. Compares its shape before memory is allocated for
        ``shape``: a damaged config may contain any size."""
        cut = self._cut(name)
        whole = shape if cut is None else cut.whole
        assert cut is None or cut.shape == shape
        if name not in self.names:
            raise BadModelFolder(
                f"{self._path} has no tensor {name}: its weights are incomplete, fetch the model again",
                param=name,
            )
        with self._stored(name) as stored:
            if stored.shape != whole:
                raise BadModelFolder(
                    f"{self._path}: tensor {name} is {tuple(stored.shape)}, "
                    f"but its config makes it {whole}: take the config and the weights of one "
                    "model",
                    param=name,
                )
            if not stored.is_floating_point():
                raise BadModelFolder(
                    f"{self._path}: tensor {name} has integers ({stored.dtype}), and its config does not say "
                    "how they are quantised: take another copy of the model",
                    param=name,
                )
            self._taken.add(name)
            yield stored if cut is None else cut.part(stored)

    def _cut(self, name: str) -> Cut | None:
        """Returns the part of the tensor to read, with the axes in stored order; None: all of it."""
        cut = self.cuts.by_name.get(name)
        if cut is None or not self.cuts.is_transposed or len(cut.whole) != 2:
            return cut
        is_stored_so = name.startswith(self.cuts.untransposed) or self.is_output_first(name)
        return cut if is_stored_so else cut.transposed

    def _whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole matrix [out, in]. ``shape``: the shape of the part to read."""
        cut = self.cuts.by_name.get(name)
        return shape if cut is None else cut.whole

    def _cut_blocks(self, name: str, matrix: BlockMatrix) -> BlockMatrix:
        cut = self.cuts.by_name.get(name)
        return matrix if cut is None else cut.blocks(matrix, f"{self._path}: {name}")


class Checkpoint(TensorSource):
    """The tensors of a folder's safetensors files, one or several."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(folder, dtype, device)
        self._open_files = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Checkpoint:
        with ExitStack() as opened:
            for name in self._file_names():
                try:
                    file = opened.enter_context(safe_open(self._path / name, framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise BadModelFolder(
                        f"{self._path / name} cannot be read: {error}", param=name
                    ) from error
                self._files |= dict.fromkeys(file.keys(), file)
            self._open_files = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open_files.close()

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    @contextmanager
    def _stored(self, name: str) -> Iterator[Tensor]:
        try:
            stored = self._files[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BadModelFolder(
                f"{self._path}: tensor {name} cannot be read: {error}", param=name
            ) from error
        yield stored
        release_file_pages(stored.data_ptr(), stored.nbytes)

    def _file_names(self) -> list[str]:
        try:
            names = weight_files(self._path)
        except BadModelFolder as error:
            raise BadModelFolder(f"{self._path}: {error}", param=error.param) from None
        if not names:
            raise BadModelFolder(
                f"{self._path} has no *.safetensors and no *.gguf file: other formats are not read",
                param="*.safetensors",
            )
        return names


class GgufCheckpoint(TensorSource):
    """The tensors of a GGUF file. Only ``take_blocks`` and ``take_stacked_blocks`` keep them quantised."""

    def __init__(self, file: Path, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(file, dtype, device)
        self._tensors = open_gguf(file).tensors

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors = {}  # the file is unmapped with the last view of it

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def take(self, name: str, *shape: int) -> Tensor:
        tensor, whole, cut = self._tensors.get(name), self._whole_shape(name, shape), self._cut(name)
        if not isinstance(tensor, GgufTensor) or tensor.shape != whole or len(shape) != 2:
            return super().take(name, *shape)
        if tensor.is_transposed or tensor.paired_heads:
            return super().take(name, *shape)
        taken = torch.empty(shape, dtype=self.dtype, device=self.device)
        step, done = max(1, _VALUES_CONVERTED // whole[1]), 0
        for first, end in ((0, whole[0]),) if cut is None or cut.axis else cut.ranges:
            for begin in range(first, end, step):
                count = min(step, end - begin)
                part = replace(tensor, first=tensor.first + begin, count=count, shape=(count, whole[1]))
                values = torch.from_numpy(np.require(part.dequantised(), requirements="W"))
                if cut is not None and cut.axis:
                    values = cut.part(values)
                taken[done : done + count].copy_(values)
                done += count
                release_file_pages(part.raw.ctypes.data, part.raw.nbytes)
        self._taken.add(name)
        return taken

    def take_blocks(self, name: str, *shape: int) -> BlockMatrix | None:
        tensor = self._tensors.get(name)
        if not isinstance(tensor, GgufTensor) or not tensor.is_block_matrix:
            return None
        whole = self._whole_shape(name, shape)
        if (tensor.shape[::-1] if tensor.is_transposed else tensor.shape) != whole:
            return None  # ``take`` raises the error
        self._taken.add(name)
        matrix = self._cut_blocks(name, _block_matrix(tensor.type_name, tensor.raw, (whole[0], whole[1])))
        return replace(matrix, is_mapped=np.may_share_memory(matrix.rows, tensor.stored.rows))

    def take_stacked_blocks(self, name: str, *shape: int) -> list[BlockMatrix] | None:
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape:
            return None  # ``take`` raises the error
        parts = (tensor,) if isinstance(tensor, GgufTensor) else tensor.parts
        kinds = {part.type_name for part in parts if part.is_transposed and part.is_quantised}
        if len(kinds) != 1 or {part.type_name for part in parts} != kinds:
            return None
        self._taken.add(name)
        count, num_in, num_out = shape
        matrices = []
        for i in range(count):
            rows = [replace(part, first=i, count=1).raw for part in parts]
            in_turn = rows[0] if len(rows) == 1 else np.stack(rows, axis=1).reshape(num_out, -1)
            matrices.append(_block_matrix(parts[0].type_name, in_turn, (num_out, num_in)))
        return matrices

    def release_blocks(self, names: Collection[str]) -> None:
        for tensor in map(self._tensors.__getitem__, names):
            for part in (tensor,) if isinstance(tensor, GgufTensor) else tensor.parts:
                rows = part.stored.rows
                release_file_pages(rows.ctypes.data, rows.nbytes)

    @contextmanager
    def _stored(self, name: str) -> Iterator[Tensor]:
        # torch accepts only writable arrays.
        yield torch.from_numpy(np.require(self._tensors[name].dequantised(), requirements="W"))
        self.release_blocks([name])


def _block_matrix(type_name: str, rows: NDArray[np.uint8], shape: tuple[int, int]) -> BlockMatrix:
    """Returns a matrix of the file. MXFP4 becomes blocks of 5 bits, which the kernels can multiply."""
    return gguf_mxfp4_blocks(rows) if type_name == "MXFP4" else BlockMatrix(type_name, rows, shape)
