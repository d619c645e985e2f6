"""Reads single entries of a GGUF file's metadata. Errors contain the key."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentflow.engine.store.gguf.container import Container, TextArray
from agentflow.errors import BadModelFolder


class GgufMetadata:
    """The entries of one file. Keys that start with a dot belong to its architecture: ".block_count" is
    "llama.block_count". Raises ``BadModelFolder`` for an entry of the wrong type, and for a missing entry
    without a default."""

    def __init__(self, container: Container) -> None:
        self._path = container.path
        self._entries = container.metadata
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._entries

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.reject(key, "must be a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.reject(key, "must be true or false")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a whole number. If the file lists one for each layer, all must be equal."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and len(set(value.tolist())) == 1:
            value = value.tolist()[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.reject(key, "must be a whole number, the same for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.reject(key, "must be a number")
        return float(value)

    def numbers(self, key: str) -> list[Any]:
        """Returns a list of numbers or flags; empty if there is none. A single value becomes a list."""
        value = self._value(key, np.zeros(0))
        if isinstance(value, int | float):
            return [value]
        if not isinstance(value, np.ndarray):
            raise self.reject(key, "must be a list of numbers")
        return list(value.tolist())

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts; empty if there is none."""
        value = self._value(key, ())
        if not isinstance(value, TextArray | tuple):
            raise self.reject(key, "must be a list of texts")
        return list(value)

    def reject(self, key: str, why: str) -> BadModelFolder:
        """Returns the error for an entry that cannot be used."""
        return BadModelFolder(f"{self._path.name}: {self._full(key)} {why}", param=self._full(key))

    def _value(self, key: str, default: Any) -> Any:
        value = self._entries.get(self._full(key), default)
        if value is None:
            raise self.reject(key, "is missing: fetch the file again, or another conversion of the model")
        return value

    def _full(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key
