"""Pulls models and adapters from the Hugging Face hub into its cache, which other tools share.

``huggingface_hub`` handles the token, the mirror (``HF_ENDPOINT``), the proxy and the cache. A pull fetches
only the files that are needed, small ones first: it rejects a model that cannot be run before it fetches the
weights.

Incomplete models are never used: the library moves a file into place when it is complete, a pull compares all
files with the hub's hashes, and only then makes the revision point to them. An interrupted pull continues
with the missing files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentflow.engine.store.adapter_folder import CONFIG, WEIGHTS, check_adapter
from agentflow.engine.store.embedding_folder import EMBEDDING_FILES, module_files
from agentflow.engine.store.gguf.names import is_mmproj, mmproj_among
from agentflow.engine.store.hub_errors import explained
from agentflow.engine.store.hub_names import COMMIT, HubName, cache_folder, gguf_files, repository_folder
from agentflow.engine.store.model_folder import INDEX, find_faults, json_object, pickles_in, shards_in
from agentflow.engine.store.native_architectures import NATIVE_ARCHITECTURES, OTHER_NAMES
from agentflow.engine.store.pull_progress import PullListener
from agentflow.engine.store.weight_scheme import read_scheme
from agentflow.errors import BadModelFolder, PullFailed
from agentflow.version import __version__

SMALL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    *EMBEDDING_FILES,
)
"""The files of a model folder that are read in addition to its weights."""

_INFO_TIMEOUT_S: Final = 30.0
_STALE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository. A hash is empty if the hub does not provide it."""

    path: str
    num_bytes: int
    sha256: str = ""  # the hash of the content of a large file
    git_sha1: str = ""  # the hash of git's header and the content of another file


def pull_from_hub(name: HubName, listener: PullListener) -> Path:
    """Fetches the missing files of a model, and verifies all files. Returns its snapshot folder, or its GGUF
    file. An exception of the listener ends the pull.

    Raises:
        PullFailed: the hub, the network, the disk or the model prevents the pull; the message says how to
            fix it.
    """
    try:
        import huggingface_hub.file_download  # noqa: F401  sets up its logger, which is replaced below
    except ImportError as error:
        raise PullFailed(
            f"pulling {name} needs the package {error.name!r}: run `pip install 'agentflow-lm[engine]'`"
        ) from error
    with _notes_to(listener):
        return _Pull(name, listener).run()


