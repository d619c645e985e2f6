"""Reads the tensors of a model folder by name, for the loader.

``Checkpoint`` reads them from safetensors files, which are mapped. The pages of a tensor are released once it
is copied, so that at most one tensor of the files is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentflow.engine.models.page_advice import release_file_pages
from agentflow.errors import BadModelFolder

_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The named tensors of a folder, single-file or sharded, cast to ``dtype`` on ``device`` as they are
    taken. A context manager: the files stay mapped until it exits. ``BadModelFolder`` if a file is damaged or
    a tensor is missing, has the wrong shape or is left over."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._open_files = ExitStack()
        self._files: dict[str, Any] = {}
        self._taken: set[str] = set()

    def __enter__(self) -> Checkpoint:
        with ExitStack() as opened:
            for name in self._file_names():
                try:
                    file = opened.enter_context(safe_open(self._folder / name, framework="pt"))
                except (OSError, SafetensorError) as error:
                    raise BadModelFolder(
                        f"{self._folder / name} cannot be read: {error}", param=name
                    ) from error
                self._files |= dict.fromkeys(file.keys(), file)
            self._open_files = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._open_files.close()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor with that name, which must have that shape."""
        taken = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._read(name, taken)
        return taken

    def take_rows(self, names: Sequence[str], sizes: Sequence[int], width: int) -> Tensor:
        """Matrices of ``sizes`` rows each, stacked."""
        taken = torch.empty(sum(sizes), width, dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(taken, list(sizes)), strict=True):
            self._read(name, part)
        return taken

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        """The tensor with that name, or None."""
        return self.take(name, *shape) if name in self._files else None

    def _read(self, name: str, target: Tensor) -> None:
        if name not in self._files:
            raise BadModelFolder(
                f"{self._folder} has no tensor {name}: its weights are incomplete", param=name
            )
        try:
            stored = self._files[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise BadModelFolder(
                f"{self._folder}: tensor {name} cannot be read: {error}", param=name
            ) from error
        if stored.shape != target.shape:
            raise BadModelFolder(
                f"{self._folder}: tensor {name} is {tuple(stored.shape)}, "
                f"but config.json makes it {tuple(target.shape)}",
                param=name,
            )
        self._taken.add(name)
        target.copy_(stored)
        release_file_pages(stored)

    def refuse_leftovers(self, *ignored_endings: str) -> None:
        """``BadModelFolder`` if a tensor was not taken: the weights belong to another architecture."""
        left = sorted(n for n in self._files if n not in self._taken and not n.endswith(ignored_endings))
        if left:
            raise BadModelFolder(
                f"{self._folder} has {len(left)} tensors that its architecture does not use "
                f"({', '.join(left[:3])}{', …' if len(left) > 3 else ''}): it is another kind of model",
                param=left[0],
            )

    def _file_names(self) -> list[str]:
        index = self._folder / _INDEX
        if index.is_file():
            try:
                return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadModelFolder(f"{index} cannot be read: {error!r}", param=index.name) from error
        names = sorted(file.name for file in self._folder.glob("*.safetensors"))
        if not names:
            raise BadModelFolder(
                f"{self._folder} has no *.safetensors file: weights in other formats are not read",
                param="*.safetensors",
            )
        return names
