"""The messages between an engine and its client, the same for an engine in a thread and in a process.

The client sends single messages; the engine sends one list per step, for the whole batch. Exactly one
``Finished`` or ``Failed`` answers each ``Submit``, aborted or not. An engine process first gets ``Start`` and
answers with ``Loaded`` or ``LoadFailed``. On the socket, each message to the engine, and each list from it,
is one msgpack frame (``child_process.to_frame``).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from agentflow.engine.cache.blocks import BlocksRemoved, BlocksReport, BlocksStored
from agentflow.engine.media_run import PreparedMedium
from agentflow.engine.request import CacheKey, Objective, Origin, Submit, TopTokens
from agentflow.engine.runner import ModelRunner, RunnerInfo
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.events import StepRecord, Usage
from agentflow.version import __version__


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends a request. Unknown ids are ignored: the request may just have finished."""

    request_id: int


class CloseState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The program state is closed; its KV becomes ordinary cache. ``is_dropped``: it was cancelled, and its
    KV is evicted first."""

    state: int
    is_dropped: bool = False


class UpdateHint(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The scheduling hint of a state changed, for its requests that wait or run. Later requests have it in
    their ``Origin``. ``task_group`` is as in ``Origin``, the other fields as in ``SchedulingHint``."""

    state: int
    program: int
    task_group: int
    objective: Objective
    steps: int | None = 0
    returns_s: float | None = None
    tpot_s: float | None = None
    ttft_s: float | None = None

    def apply_to(self, origin: Origin) -> Origin:
        """The origin of a request of the state, with the new hint."""
        return origin.at(self.program, self.task_group, self.objective, self.tpot_s, self.ttft_s)


class StatsRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for ``EngineStats`` with the same ticket."""

    ticket: int


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for an ``EngineSnapshot``."""

    ticket: int
    tenant: str | None  # limits the snapshot to this tenant's data; None: all data
    max_nodes: int  # 0: no tree
    steps_after: int  # the number of the last step that the client knows


class PeekRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for the ``NodeTokens`` of a node of an earlier snapshot, if it is the tenant's."""

    ticket: int
    node: int
    tenant: str


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stops the engine. Unfinished requests are dropped."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Loads an adapter (LoRA), for requests with its identity."""

    ticket: int
    name: str  # for messages
    folder: str
    identity: str = ""  # the required identity; empty: any


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reverses one load of the adapter with this identity. After the last, no later request can use it, and
    its memory is freed once no request uses it. Unknown identities are ignored."""

    identity: str


class MediumPart(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A part of the content of a medium, for an engine process. The parts arrive in order; other messages may
    arrive between them. A medium is sent once, before the first request that has it."""

    identity: str
    data: bytes
    head: MediumHead | None = None  # of the first part
    is_last: bool = False


class MediumHead(msgspec.Struct, frozen=True, array_like=True):
    """The form of a medium's content."""

    arrays: list[tuple[str, str, list[int]]]  # the name, type and shape of each array, in order
    # Markup, or a run: its axes, positions, first row, and whether it sees all.
    pieces: list[str | tuple[int, bytes, int, bool]]