class _Pull:
    def __init__(self, name: HubName, listener: PullListener) -> None:
        self._name = name
        self._listener = listener
        self._commit = ""
        self._fetched: set[str] = set()
        self._done_bytes = 0
        self._total_bytes = 0

    def run(self) -> Path:
        listener = self._listener
        listener.begin("download")
        files = self._files()
        self._remove_stale()
        is_adapter = not self._name.gguf and _is_adapter(files)
        if self._name.gguf:
            chosen = [files[path] for path in _with_mmproj(gguf_files(self._name, files), files)]
            self._fetch(chosen)
        elif is_adapter:
            chosen = self._fetch_adapter(files)
        else:
            chosen = self._fetch_folder(files)
        listener.begin("verify")
        self._verify(chosen)
        if not self._name.gguf:
            self._check_folder(is_adapter=is_adapter)
        self._point_revision()
        return self._snapshot / chosen[0].path if self._name.gguf else self._snapshot

    def _files(self) -> dict[str, HubFile]:
        """Looks up the commit of the revision. Returns its files by path."""
        from huggingface_hub import HfApi

        api = HfApi(library_name="agentflow", library_version=__version__)
        repository, revision = self._name.repository, self._name.revision
        with explained(self._name):
            info = api.model_info(repository, revision=revision, files_metadata=True, timeout=_INFO_TIMEOUT_S)
            self._commit = str(info.sha)
            if not COMMIT.fullmatch(self._commit):
                raise ValueError("no commit")
            entries: Sequence[Any] = info.siblings or []
            if not entries or any(entry.size is None for entry in entries):  # some mirrors omit sizes
                tree = api.list_repo_tree(repository, recursive=True, revision=self._commit)
                entries = [entry for entry in tree if hasattr(entry, "size")]
            found = [_hub_file(entry) for entry in entries]
        return {file.path: file for file in found if ".." not in file.path.split("/")}

    def _fetch_folder(self, files: Mapping[str, HubFile]) -> list[HubFile]:
        """Fetches the files of a model folder into the cache, and returns them."""
        weights = self._check_listing(files)
        small = [files[path] for path in (*SMALL_FILES, INDEX) if path in files]
        self._fetch(small)
        self._check_config()
        modules = self._modules(files)
        self._fetch(modules)
        if INDEX in files:
            shards = shards_in(self._snapshot / INDEX)
            if shards is None or not shards <= files.keys():
                raise PullFailed(
                    f"{self._name}: {INDEX} lists files that the repository does not have: try another "
                    "revision",
                    param=INDEX,
                )
            weights = [files[path] for path in sorted(shards)]
        self._fetch(weights)
        return [*small, *modules, *weights]

    def _fetch_adapter(self, files: Mapping[str, HubFile]) -> list[HubFile]:
        """Fetches the files of an adapter (LoRA) into the cache, and returns them."""
        if WEIGHTS not in files:
            pickles = pickles_in(files)
            has = (
                f"only {pickles[0]}, a pickle, which can run code when it is read"
                if pickles
                else "no weights"
            )
            raise PullFailed(
                f"the adapter {self._name.repository} has {has}: take another, or save it as safetensors",
                param=pickles[0] if pickles else WEIGHTS,
            )
        chosen = [files[CONFIG], files[WEIGHTS]]
        self._fetch(chosen)
        return chosen

    def _check_folder(self, *, is_adapter: bool) -> None:
        try:
            if is_adapter:
                check_adapter(self._snapshot)
            elif faults := find_faults(self._snapshot):
                raise BadModelFolder("; ".join(faults.values()), param=self._name.repository)
        except BadModelFolder as error:
            raise PullFailed(f"{self._name} cannot be used: {error}", param=error.param) from error

    def _modules(self, files: Mapping[str, HubFile]) -> list[HubFile]:
        """Returns the files of modules that make embeddings from the model's output."""
        try:
            paths = module_files(self._snapshot)
        except BadModelFolder as error:
            raise PullFailed(str(error), param=error.param) from error
        return [files[path] for path in paths if path in files]

    def _check_listing(self, files: Mapping[str, HubFile]) -> list[HubFile]:
        """Returns the safetensors files. Raises ``PullFailed`` if there are none, or if another needed file
        is missing."""
        name = self._name
        tensors = [file for path, file in files.items() if path.endswith(".safetensors") and "/" not in path]
        if not tensors:
            ggufs = sorted(path for path in files if path.endswith(".gguf"))
            pickles = pickles_in(files)
            if ggufs:
                usual = next((path for path in ggufs if "q4_k_m" in path.lower()), ggufs[0])
                reason = f"GGUF files only: choose one, as in {name.repository}:{usual}"
            elif pickles:
                reason = (
                    f"weights only as pickles ({pickles[0]}), which can run code when they are read: take a "
                    "copy of the model with safetensors, or another revision"
                )
            else:
                reason = "no weights: take another repository"
            raise PullFailed(f"{name.repository} has {reason}", param=name.repository)
        for path in ("config.json", "tokenizer.json"):
            if path not in files:
                raise PullFailed(
                    f"{name.repository} has no {path}, which is needed: take another repository or revision",
                    param=path,
                )
        return [files["model.safetensors"]] if "model.safetensors" in files else tensors

    def _check_config(self) -> None:
        """Raises ``PullFailed`` if the model cannot be run, before the weights are fetched."""
        config = json_object(self._snapshot / "config.json")
        if config is None:
            raise PullFailed(f"config.json of {self._name} is not a JSON object", param="config.json")
        try:
            read_scheme(config)
        except (BadModelFolder, AttributeError, KeyError, TypeError, ValueError) as error:
            raise PullFailed(f"{self._name} cannot be used: {error}", param="quantization_config") from error
        names = config.get("architectures") or []
        names = names if isinstance(names, list) else [names]
        if not names or _is_known(names):
            return
        if "auto_map" in config:
            raise PullFailed(
                f"{self._name} needs custom code (auto_map in config.json), which is never run: take a "
                "model whose architecture transformers has",
                param="auto_map",
            )
        raise PullFailed(
            f"the architecture of {self._name} is {', '.join(map(str, names))}, which transformers does not "
            "have: install a newer version, or take another model",
            param="architectures",
        )

    def _fetch(self, files: Sequence[HubFile]) -> None:
        """Fetches the files that the cache does not have."""
        missing = [file for file in files if not self._has(file)]
        missing_bytes = sum(file.num_bytes for file in missing)
        self._total_bytes += missing_bytes
        self._check_disk(missing_bytes)
        for file in missing:
            self._download(file)

    def _download(self, file: HubFile, *, again: bool = False) -> None:
        from huggingface_hub import hf_hub_download

        self._fetched.add(file.path)
        with explained(self._name, file.path):
            hf_hub_download(
                self._name.repository,
                file.path,
                revision=self._commit,
                library_name="agentflow",
                library_version=__version__,
                force_download=again or self._path(file).exists(),  # an existing file has the wrong size
                tqdm_class=self._progress(),
            )

    def _verify(self, files: Sequence[HubFile]) -> None:
        """Compares the files with the hub's hashes. Fetches files again that were damaged in the cache."""
        total, done = sum(file.num_bytes for file in files), 0
        for file in files:
            is_intact = self._is_intact(file, done, total)
            if not is_intact and file.path not in self._fetched:
                self._download(file, again=True)
                is_intact = self._is_intact(file, done, total)
            if not is_intact:
                self._remove(file)
                raise PullFailed(
                    f"the hash of {file.path} of {self._name} differs from the hub's: the file was damaged "
                    "in transit or tampered with, and has been removed; pull again",
                    param=file.path,
                )
            done += file.num_bytes

    def _is_intact(self, file: HubFile, done: int, total: int) -> bool:
        digest = hashlib.sha256() if file.sha256 else hashlib.sha1(usedforsecurity=False)
        if not file.sha256:
            digest.update(f"blob {file.num_bytes}\0".encode())
        with self._path(file).open("rb") as content:
            while block := content.read(1 << 22):
                digest.update(block)
                self._listener.advance(done + content.tell(), total)
        expected = file.sha256 or file.git_sha1
        return not expected or digest.hexdigest() == expected

    def _remove(self, file: HubFile) -> None:
        """Removes the file from the cache: the link in the snapshot, and the content."""
        link = self._path(file)
        content = link.parent / os.readlink(link) if link.is_symlink() else None
        for path in (link, content):
            if path is not None:
                path.unlink(missing_ok=True)

    def _check_disk(self, num_bytes: int) -> None:
        folder = cache_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            raise PullFailed(
                f"{self._name} cannot be written to {folder} ({error}): set HF_HOME to a writable folder"
            ) from error
        if num_bytes > free:
            raise PullFailed(
                f"{self._name} needs {num_bytes / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB are "
                "free: free some space, or set HF_HOME to a folder on another disk",
                param=self._name.repository,
            )

    def _remove_stale(self) -> None:
        """Removes incomplete files of killed pulls: the library neither resumes nor overwrites them."""
        for leftover in (repository_folder(self._name) / "blobs").glob("*.incomplete"):
            if time.time() - leftover.stat().st_mtime > _STALE_S:
                leftover.unlink(missing_ok=True)

    def _point_revision(self) -> None:
        """Records the commit to which the revision points, now that its files are complete."""
        if self._name.revision == self._commit:
            return
        ref = repository_folder(self._name) / "refs" / self._name.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        fresh.write_text(self._commit, encoding="ascii")
        fresh.replace(ref)

    @property
    def _snapshot(self) -> Path:
        return repository_folder(self._name) / "snapshots" / self._commit

    def _path(self, file: HubFile) -> Path:
        return self._snapshot / file.path

    def _has(self, file: HubFile) -> bool:
        try:
            return self._path(file).stat().st_size == file.num_bytes
        except OSError:
            return False

    def _progress(self) -> type:
        """Returns a class that replaces tqdm's and reports to the listener. The library creates one or two
        objects for each file. It counts bytes on disk in ``update``, and bytes from the network in other
        methods."""
        pull = self

        class Progress:
            def __init__(self, *_: object, **__: object) -> None:
                self.total: int | None = None

            def __enter__(self) -> Progress:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def update(self, num_bytes: float | None = 1) -> None:
                pull._done_bytes += int(num_bytes or 0)
                pull._listener.advance(pull._done_bytes, pull._total_bytes)

            def update_transfer(self, num_bytes: float | None = 1) -> None:
                pass

            def set_postfix_str(self, text: str, refresh: bool = False) -> None:
                pass

            set_transfer_postfix_str = set_postfix_str

            def close(self) -> None:
                pass

        return Progress


