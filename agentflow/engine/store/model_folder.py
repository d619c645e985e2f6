"""Checks that a folder holds a whole Hugging Face model, before anything is loaded from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentflow.errors import BadModelFolder


def check_model_folder(folder: Path) -> None:
    """Raise BadModelFolder, naming everything that is wrong, unless the folder can be loaded."""
    if not folder.is_dir():
        raise BadModelFolder(
            f"{folder} is a file: give the folder that holds config.json, *.safetensors and tokenizer.json"
        )
    if faults := faults_of(folder):
        raise BadModelFolder(f"{folder} is no usable model folder: {'; '.join(faults)}")


def faults_of(folder: Path) -> list[str]:
    """What keeps the folder from being loaded, one phrase each; empty if nothing does.

    Reads the config and the headers of the weights, not the weights: a few milliseconds.
    """
    faults = [
        f"{name} is missing" for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()
    ]
    if (folder / "config.json").is_file() and _json_object(folder / "config.json") is None:
        faults.append("config.json holds no JSON object")
    return faults + _weight_faults(folder)


def _weight_faults(folder: Path) -> list[str]:
    files = {file.name for file in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = _json_object(index)
        shards = content.get("weight_map") if content else None
        if not isinstance(shards, dict):
            return [f"{index.name} has no weight_map"]
        files = {str(name) for name in shards.values()}
    if not files:
        return ["*.safetensors is missing (other weight formats are not read)"]
    return [fault for name in sorted(files) if (fault := _safetensors_fault(folder / name))]


def _safetensors_fault(file: Path) -> str | None:
    """Compare the file's size with what its header promises: half downloads and the pointer files of
    Git LFS are the usual trouble, and a bus error or a far-away message is what they lead to."""
    try:
        size = file.stat().st_size
        with file.open("rb") as content:
            header_bytes = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(header_bytes)) if 8 + header_bytes <= size else None
    except FileNotFoundError:
        return f"{file.name} is missing"
    except (OSError, ValueError):
        header = None
    if not isinstance(header, dict):
        return f"{file.name} is not a safetensors file (a Git LFS pointer? then run `git lfs pull`)"
    try:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = size == 8 + header_bytes + max(ends, default=0)
    except (TypeError, KeyError, IndexError):
        whole = False
    return None if whole else f"{file.name} is cut off or damaged"


def _json_object(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
