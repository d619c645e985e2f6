"""Checks a local model before it is loaded: a Hugging Face folder, or a GGUF file.

Reads only the config, the headers of the weights and the first bytes of a GGUF file, in a few milliseconds.
Pickled weights are rejected, because reading them can run code.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from agentflow.errors import BadModelFolder

INDEX: Final = "model.safetensors.index.json"
PICKLE_ENDINGS: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

MAX_HEADER_BYTES: Final = 100_000_000
"""The largest header that the safetensors format allows."""
_GGUF_MAGIC: Final = b"GGUF"
_GGUF_PART: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


def check_folder(path: Path) -> None:
    """Raises ``BadModelFolder`` with a list of all faults, unless ``path`` is a complete model folder or a
    GGUF file."""
    from agentflow.engine.store.gguf.file import find_gguf  # needs numpy, which a bare install does not have

    if (gguf := find_gguf(path)) is not None:
        check_gguf(gguf)
        return
    if not path.is_dir():
        raise BadModelFolder(
            f"{path} is a file: give a folder that contains config.json, *.safetensors and tokenizer.json, "
            "or a .gguf file",
            param=path.name,
        )
    if faults := find_faults(path):
        raise BadModelFolder(
            f"{path} is not a usable model folder: {'; '.join(faults.values())}", param=next(iter(faults))
        )


def check_gguf(file: Path) -> None:
    """Raises ``BadModelFolder`` unless all files of the model are there and start with GGUF's magic
    number."""
    parts = gguf_parts(file.name)
    if file.name != parts[0]:
        raise BadModelFolder(
            f"{file.name} is one of {len(parts)} files of a model: give the first one, {parts[0]}",
            param=file.name,
        )
    for part in (file.with_name(name) for name in parts):
        try:
            with part.open("rb") as content:
                magic = content.read(len(_GGUF_MAGIC))
        except FileNotFoundError:
            raise BadModelFolder(
                f"{part.name} is missing next to {file.name}: fetch all {len(parts)} files",
                param=part.name,
            ) from None
        except OSError as error:
            raise BadModelFolder(f"{part} cannot be read: {error}", param=part.name) from error
        if magic != _GGUF_MAGIC:
            raise BadModelFolder(
                f"{part} is not a GGUF file (a Git LFS pointer? then run `git lfs pull`)", param=part.name
            )


def gguf_parts(name: str) -> list[str]:
    """Returns the names of all files of the model to which this GGUF file belongs, in order."""
    found = _GGUF_PART.fullmatch(name)
    if found is None:
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[2]}.gguf" for number in range(1, int(found[2]) + 1)]


def pickles_in(names: Iterable[str]) -> list[str]:
    """Returns the names of files with pickled weights."""
    return sorted(name for name in names if name.endswith(PICKLE_ENDINGS) and name != "training_args.bin")


def find_faults(folder: Path) -> dict[str, str]:
    """Returns the files that prevent loading the folder, with a phrase for each."""
    faults = {
        name: f"{name} is missing"
        for name in ("config.json", "tokenizer.json")
        if not (folder / name).is_file()
    }
    if "config.json" not in faults and json_object(folder / "config.json") is None:
        faults["config.json"] = "config.json is not a JSON object"
    return faults | _weight_faults(folder)


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the folder's safetensors files: the files in its index, or ``model.safetensors``,
    or else all. Some repositories also have the weights in another layout. Raises ``BadModelFolder`` if the
    index is damaged."""
    if (folder / INDEX).is_file():
        shards = shards_in(folder / INDEX)
        if shards is None:
            raise BadModelFolder(f"{INDEX} has no weight_map of files in the same folder", param=INDEX)
        return sorted(shards)
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    return sorted(file.name for file in folder.glob("*.safetensors"))


def shards_in(index: Path) -> set[str] | None:
    """Returns the files in an index of safetensors files; None if the index is damaged, or lists files in
    other folders."""
    content = json_object(index)
    shards = content.get("weight_map") if content else None
    if not isinstance(shards, dict):
        return None
    names = {str(name) for name in shards.values()}
    return names if all(name == Path(name).name for name in names) else None


def _weight_faults(folder: Path) -> dict[str, str]:
    try:
        files = weight_files(folder)
    except BadModelFolder as error:
        return {INDEX: str(error)}
    if not files:
        pickles = pickles_in(file.name for file in folder.iterdir()) if folder.is_dir() else []
        if pickles:
            pickled = (
                f"*.safetensors is missing, and {pickles[0]} is a pickle, which can run code when it is "
                "read: save the weights as safetensors, or take a copy of the model with safetensors"
            )
            return {pickles[0]: pickled}
        return {"*.safetensors": "*.safetensors is missing (other weight formats are not read)"}
    return {name: fault for name in files if (fault := safetensors_fault(folder / name))}


def safetensors_fault(file: Path) -> str | None:
    """Compares the file's size with its header, to find incomplete downloads and Git LFS pointers, which
    would later cause bus errors or obscure messages. Returns the fault, or None."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{file.name} is not a file"
        tensors, first = safetensors_header(file)
    except FileNotFoundError:
        return f"{file.name} is missing"
    except (OSError, BadModelFolder):
        return f"{file.name} is not a safetensors file (a Git LFS pointer? then run `git lfs pull`)"
    try:
        whole = status.st_size == first + max([one["data_offsets"][1] for one in tensors.values()], default=0)
    except (TypeError, KeyError, IndexError):
        whole = False
    return None if whole else f"{file.name} is truncated or damaged"


def safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """Returns the entries of the tensors in a safetensors file, by name, and the place where their values
    begin: the file has 8 bytes of length, JSON, and the values. Raises ``BadModelFolder`` if it is no such
    file, and ``OSError`` if it cannot be read."""
    with file.open("rb") as content:
        num_bytes = int.from_bytes(content.read(8), "little")
        is_whole = num_bytes <= min(file.stat().st_size - 8, MAX_HEADER_BYTES)
        try:
            header = json.loads(content.read(num_bytes)) if is_whole else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise BadModelFolder(f"{file} is not a safetensors file", param=file.name)
    header.pop("__metadata__", None)
    return header, 8 + num_bytes


def json_object(file: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if there is no valid one."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_text(file: Path) -> str | None:
    """Returns the text of a file; None if there is no such file. Raises ``BadModelFolder`` if it cannot be
    read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BadModelFolder(f"{file} cannot be read: {error}", param=file.name) from error


def read_object(file: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if there is no such file. Raises ``BadModelFolder`` if it is
    invalid."""
    text = read_text(file)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadModelFolder(
            f"{file} is not valid JSON ({error}); fetch the model again", param=file.name
        ) from error
    if not isinstance(content, dict):
        raise BadModelFolder(f"{file} is not a JSON object; fetch the model again", param=file.name)
    return content
