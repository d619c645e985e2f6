"""The messages between an engine and its client, the same for an engine in a thread and in a process.

To the engine go single messages; from it comes one list for the whole batch, once per step. Exactly one
``Finished`` or ``Failed`` answers each ``Submit``, aborted or not. An engine process first gets ``Start`` and
answers with ``Loaded`` or ``LoadFailed``. On the socket each message to the engine, and each list from it, is
one msgpack frame (``child.to_frame``).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from agentflow.engine.runner import ModelRunner, RunnerInfo
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.submit import Submit, TopTokens
from agentflow.engine.text.tokenizer import Tokenizer
from agentflow.protocol.events import StepRecord


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends a request. Unknown ids are ignored: it may just have finished."""

    request_id: int


class CloseState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The program state is closed; its KV becomes ordinary cache."""

    state: int


class StatsRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for ``EngineStats``, which carry the same ticket."""

    ticket: int


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for an ``EngineSnapshot`` of what ``tenant`` may see; None: of everything. ``max_nodes``: 0 for no
    tree. ``steps_after``: the number of the last step that is known."""

    ticket: int
    tenant: str | None
    max_nodes: int
    steps_after: int


class PeekRequest(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Asks for the ``NodeTokens`` of a node of an earlier snapshot, if it is the tenant's."""

    ticket: int
    node: int
    tenant: str


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stops the engine. Unfinished requests are dropped."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Loads the adapter (LoRA) in ``folder``, for requests with its identity. ``name``: for messages.
    ``identity``: that it must have; empty for any."""

    ticket: int
    name: str
    folder: str
    identity: str = ""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reverses one load of the adapter with this identity. After the last, no later request can use it, and
    its memory is freed once no request uses it. Unknown identities are ignored."""

    identity: str


Query = StatsRequest | SnapshotRequest | PeekRequest | LoadAdapter
"""What is answered by one message with the same ticket, or by ``Failed``."""
ToEngine = Submit | Abort | CloseState | Query | UnloadAdapter | Stop


