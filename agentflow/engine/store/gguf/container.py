"""The container of a GGUF file: metadata and the places of tensors in the mapped file.

The GGUF specification of the ggml project, versions 2 and 3, little-endian, defines the format: a header, the
metadata as keys and values, a list of tensors, and their aligned data. Lists of texts, such as a vocabulary,
are skipped here and decoded when they are read. The reader of the ``gguf`` package makes an array of each
text, which takes 4 s for 50,000 tokens; this module takes 20 ms.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agentflow.errors import BadModelFolder, UnknownModel

TYPES: Final[Mapping[int, tuple[str, int, int]]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""The supported types of tensors by number: name, values in a block, bytes of a block."""

_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 8
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in its stored form."""

    name: str
    type_name: str  # such as "Q4_K"
    shape: tuple[int, ...]  # slowest axis first, as in torch
    rows: NDArray[np.uint8]  # [all rows, bytes of a row], mapped; a row is a whole number of blocks


class TextArray:
    """A list of texts in the metadata. Each iteration decodes it, so that ``Container`` stays small."""

    def __init__(self, data: mmap.mmap, start: int, count: int) -> None:
        self._data = data
        self._start = start
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        data, place, size_at = self._data, self._start, _U64.unpack_from
        for _ in range(self._count):
            end = place + 8 + size_at(data, place)[0]
            yield data[place + 8 : end].decode("utf-8", errors="replace")
            place = end


@dataclass(frozen=True, slots=True)
class Container:
    """The contents of a GGUF file, or of all files of a model."""

    path: Path
    metadata: Mapping[str, Any]  # numbers, texts, ``TextArray`` and arrays of numbers, by key
    tensors: Mapping[str, StoredTensor]  # by their names in the file


def read_container(path: Path) -> Container:
    """Maps a GGUF file, or all files of a model in several (``…-00001-of-00003.gguf``).

    Raises:
        UnknownModel: there is no such file.
        BadModelFolder: the file is not a GGUF file of a supported version, is truncated, or has tensors of
            unknown types.
    """
    first = _read_file(path)
    count = first.metadata.get("split.count")
    if not isinstance(count, int) or count <= 1:
        return first
    name = _SHARD.fullmatch(path.name)
    if name is None or int(name[2]) != 1:
        raise BadModelFolder(
            f"{path.name} is one of {count} files of a model: give the first one, "
            f"named …-00001-of-{count:05}.gguf",
            param=path.name,
        )
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        shard = path.with_name(f"{name[1]}-{number:05}-of-{count:05}.gguf")
        if not shard.is_file():
            raise BadModelFolder(f"{path.name} needs {shard.name} in the same folder", param=shard.name)
        tensors |= _read_file(shard).tensors
    return Container(path, first.metadata, tensors)


def _read_file(path: Path) -> Container:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 or (magic := file.read(4)) != b"GGUF":
                found = "it is too short" if size < 24 else f"it begins with {magic!r}"
                raise BadModelFolder(
                    f"{path.name} is not a GGUF file: {found} (a Git LFS pointer? then run `git lfs pull`)",
                    param=path.name,
                )
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UnknownModel(f"there is no file {path}") from None
    except OSError as error:
        raise BadModelFolder(f"{path} cannot be read: {error}", param=path.name) from error
    try:
        return _Reader(path, data).read()
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise BadModelFolder(
            f"{path.name} is truncated or damaged ({error}): fetch it again", param=path.name
        ) from error


class _Reader:
    """Reads one file from its start. Raises ``struct.error`` or ``ValueError`` if it ends too early."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._place = 4

    def read(self) -> Container:
        version = self._number(_U32)
        if version not in (2, 3):
            is_swapped = version in (2 << 24, 3 << 24)
            kind = "a big-endian GGUF file" if is_swapped else f"a GGUF file of version {version}"
            raise BadModelFolder(
                f"{self._path.name} is {kind}: give a little-endian one of version 2 or 3",
                param=self._path.name,
            )
        num_tensors, num_keys = self._count(24), self._count(13)
        metadata = {}
        for _ in range(num_keys):
            key = self._text()
            metadata[key] = self._value(self._number(_U32))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment}")
        begin = -(-self._place // alignment) * alignment
        data = np.frombuffer(self._data, np.uint8)
        return Container(self._path, metadata, {info[0]: self._tensor(data, begin, *info) for info in infos})

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_axes = self._text(), self._number(_U32)
        if not 1 <= num_axes <= 4:
            raise ValueError(f"the tensor {name} has {num_axes} axes")
        shape = tuple(self._number(_U64) for _ in range(num_axes))[::-1]  # the fastest axis comes first
        if 0 in shape:
            raise ValueError(f"the tensor {name} is empty")
        return name, shape, self._number(_U32), self._number(_U64)

    def _tensor(
        self, data: NDArray[np.uint8], begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> StoredTensor:
        if kind not in TYPES:
            known = ", ".join(name for name, _, _ in TYPES.values())
            raise BadModelFolder(
                f"{self._path.name}: the tensor {name} has the type {_type_name(kind)}, which is not "
                f"supported: give a file with types among {known}",
                param=name,
            )
        type_name, per_block, block_bytes = TYPES[kind]
        blocks, rest = divmod(shape[-1], per_block)
        if rest:
            raise ValueError(f"{name} has rows of {shape[-1]} values, which {type_name} does not allow")
        num_rows, row_bytes = math.prod(shape[:-1]), blocks * block_bytes
        begin += offset
        end = begin + num_rows * row_bytes
        if end > len(data):
            raise ValueError(f"{name} ends at byte {end:,} of {len(data):,}")
        return StoredTensor(name, type_name, shape, data[begin:end].reshape(num_rows, row_bytes))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if (scalar := _SCALARS.get(kind)) is not None:
            (value,) = struct.unpack_from(scalar, self._data, self._place)
            self._place += struct.calcsize(scalar)
            return value
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            raise ValueError(f"metadata of the unknown type {kind}")
        if depth == _MAX_DEPTH:
            raise ValueError(f"lists of more than {_MAX_DEPTH} levels")
        kind = self._number(_U32)
        if (scalar := _SCALARS.get(kind)) is not None:
            values = np.frombuffer(
                self._data, np.dtype(scalar), self._count(struct.calcsize(scalar)), self._place
            )
            self._place += values.nbytes
            return values
        count = self._count(8)
        if kind == _STRING:
            texts = TextArray(self._data, self._place, count)
            self._skip_texts(count)
            return texts
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _skip_texts(self, count: int) -> None:
        data, place, size_at = self._data, self._place, _U64.unpack_from
        for _ in range(count):
            place += 8 + size_at(data, place)[0]
        if place > len(data):
            raise ValueError("a text ends after the file")
        self._place = place

    def _text(self) -> str:
        size = self._number(_U64)
        end = self._place + size
        if end > len(self._data):
            raise ValueError("a text ends after the file")
        text = self._data[self._place : end].decode()
        self._place = end
        return text

    def _count(self, least_bytes: int) -> int:
        """Reads the number of entries of at least ``least_bytes`` bytes each."""
        count = self._number(_U64)
        if count * least_bytes > len(self._data) - self._place:
            raise ValueError(f"{count:,} entries do not fit into the file")
        return count

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._place)
        self._place += form.size
        return int(value)


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType  # 0.2 s

    try:
        return GGMLQuantizationType(kind).name
    except ValueError:
        return f"number {kind}"