class DropMedium(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No request will have this medium, unless its content is sent again."""

    identity: str


@dataclass(frozen=True, slots=True)
class KeepMedium:
    """The content of a medium, for requests that have it."""

    medium: PreparedMedium


class BlocksRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for the ``BlocksUpdate`` of all cached blocks."""


class Charges(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Tokens that were computed for tenants. From an engine: its tokens since its last report, if reports
    were asked for. To an engine: the tokens of other engines of the same model, to which the tenants' weights
    also apply.
    """

    tenants: list[tuple[str, float]]  # the name, and the tokens divided by the tenant's weight
    programs: list[tuple[str, int, int]]  # the tenant, the program's number, and the tokens


Query = StatsRequest | SnapshotRequest | PeekRequest | LoadAdapter
"""Messages with a ticket. A message with the same ticket, or ``Failed``, answers each of them."""
ToEngine = (
    Submit
    | Abort
    | CloseState
    | UpdateHint
    | Query
    | UnloadAdapter
    | DropMedium
    | BlocksRequest
    | Charges
    | Stop
)
ToProcess = ToEngine | MediumPart
"""The messages on the socket of an engine process."""


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Lists the requests that are in a batch for the first time. Sent before the batch runs, so that requests
    that crash the engine can be identified."""

    request_ids: list[int]


SIGN_OF_LIFE_S = 5.0
"""While all requests wait for a program to be resumed, an empty list is delivered this often, so that the
engine does not seem to hang."""


class StepBegins(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A forward pass over ``num_tokens`` scheduled tokens begins. The next list follows after the pass, so
    the supervisor can distinguish an engine that hangs from one that computes."""

    num_tokens: int


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """New tokens of a request."""

    request_id: int
    text: str  # the text that became final, often empty
    token_ids: Sequence[int]
    logprobs: Sequence[float]  # if requested; of tokens that a grammar forced: in a later message
    top_logprobs: Sequence[TopTokens] = ()  # likewise
    num_dropped: int = 0  # earlier tokens that these replace: the same text is now encoded differently
    forced: tuple[int, int] | None = None  # if a grammar forced the tokens: the arguments of ``mark_forced``
    # For a reasoning model: the character of the output at which the answer begins, or -1 before. None for
    # other models, and for models that write in channels, whose headers show the answer.
    answer_at: int | None = None


class NeedPayload(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request has only the key of its constraint, which the engine does not have. The client must submit
    the request again with the payload."""

    request_id: int


class Finished(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of a request, with its whole output."""

    request_id: int
    token_ids: list[int]
    text: str
    finish_reason: str  # ``eos`` (the model's end token), ``stop`` or ``length``
    prompt_tokens: int
    cached_tokens: int  # of the prompt
    output_tokens: int
    # For each generated or scored token; None for a token that was encoded again. Empty if not requested.
    logprobs: list[float | None]
    top_logprobs: list[TopTokens | None] = []  # the likeliest tokens at each position, likewise
    choice_logprobs: list[list[float]] = []  # of the tokens of each choice
    stopped_by: str | int | None = None  # the ``stop`` string or ``stop_token_ids`` id that ended the output
    # The parts of ``text`` that a grammar forced instead of sampling: the first character and the number of
    # characters of each.
    forced: list[tuple[int, int]] = []
    forced_tokens: int = 0  # the tokens that are completely in such parts
    embedding: bytes = b""  # float32, in the machine's byte order
    reasoning_tokens: int = 0  # the tokens before the answer
    answer_at: int | None = None  # as in ``Progress``
    ranks: list[int] = []  # of each scored token; 1: the likeliest at its position
    miss_reason: str = ""  # as in ``Usage``

    @property
    def usage(self) -> Usage:
        """The token counts of the request."""
        return Usage(
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.forced_tokens,
            self.reasoning_tokens,
            miss_reason=self.miss_reason,
        )


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request (or ``Query``) failed."""

    request_id: int  # or the ticket
    code: str  # of an error in ``agentflow.errors``; ``cancelled`` for an aborted request
    message: str
    param: str | None = None  # of the error


PHASES = ("schedule", "run", "complete", "deliver")
"""The phases of an engine's step, which ``EngineStats.step_times`` measure."""
# In seconds, from the bookkeeping of a step to a long prefill.
STEP_BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class BucketCounts(msgspec.Struct, array_like=True):
    """A histogram. Cheap to update, and accurate enough for quantiles over any period."""

    # ``counts[i]``: values above ``bounds[i - 1]`` and up to ``bounds[i]``; the last entry: above all bounds.
    counts: list[int]
    total: float = 0.0  # the sum of all values

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> BucketCounts:
        """Returns an empty histogram."""
        return cls([0] * (len(bounds) + 1))

    def count(self, bounds: Sequence[float], value: float) -> None:
        """Adds one value."""
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value

    def __add__(self, other: BucketCounts) -> BucketCounts:
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return BucketCounts(counts, self.total + other.total)


class EngineStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Counters since the engine started (tokens, steps) and current gauges (slots, requests, bytes). When the
    engine's process is replaced, all counters except ``restarts`` begin again at 0."""

    ticket: int
    model: str
    steps: int
    prompt_tokens: int  # of the prompts that clients sent, once for each admitted request
    cached_tokens: int  # of these: found in the cache
    cached_output_tokens: int
    computed_tokens: int
    generated_tokens: int
    evicted_tokens: int
    preemptions: int  # how often a running request lost its slots and waited again
    free_slots: int
    cached_slots: int  # of the tree, and not in use
    in_use_slots: int
    total_slots: int
    running: int  # requests
    waiting: int  # requests
    peak_resident_bytes: int
    restarts: int = 0  # how often the engine's process was replaced
    forced_tokens: int = 0  # by grammars
    step_times: Sequence[BucketCounts] = ()  # for each of ``PHASES``, with ``STEP_BOUNDS_S``
    media_encoded: int = 0  # images whose features were made
    media_evicted: int = 0  # images whose features were dropped for room
    media_feature_bytes: int = 0  # features that are kept
    media_pixel_bytes: int = 0  # images that requests may need


TreeRow = tuple[int, int, int, int, int, int, float, int]
"""A node: its number, the number of its parent (0: none), its tokens, how many of them were generated, its
locks and keeps, the time of its last use, and its tenant (an index)."""
RequestRow = tuple[int, str, str, Literal["running", "waiting"], int, int, int, int, float, int | None]
"""The fields of a ``WatchedRequest``. The engine does not know the replica."""


class EngineSnapshot(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a ``SnapshotRequest``, taken between two steps."""

    ticket: int
    epoch: int  # of the engine; the numbers of one epoch mean nothing in another
    time_s: float  # on the engine's clock, like the times of ``nodes``
    steps: list[StepRecord]
    requests: list[RequestRow]
    nodes: list[TreeRow]  # parents before their children
    tenants: list[str]  # the names for the indices in ``nodes``
    num_nodes: int  # of the tenant, including nodes that are not in ``nodes``
    stats: EngineStats
    took_s: float  # processor time of the engine's thread


class NodeTokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a ``PeekRequest``."""

    ticket: int
    token_ids: list[int]  # the first tokens of the node
    num_tokens: int  # of the whole node


BlocksRow = tuple[tuple[str, str, str] | None, bytes, list[bytes], bytes]
"""The fields of a ``BlocksStored``, or of a ``BlocksRemoved``: its first field is then None."""


class BlocksUpdate(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Blocks that entered and left the cache, as in ``BlocksReport``, if reports were asked for."""

    number: int
    rows: list[BlocksRow]
    is_snapshot: bool = False

    @classmethod
    def of(cls, report: BlocksReport) -> BlocksUpdate:
        """Returns the message for a report."""
        return cls(report.number, [_blocks_row(change) for change in report.changes], report.is_snapshot)

    @property
    def changes(self) -> list[BlocksStored | BlocksRemoved]:
        """The changes of the report."""
        return [
            BlocksRemoved(digests) if key is None else BlocksStored(CacheKey(*key), parent, digests, run)
            for key, parent, digests, run in self.rows
        ]


def _blocks_row(change: BlocksStored | BlocksRemoved) -> BlocksRow:
    if isinstance(change, BlocksRemoved):
        return None, b"", change.digests, b""
    identity = change.cache_key
    assert isinstance(identity, CacheKey)
    assert isinstance(identity.salt, str)
    return (identity.tenant, identity.salt, identity.adapter), change.parent, change.digests, change.run


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a ``LoadAdapter``."""

    ticket: int
    name: str
    folder: str
    identity: str  # of the adapter's weights and settings
    nbytes: int  # the memory of the adapter


class Logged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A line for the server's log, from a logger of the engine's process; in a frame without other
    messages."""

    level: int  # as in ``logging``
    logger: str
    text: str


EngineAnswer = EngineStats | EngineSnapshot | NodeTokens | AdapterLoaded
FromEngine = (
    Started
    | StepBegins
    | Progress
    | NeedPayload
    | Finished
    | Failed
    | EngineAnswer
    | BlocksUpdate
    | Charges
    | Logged
)


class LoadEngine(Protocol):
    """The type of the function ``Start.loader``. It runs in the engine's process and creates the parts of an
    engine."""

    def __call__(self, **options: Any) -> tuple[ModelRunner, Tokenizer, SchedulerConfig]: ...


class Start(msgspec.Struct, frozen=True):
    """Tells an engine process how to load its engine."""

    loader: str  # a ``LoadEngine``, as ``package.module:function``
    options: dict[str, Any]  # its arguments, plain values only
    log_level: int = logging.WARNING  # lines below this level are not logged
    reports: bool = False  # send ``BlocksUpdate`` and ``Charges``, for a router
    version: str = __version__  # of agentflow in the server


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready for messages."""

    info: RunnerInfo
    tokenizer: str  # its identity


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Loading failed, and the process ends."""

    code: str  # of an error in ``agentflow.errors``
    message: str
    missing_package: str | None = None  # if the cause is a package that is not installed


start_decoder = msgspec.msgpack.Decoder(Start)
answer_decoder: msgspec.msgpack.Decoder[Loaded | LoadFailed | list[Logged]] = msgspec.msgpack.Decoder(
    Loaded | LoadFailed | list[Logged]
)
to_engine_decoder: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
from_engine_decoder: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])
