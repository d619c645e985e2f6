"""Names of models on the Hugging Face hub, and their places in the hub's cache on this computer.

Other tools use the same cache, in the layout that the hub's library documents::

    models--OWNER--NAME/refs/REVISION           the commit to which a branch or tag points
    models--OWNER--NAME/snapshots/COMMIT/FILE   a link to the file's content in blobs/

Nothing here uses the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentflow.engine.store.catalog import CATALOG
from agentflow.engine.store.model_folder import find_faults, gguf_parts
from agentflow.errors import PullFailed

MAIN: Final = "main"
"""The revision of a name that has none."""

_PART: Final = r"[A-Za-z0-9][\w.-]*"
_NAME: Final = re.compile(rf"(?P<repository>{_PART}/{_PART})(?::(?P<gguf>[^:@]+))?(?:@(?P<revision>[^:@]+))?")
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_QUANTISATION: Final = re.compile(
    r"(?<![a-z0-9])(?:I?Q\d[A-Z0-9_]*|BF16|F16|F32)(?![a-z0-9_])", re.IGNORECASE
)
# Files that accompany a model: an image encoder or an importance matrix.
_OTHER_GGUF: Final = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """``OWNER/NAME[:GGUF][@REVISION]``."""

    repository: str
    gguf: str = ""  # a quantisation, such as Q4_K_M, or a file name; empty: the safetensors files
    revision: str = MAIN

    def __str__(self) -> str:
        gguf = f":{self.gguf}" if self.gguf else ""
        revision = f"@{self.revision}" if self.revision != MAIN else ""
        return f"{self.repository}{gguf}{revision}"


def hub_name(name: str) -> HubName | None:
    """Parses a short name or ``OWNER/NAME[:GGUF][@REVISION]``. Returns None for anything else, such as a
    path."""
    if name in CATALOG:
        return HubName(CATALOG[name].repository)
    found = _NAME.fullmatch(name)
    if found is None or (name.lower().endswith(".gguf") and not found["gguf"]):
        return None
    revision = found["revision"] or MAIN
    if ".." in revision or revision.startswith("/"):
        return None
    return HubName(found["repository"], found["gguf"] or "", revision)


def served_name(model: str) -> str:
    """Returns the default name under which a model is served: the last part of a path, or the unchanged name
    of a model in the store or on the hub."""
    path = os.path.expanduser(model)
    is_path = os.path.exists(path) or (hub_name(model) is None and (os.sep in model or model in (".", "..")))
    if not is_path:
        return model
    last = Path(os.path.abspath(path))
    return (last.stem if last.suffix == ".gguf" else last.name) or model


def cache_folder() -> Path:
    """Returns the folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_model(name: HubName) -> Path | None:
    """Returns the snapshot folder of a model, or its GGUF file, if the cache has all files; else None."""
    snapshot = cached_snapshot(name)
    if snapshot is None:
        return None
    if not name.gguf:
        return None if find_faults(snapshot) else snapshot
    files = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*.gguf") if file.is_file()]
    try:
        return snapshot / gguf_files(name, files)[0]
    except PullFailed:
        return None


def cached_snapshot(name: HubName) -> Path | None:
    """Returns the snapshot folder of a revision, which may lack files; None if there is no such folder."""
    repository = repository_folder(name)
    commit = name.revision
    if not COMMIT.fullmatch(commit):
        try:
            commit = (repository / "refs" / name.revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
    folder = repository / "snapshots" / commit
    return folder if COMMIT.fullmatch(commit) and folder.is_dir() else None


def repository_folder(name: HubName) -> Path:
    """Returns the folder of a repository in the cache."""
    return cache_folder() / "--".join(("models", *name.repository.split("/")))


def cached_models() -> Iterator[tuple[HubName, Path]]:
    """Yields the complete models in the cache, at each branch and tag."""
    for repository in sorted(cache_folder().glob("models--*--*")):
        _, owner, *rest = repository.name.split("--")
        refs = repository / "refs"
        revisions = [ref.relative_to(refs).as_posix() for ref in sorted(refs.rglob("*")) if ref.is_file()]
        for revision in revisions:
            plain = HubName(f"{owner}/{'--'.join(rest)}", revision=revision)
            snapshot = cached_snapshot(plain)
            if snapshot is None:
                continue
            if not find_faults(snapshot):
                yield plain, snapshot
            yield from _cached_ggufs(plain, snapshot)


def gguf_files(name: HubName, files: Collection[str]) -> list[str]:
    """Returns the GGUF files of the model that ``name.gguf`` selects in a repository. Raises ``PullFailed``
    if it selects no model or several."""
    known = sorted(file for file in files if file.endswith(".gguf"))
    if name.gguf in known:
        found = [name.gguf]
    else:
        tag = re.compile(rf"(?<![a-z0-9]){re.escape(name.gguf.lower())}(?![a-z0-9_])")
        models = [file for file in known if not _OTHER_GGUF.search(file)]
        found = [file for file in models if tag.search(Path(file).name.lower())]
    # One list of files for each model.
    parts = {tuple(str(Path(file).with_name(part)) for part in gguf_parts(Path(file).name)) for file in found}
    if not parts:
        has = f"it has {_some(known)}" if known else "it has no GGUF file"
        raise PullFailed(f"{name.repository} has no GGUF file {name.gguf}: {has}", param=name.gguf)
    if len(parts) > 1:
        firsts = sorted(first for first, *_ in parts)
        raise PullFailed(
            f"{name.gguf} of {name.repository} can be {_some(firsts)}: choose one, as in "
            f"{name.repository}:{firsts[0]}",
            param=name.gguf,
        )
    chosen = [*parts.pop()]
    if missing := [part for part in chosen if part not in files]:
        raise PullFailed(
            f"{name.gguf} of {name.repository} is incomplete ({missing[0]} is missing): take another",
            param=name.gguf,
        )
    return chosen


def _cached_ggufs(name: HubName, snapshot: Path) -> Iterator[tuple[HubName, Path]]:
    """Yields the models in GGUF files of a snapshot, named by their quantisation if it is unique, else by
    their file."""
    found = [file for file in sorted(snapshot.rglob("*.gguf")) if file.is_file()]
    files = {file.relative_to(snapshot).as_posix(): file for file in found}
    for gguf, file in files.items():
        if _OTHER_GGUF.search(file.name):
            continue
        by_file = HubName(name.repository, gguf, name.revision)
        tag = _QUANTISATION.search(file.name)
        by_tag = HubName(name.repository, tag[0].upper(), name.revision) if tag else by_file
        with suppress(PullFailed):
            if gguf_files(by_file, files)[0] != gguf:
                continue
            try:
                gguf_files(by_tag, files)
                yield by_tag, file
            except PullFailed:
                yield by_file, file


def _some(files: list[str], most: int = 8) -> str:
    return ", ".join(files[:most]) + (", …" if len(files) > most else "")
