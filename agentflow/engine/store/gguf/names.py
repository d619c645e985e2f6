"""Finds the projector file (``mmproj``) of a model by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_MMPROJ_TYPES: Final = ("f16", "bf16", "q8_0", "f32")
"""Types of projector files, in order of preference: towers are computed in bfloat16 or float32."""
_COMMON: Final = re.compile(r"mmproj|(?<![a-z0-9])(?:model|vision|bf16|f16|f32|i?q\d[a-z0-9_]*)(?![a-z0-9])")
"""Words in the names of GGUF files that do not belong to the name of a model."""


def is_mmproj(name: str) -> bool:
    """Whether this is the name of a projector file."""
    return "mmproj" in name.lower()


def find_mmproj(model: Path) -> Path | None:
    """Returns the projector file in the folder of a GGUF model, or None."""
    found = mmproj_among(model.name, [file.name for file in model.parent.glob("*.gguf")])
    return None if found is None else model.with_name(found)


def mmproj_among(model: str, names: Iterable[str]) -> str | None:
    """Returns the projector file of a GGUF model among the files of its folder, or None. Its name contains
    ``mmproj``. If it contains a model's name, the name of the GGUF model must start with that, so that a
    folder may have several models."""
    letters, found = _name_letters(model), []
    for name in names:
        if is_mmproj(name) and name != model and letters.startswith(mine := _name_letters(name)):
            preferred = [kind in name.lower() for kind in _MMPROJ_TYPES]
            rank = preferred.index(True) if any(preferred) else len(_MMPROJ_TYPES)
            found.append((-len(mine), rank, name))
    return min(found)[-1] if found else None


def _name_letters(name: str) -> str:
    """Returns the letters and digits of the model's name in a file name."""
    return re.sub("[^a-z0-9]", "", _COMMON.sub("", name.lower().removesuffix(".gguf")))