class Started(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """These requests are in a batch for the first time. Sent before the batch runs, so that requests that
    crash the engine can be identified."""

    request_ids: list[int]


class StepBegins(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A forward pass over ``num_tokens`` scheduled tokens begins. The next list follows when it has run, so
    the supervisor can distinguish an engine that hangs from one that computes."""

    num_tokens: int


class Progress(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request gained ``token_ids``. ``logprobs`` and ``top_logprobs`` have an entry for each if requested;
    those of tokens that a grammar forced come in a later message. ``text``: the text that became final, often
    empty. ``num_dropped``: the last tokens sent so far that these replace, because the same text is now
    encoded differently. ``forced``: if a grammar forced the tokens, what ``mark_forced`` receives.
    ``answer_at``: of a model that may think, the character of the output at which its answer begins, or -1 if
    it has not begun; None if it does not think, or writes in channels, whose heads show it."""

    request_id: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[TopTokens] = ()
    num_dropped: int = 0
    forced: tuple[int, int] | None = None
    answer_at: int | None = None


class NeedPayload(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request came with a constraint's key only, and the engine no longer has that constraint. The
    client must submit it again with the payload."""

    request_id: int


class Finished(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The end of a request. ``token_ids`` and ``text``: the whole output. ``finish_reason``: ``eos`` (the
    model's end token), ``stop`` or ``length``. ``logprobs``: one for each generated or scored token, None for
    a token that was encoded again; empty if not requested. ``top_logprobs``: the likeliest tokens at each
    place, likewise. ``choice_logprobs``: for each choice, those of its tokens. ``stopped_by``: the ``stop``
    string or ``stop_token_ids`` id that ended it. ``forced``: the parts of ``text`` that a grammar forced and
    that were not sampled, as pairs of first character and number of characters; ``forced_tokens``: the tokens
    that lie wholly in such parts. ``embedding``: in float32, in the machine's order of bytes.
    ``thought_tokens``: the tokens before the answer. ``answer_at``: as of ``Progress``. ``ranks``: one for
    each scored token, 1 for the likeliest in its place."""

    request_id: int
    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    logprobs: list[float | None]
    top_logprobs: list[TopTokens | None] = []
    choice_logprobs: list[list[float]] = []
    stopped_by: str | int | None = None
    forced: list[tuple[int, int]] = []
    forced_tokens: int = 0
    embedding: bytes = b""
    thought_tokens: int = 0
    answer_at: int | None = None
    ranks: list[int] = []


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request (or ``Query``) failed. ``code``: of an error in ``agentflow.errors``; ``cancelled``
    for an aborted request. ``param``: the error's."""

    request_id: int
    code: str
    message: str
    param: str | None = None


PHASES = ("schedule", "run", "complete", "deliver")
"""The phases of an engine's step, which ``EngineStats.step_times`` measure."""
# Seconds, from a step's bookkeeping to a long prefill.
STEP_BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)


class BucketCounts(msgspec.Struct, array_like=True):
    """A histogram. ``counts[i]``: values above ``bounds[i - 1]`` and up to ``bounds[i]``; the last entry
    counts values above all bounds. Cheap to update, and good enough for quantiles over any period."""

    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> BucketCounts:
        """An empty histogram."""
        return cls([0] * (len(bounds) + 1))

    def count(self, bounds: Sequence[float], value: float) -> None:
        """Adds one value."""
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value

    def __add__(self, other: BucketCounts) -> BucketCounts:
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return BucketCounts(counts, self.total + other.total)


class EngineStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Counters since the engine started (tokens, steps) and current gauges (slots, requests, bytes).
    ``restarts``: how often the engine's process was replaced; its counters start over each time.
    ``step_times``: one histogram for each of ``PHASES``."""

    ticket: int
    model: str
    steps: int
    prompt_tokens: int
    cached_tokens: int
    cached_output_tokens: int
    computed_tokens: int
    generated_tokens: int
    evicted_tokens: int
    retractions: int
    free_slots: int
    cached_slots: int
    in_use_slots: int
    total_slots: int
    running: int
    waiting: int
    peak_resident_bytes: int
    restarts: int = 0
    forced_tokens: int = 0
    step_times: Sequence[BucketCounts] = ()


TreeRow = tuple[int, int, int, int, int, int, float, int]
"""A node: its number, its parent's (0: none), its tokens, those that were generated, its locks and keeps,
when it was used last, and its tenant (an index)."""
RequestRow = tuple[int, str, str, bool, int, int, int, int, float]
"""A request: its id, tenant and label, whether it runs, its tokens of the prompt, those that were cached,
all that are computed, those generated, and its age in seconds."""


class EngineSnapshot(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a ``SnapshotRequest``, taken between two steps. ``epoch``: of the engine; another engine
    numbers everything anew. ``time_s``: on the engine's clock, as the times of ``nodes``, where parents come
    before their children. ``num_nodes``: all that the tenant has. ``took_s``: processor time of the engine's
    thread."""

    ticket: int
    epoch: int
    time_s: float
    steps: list[StepRecord]
    requests: list[RequestRow]
    nodes: list[TreeRow]
    tenants: list[str]
    num_nodes: int
    stats: EngineStats
    took_s: float


class NodeTokens(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a ``PeekRequest``: the first tokens of the node, and the number of all."""

    ticket: int
    token_ids: list[int]
    num_tokens: int


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to a ``LoadAdapter``. ``identity``: of its weights and settings. ``nbytes``: its memory."""

    ticket: int
    name: str
    folder: str
    identity: str
    nbytes: int


class Logged(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A line for the server's log, from a logger of the engine's process; in a frame without other messages.
    ``level``: as in ``logging``."""

    level: int
    logger: str
    text: str


Answer = EngineStats | EngineSnapshot | NodeTokens | AdapterLoaded
FromEngine = Started | StepBegins | Progress | NeedPayload | Finished | Failed | Answer | Logged


class LoadEngine(Protocol):
    """The function that ``Start.loader`` names. It runs in the engine's process and makes what an engine
    needs."""

    def __call__(self, **options: Any) -> tuple[ModelRunner, Tokenizer, SchedulerConfig]: ...


class Start(msgspec.Struct, frozen=True):
    """What an engine process is to load. ``loader``: a ``LoadEngine``, as ``package.module:function``;
    ``options``: its arguments, plain values only. ``log_level``: the least of the lines that it logs."""

    loader: str
    options: dict[str, Any]
    log_level: int = logging.WARNING


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready for messages. ``tokenizer``: the identity of its tokenizer."""

    info: RunnerInfo
    tokenizer: str


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """Loading failed, and the process ends. ``code``: of an error in ``agentflow.errors``.
    ``missing_package``: set if the cause is a package that is not installed."""

    code: str
    message: str
    missing_package: str | None = None


start_decoder = msgspec.msgpack.Decoder(Start)
answer_decoder: msgspec.msgpack.Decoder[Loaded | LoadFailed | list[Logged]] = msgspec.msgpack.Decoder(
    Loaded | LoadFailed | list[Logged]
)
to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])