def _with_mmproj(model: Sequence[str], files: Collection[str]) -> list[str]:
    """Returns the files of a GGUF model, with its projector file if the repository has one."""
    first = Path(model[0])
    names = [
        Path(path).name for path in files if path.endswith(".gguf") and Path(path).parent == first.parent
    ]
    found = None if is_mmproj(first.name) else mmproj_among(first.name, names)
    return [*model, *([] if found is None else [first.with_name(found).as_posix()])]


def _is_adapter(files: Collection[str]) -> bool:
    """Whether a repository is an adapter. It may also have a tokenizer and a config, but no other weights."""
    tensors = {path for path in files if path.endswith(".safetensors") and "/" not in path}
    return CONFIG in files and tensors <= {WEIGHTS}


def _hub_file(entry: Any) -> HubFile:
    """Converts an entry of a listing of the library, which has two types."""
    path = getattr(entry, "rfilename", None) or entry.path
    num_bytes = entry.lfs.size if entry.lfs is not None else entry.size
    if entry.lfs is not None:
        return HubFile(path, num_bytes, sha256=entry.lfs.sha256)
    return HubFile(path, num_bytes, git_sha1=entry.blob_id or "")


def _is_known(architectures: Sequence[object]) -> bool:
    """Whether transformers has one of these architectures, or one runs natively."""
    if importlib.util.find_spec("transformers") is not None:
        transformers = importlib.import_module("transformers")
        # ``dir`` takes half a second: it searches a list for each name.
        # Some configs have other capitals than transformers.
        known = map(str.lower, vars(transformers)["__all__"])
        if not {str(name).lower() for name in architectures}.isdisjoint(known):
            return True
    return not (NATIVE_ARCHITECTURES | OTHER_NAMES.keys()).isdisjoint(map(str, architectures))


class _Notes(logging.Handler):
    """Passes log messages of the library to the listener, such as a wait for the hub."""

    def __init__(self, listener: PullListener) -> None:
        super().__init__(logging.WARNING)
        self._listener = listener

    def emit(self, record: logging.LogRecord) -> None:
        self._listener.note("; ".join(filter(None, map(str.strip, record.getMessage().splitlines()))))


@contextmanager
def _notes_to(listener: PullListener) -> Iterator[None]:
    logger = logging.getLogger("huggingface_hub")
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_Notes(listener)], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
