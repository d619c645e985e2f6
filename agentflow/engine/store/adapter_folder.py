"""Finds adapters (LoRA in PEFT's format), and checks their folders before anything is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from agentflow.engine.store.hub_names import cached_snapshot, hub_name
from agentflow.engine.store.model_folder import json_object, pickles_in, safetensors_fault, safetensors_header
from agentflow.errors import BadArgument, BadModelFolder, UnknownModel
from agentflow.protocol.sampling import is_whole

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

MAX_CONFIG_BYTES: Final = 1_000_000
_MAX_DIMENSION: Final = 2**31
_PADDING = 32


def named_adapters(texts: Iterable[str]) -> Mapping[str, str]:
    """Parses ``NAME=PATH`` texts. Returns the paths by name. Raises ``BadArgument`` for other texts.

    >>> named_adapters(["polite=./polite"])
    {'polite': './polite'}
    """
    found: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not path:
            raise BadArgument(f"lora must be NAME=PATH, not {text!r}", param="lora")
        check_adapter_name(name)
        if name in found:
            raise BadArgument(f"lora has the adapter {name!r} twice", param="lora")
        found[name] = path
    return found


def check_adapter_name(name: str) -> None:
    """Raises ``BadArgument`` for a name that cannot be part of a model's name."""
    if not name or len(name) > 100 or not name.isprintable() or any(c in " :/=" for c in name):
        raise BadArgument(
            f"the name of an adapter must have 1 to 100 characters without spaces, ':', '/' and '=', "
            f"not {name[:120]!r}",
            param="lora_name",
        )


def missing_adapters(loras: Iterable[str]) -> list[str]:
    """Returns the paths in ``NAME=PATH`` texts that are adapters of the hub and not on this computer.
    Raises ``BadArgument`` for other texts."""
    return [path for path in named_adapters(loras).values() if _found(path) is None]


def _found(path: str) -> Path | None:
    """Returns the folder; None for an adapter of the hub that is not on this computer."""
    try:
        folder = Path(path).expanduser()
    except RuntimeError:  # the home of an unknown user
        folder = Path(path)
    if _is_folder(folder) or (name := hub_name(path)) is None:
        return folder
    pulled = cached_snapshot(name)
    return pulled if pulled is not None and (pulled / CONFIG).is_file() else None


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, or a folder that may not be read
        return False


def resolve_adapter(path: str) -> Path:
    """Returns the folder of an adapter: a local one, or ``OWNER/NAME[@REVISION]`` that was pulled from the
    hub. Raises ``UnknownModel`` if there is none, ``BadModelFolder`` if it is not a complete adapter."""
    folder = _found(path)
    if folder is None:
        raise UnknownModel(
            f"there is no folder {path!r}, and no adapter with that name has been pulled: "
            f"run `agentflow pull {path}`",
            param="lora",
        )
    if not _is_folder(folder):
        raise UnknownModel(f"there is no adapter folder {path!r}: give a folder that contains {CONFIG}")
    check_adapter(folder)
    return folder.resolve()


def check_adapter(folder: Path) -> None:
    """Raises ``BadModelFolder`` unless the folder has a config and complete weights in safetensors."""
    try:
        _check_files(folder)
    except OSError as error:
        raise BadModelFolder(f"{folder} cannot be read: {error.strerror}") from error


def _check_files(folder: Path) -> None:
    config = folder / CONFIG
    if not config.is_file():
        raise BadModelFolder(f"{folder} has no {CONFIG}: it is not an adapter in PEFT's format", param=CONFIG)
    if config.stat().st_size > MAX_CONFIG_BYTES:
        raise BadModelFolder(f"{config} is larger than {MAX_CONFIG_BYTES:,} bytes", param=CONFIG)
    if json_object(config) is None:
        raise BadModelFolder(f"{config} is not a JSON object", param=CONFIG)
    if not (folder / WEIGHTS).is_file() and (pickles := pickles_in(f.name for f in folder.iterdir())):
        raise BadModelFolder(
            f"{folder}: {WEIGHTS} is missing, and {pickles[0]} is a pickle, which can run code when it is "
            "read: save the adapter as safetensors",
            param=pickles[0],
        )
    if (fault := safetensors_fault(folder / WEIGHTS)) is not None:
        raise BadModelFolder(f"{folder}: {fault}", param=WEIGHTS)


def adapter_bytes(folder: Path, item_bytes: int) -> int:
    """Returns an upper bound of an adapter's memory in bytes: kernels pad ranks to multiples of 32. Raises
    ``BadModelFolder`` for an invalid shape.

    Args:
        folder: an adapter that ``check_adapter`` accepts.
        item_bytes: the bytes of a weight.
    """
    tensors, _ = safetensors_header(folder / WEIGHTS)
    shapes: list[list[int]] = [one.get("shape") for one in tensors.values()]
    for shape in shapes:
        if not isinstance(shape, list) or not all(is_whole(size, 0, _MAX_DIMENSION) for size in shape):
            raise BadModelFolder(f"{folder}: {WEIGHTS} is damaged: a shape is {shape!r:.100}", param=WEIGHTS)
    return item_bytes * sum(max(shape) * (-(-min(shape) // _PADDING) * _PADDING) for shape in shapes if shape)


def adapter_identity(folder: Path) -> str:
    """Returns a digest of an adapter's config and weights. Raises ``BadModelFolder`` like
    ``check_adapter``."""
    check_adapter(folder)
    digest = hashlib.blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
