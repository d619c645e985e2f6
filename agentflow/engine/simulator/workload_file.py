"""Files of workloads.

A file is either JSON with the name of a generator and its parameters (``GENERATORS``), or JSON lines: a
header, then one request on each line, as the server records them (``agentflow serve --record-workload``). A
prompt with the same beginning as an earlier request refers to it. Files that end in ``.gz`` are compressed.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec
import numpy as np

from agentflow.engine.cache.token_run import common_prefix_len, token_run
from agentflow.engine.request import Objective
from agentflow.engine.simulator.generators import make_arrivals
from agentflow.engine.simulator.workload import Arrival, Workload
from agentflow.errors import BadArgument
from agentflow.protocol.unreadable import UNREADABLE

VERSION = 1
MIN_SHARED = 16
"""Shorter common prefixes are written out."""
MAX_REMEMBERED = 64
"""The number of earlier requests that are searched for a common prefix."""


class _Header(msgspec.Struct):
    agentflow_workload: int
    name: str = ""
    kv_tokens: Annotated[int, msgspec.Meta(ge=1)] = 65_536


class _Line(msgspec.Struct, omit_defaults=True):
    """One request of a file, as ``Arrival``."""

    at: float
    prompt: list[int]
    output: list[int]
    like: tuple[int, int] | None = None  # (i, n): the prompt begins with the first n tokens of request i
    after: int | None = None
    limit: int = 0
    tenant: str = ""
    salt: str = ""
    objective: Objective = "latency"
    group: str = ""
    state: str = ""
    label: str = ""
    program: str = ""
    joins: list[int] = []
    model: str = ""
    is_extra: bool = False


class _Generated(msgspec.Struct, forbid_unknown_fields=True):
    generator: str
    parameters: dict[str, float | int] = {}
    kv_tokens: Annotated[int, msgspec.Meta(ge=1)] = 65_536
    name: str = ""


@dataclass
class WorkloadWriter:
    """Writes requests one by one, in any order of arrival."""

    sink: BinaryIO
    name: str
    kv_tokens: int
    num_written: int = 0
    _recent: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED))

    def __post_init__(self) -> None:
        self._put(_Header(VERSION, self.name, self.kv_tokens))

    def write(self, arrival: Arrival) -> None:
        """Writes one line."""
        run = token_run(arrival.prompt)
        like = max(((common_prefix_len(run, other), index) for index, other in self._recent), default=(0, 0))
        shared = like[0] if like[0] >= MIN_SHARED else 0
        self._put(
            _Line(
                at=round(arrival.at_s, 6),
                prompt=arrival.prompt[shared:].tolist(),
                output=arrival.output.tolist(),
                like=(like[1], shared) if shared else None,
                after=arrival.after,
                limit=arrival.max_new_tokens,
                tenant=arrival.tenant,
                salt=arrival.salt,
                objective=arrival.objective,
                group=arrival.task_group,
                state=arrival.state,
                label=arrival.label,
                program=arrival.program,
                joins=list(arrival.joins),
                model=arrival.model,
                is_extra=arrival.is_extra,
            )
        )
        self._recent.append((self.num_written, token_run(arrival.tokens)))
        self.num_written += 1

    def flush(self) -> None:
        """Makes the lines written so far readable by others."""
        self.sink.flush()

    def _put(self, line: msgspec.Struct) -> None:
        self.sink.write(msgspec.json.encode(line) + b"\n")


def open_sink(path: Path) -> BinaryIO:
    """Creates a file that only its owner may read, compressed if the name ends in ``.gz``. Raises
    ``BadArgument`` if it exists or cannot be created."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if path.suffix == ".gz":
            return cast(BinaryIO, gzip.open(path, "wb"))
        return path.open("wb")
    except FileExistsError as error:
        raise BadArgument(
            f"cannot write the workload {path}: the file exists; move it or choose another name"
        ) from error
    except OSError as error:
        raise BadArgument(f"cannot write the workload {path}: {error.strerror}") from error


def workload_name(path: Path) -> str:
    """Returns the file's name without its suffixes."""
    return path.name.partition(".")[0]


def read_workload(path: Path) -> Workload:
    """Reads either kind of file. Raises ``BadArgument`` if it is invalid."""

    try:
        with _opened(path) as source:
            if path.name.removesuffix(".gz").endswith(".json"):
                spec = msgspec.json.decode(source.read(), type=_Generated)
                name = spec.name or workload_name(path)
                return Workload(name, make_arrivals(spec.generator, spec.parameters), spec.kv_tokens)
            header = msgspec.json.decode(source.readline(), type=_Header)
            if header.agentflow_workload != VERSION:
                raise BadArgument(
                    f"{path} is a workload of version {header.agentflow_workload}, not {VERSION}"
                )
            arrivals: list[Arrival] = []
            is_truncated = not _read_arrivals(source, arrivals)
            return Workload(header.name, arrivals, header.kv_tokens, is_truncated)
    except OSError as error:
        raise BadArgument(f"cannot read the workload {path}: {error.strerror or error}") from error
    except (*UNREADABLE, EOFError, IndexError, OverflowError, zlib.error) as error:
        raise BadArgument(f"{path} is not a workload: {error}") from error


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as source:
            yield source
    else:
        with path.open("rb") as plain:
            yield plain


def _read_arrivals(source: io.BufferedIOBase, arrivals: list[Arrival]) -> bool:
    """Appends the requests of all lines. Returns False if the last line is incomplete."""
    try:
        for text in source:
            if not text.endswith(b"\n"):
                return False
            arrivals.append(_arrival(msgspec.json.decode(text, type=_Line), arrivals))
    except EOFError:  # a truncated gzip stream
        return False
    return True


def _arrival(line: _Line, earlier: Sequence[Arrival]) -> Arrival:
    prompt = np.array(line.prompt, dtype=np.int32)
    if line.like is not None:
        index, length = line.like
        prompt = np.concatenate((earlier[index].tokens[:length], prompt))
    return Arrival(
        prompt,
        np.array(line.output, dtype=np.int32),
        at_s=line.at,
        after=line.after,
        max_new_tokens=line.limit,
        tenant=line.tenant,
        salt=line.salt,
        objective=line.objective,
        task_group=line.group,
        state=line.state,
        label=line.label,
        program=line.program,
        joins=tuple(line.joins),
        model=line.model,
        is_extra=line.is_extra,
    )
