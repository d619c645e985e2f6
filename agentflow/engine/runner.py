"""The interface between the engine and a model: runs a batch and returns a token for each sampled row."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.media_run import PreparedMedium


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """The properties of a model that the engine needs."""

    model: str
    vocab_size: int
    max_context: int  # the longest sequence
    num_slots: int  # the size of the KV pool in tokens
    end_token_ids: tuple[int, ...]
    kv_bytes_per_token: int
    weight_bytes: int
    weights: str  # their format, for people
    # The dimensions of its embeddings; 0: it generates text instead.
    embedding_size: int = 0
    architecture: str = ""  # of a native model, its class in transformers
    batch_size: int | None = None  # as in ``Capabilities``
    identity: str = ""  # equal for runners that compute the same keys and values, on any machine
    launches_ahead: bool = False  # a batch may be launched while the one before it runs
    prepares: bool = False  # a batch may be prepared while the one before it runs (``PreparingRunner``)
    reads_media: bool = False  # it reads images (``MediaRunner``)
    kernels: str = field(default="none", compare=False)  # the name of its kernels


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter (LoRA) that was read and is not installed yet. ``identity``: of its weights and settings;
    ``weights``: in the runner's form."""

    identity: str
    weights: object


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter (LoRA). ``identity``: of its weights and settings; ``nbytes``: its memory."""

    identity: str
    nbytes: int


class AcceleratorFault(Exception):
    """The device failed, and this process can no longer use it: all later forward passes would fail too."""


class OutOfMemory(Exception):
    """There is not enough memory for this batch. A smaller one may fit."""


class ModelRunner(Protocol):
    """Runs batches. All methods belong to one thread.

    ``launch`` starts a batch and returns a handle for ``collect``, which waits until the batch has written
    the KV of its tokens and its output is on the host. Batches run in the order of their launches and are
    collected in that order; ``launch`` has read all arrays of the batch, ``req_to_token`` too, when it
    returns. Token masks are computed when they are first read, which takes time: a runner that launches ahead
    queues the forward pass first. ``Batch.changes`` shows whether an earlier batch was lost: it was scheduled
    and never launched, or its launch raised. All batches are collected before ``close``. Only if
    ``info.launches_ahead`` may a batch be launched before the previous one is collected, and then it may have
    ``pending`` tokens. A runner on processors that the caller needs too may do all work in ``collect``.
    ``launch`` and ``collect`` raise ``AcceleratorFault`` or ``OutOfMemory`` where these apply; any other
    exception counts as a fault of the batch.
    """

    info: RunnerInfo

    def launch(self, batch: Batch) -> Any: ...

    def collect(self, handle: Any) -> BatchOutput: ...

    def close(self) -> None: ...


@runtime_checkable
class PreparingRunner(ModelRunner, Protocol):
    """A ``ModelRunner`` that does a part of ``launch`` earlier, while the batch before it runs.

    After ``prepare``, the next batch may be another one, or the same object with other numbers in
    ``token_ids``, ``write_slots`` and ``req_to_token``, which a runner must therefore not copy before
    ``launch``.
    """

    def prepare(self, batch: Batch) -> None: ...


@runtime_checkable
class AdapterRunner(ModelRunner, Protocol):
    """A ``ModelRunner`` whose model can have adapters (LoRA).

    ``read_adapter`` reads the adapter in a folder, in any thread and while batches run; ``BadModelFolder`` or
    ``BadArgument`` if the model cannot have it. ``install_adapter`` makes it ready for batches that use its
    identity, and takes little time; a repeated call changes nothing. ``drop_adapter`` frees it.
    """

    def read_adapter(self, folder: Path) -> ReadAdapter: ...

    def install_adapter(self, adapter: ReadAdapter) -> AdapterInfo: ...

    def drop_adapter(self, identity: str) -> None: ...


class MediaEncoding(Protocol):
    """The work of a vision tower on one medium, in slices: a layer over some rows.

    ``num_slices``: the slices that are left, each of about equal work. ``flops_per_slice``: the work of one.
    ``run`` computes the next ``count`` slices and returns when they are computed, so that its time is their
    time; no batch is in flight meanwhile. Raises ``AcceleratorFault`` or ``OutOfMemory`` where these apply;
    any other exception counts as a fault of the medium.
    """

    @property
    def num_slices(self) -> int: ...

    @property
    def flops_per_slice(self) -> float: ...

    def run(self, count: int) -> None: ...


@runtime_checkable
class MediaRunner(ModelRunner, Protocol):
    """A ``ModelRunner`` whose model reads images.

    ``encode_medium`` begins the encoding of a medium. When no slice of it is left, the runner has the
    medium's features, which take ``feature_bytes`` of memory, until ``drop_medium``. Batches contain only
    media with features, and a dropped medium is in no launched batch. An unfinished encoding is dropped
    likewise.
    """

    def encode_medium(self, medium: PreparedMedium) -> MediaEncoding: ...

    def feature_bytes(self, medium: PreparedMedium) -> int: ...

    def drop_medium(self, identity: str) -> None: ...


def run_batch(runner: ModelRunner, batch: Batch) -> BatchOutput:
    """Runs one batch by itself."""
    return runner.collect(runner.launch(batch))
