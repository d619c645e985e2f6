"""The events that a backend sends to the frontend, with usage, counters, errors and capabilities.

Events describe the progress of variables and states, so a backend can make them at any time from its records:
a slow reader gets larger deltas, and a client that resumes continues at an offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from agentflow.errors import (
    MAX_CAUSES,
    AgentflowError,
    BudgetExceeded,
    ClosedReason,
    InvalidValue,
    NotSupported,
    Overloaded,
    RunFailed,
    StateClosed,
    UnknownModel,
    from_code,
    no_chat_template,
    shorten_message,
    shown_error,
)
from agentflow.protocol.constraint import Constraint, ConstraintKind
from agentflow.protocol.images import MediumKind
from agentflow.protocol.record import Record
from agentflow.protocol.sampling import GenParams


class TokenLogprob(Record, msgspec.Struct, frozen=True, array_like=True):
    """A token, its text (``\ufffd`` for the bytes of half a character), and its log-probability.

    >>> s += af.user("Why?") + af.gen("word", max_tokens=4, top_logprobs=2)
    >>> word = await s["word"]
    >>> likeliest, second = s["word"].top_logprobs[0]
    >>> likeliest.logprob >= second.logprob
    True
    """

    token_id: int
    text: str
    logprob: float


USE_ANOTHER = 'use an engine, or on_unsupported="retry" with a model behind an API'
"""The remedy if a model cannot enforce a constraint or a choice."""


class Capabilities(Record, msgspec.Struct, frozen=True):
    """The features of a generator. Ops that need unsupported features are rejected before anything runs."""

    model: str
    roles: bool = True
    select: bool = True
    logprobs: bool = True
    seeds: bool = True
    max_context: int | None = None
    constraints: tuple[ConstraintKind, ...] = ()
    images: bool = False
    videos: bool = False
    video_frames: bool = True  # a program may set the number of a video's frames
    token_ids: bool = True
    conversations: bool = False
    watch: bool = False
    embedding_models: tuple[str, ...] = ()  # their names, the default first
    batch_size: int | None = None  # more concurrent requests do not raise the throughput; None: unknown
    sampling: tuple[str, ...] | None = None  # the supported parameters of ``GenParams``; None: all
    default_max_tokens: int | None = None  # of a gen without ``max_tokens``; None: the model's own limit
    continuation: bool = True  # a gen may follow text in the assistant's turn
    plain_text: bool = True  # a gen may be outside of turns
    decisions: bool = True  # ``Decide`` is supported
    generates: bool = True  # False: the model only makes embeddings
    reasons: bool | None = None  # whether the model reasons unless a request turns that off; None: unknown
    # The capabilities of models that may replace each other (``af.Fallback``), in their order. This struct
    # then has the features that all of them support.
    candidates: tuple[Capabilities, ...] = ()

    def accepts(self, name: str) -> bool:
        """Whether the sampling parameter ``name`` is supported."""
        return self.sampling is None or name in self.sampling

    def require_generation(self) -> None:
        """Raises ``NotSupported`` if the model makes embeddings only."""
        if not self.generates:
            raise NotSupported(
                f"{self.model} makes embeddings only: take another model to generate text", param="model"
            )

    def require_params(self, params: GenParams) -> None:
        """Raises ``NotSupported``, with its ``param``, for a parameter that the model does not accept."""
        if not self.logprobs and params.wants_logprobs:
            raise NotSupported(f"{self.model} has no log-probabilities: use an engine", param="logprobs")
        if params.seed is not None and not self.seeds:
            raise NotSupported(f"{self.model} does not accept a seed: leave it out", param="seed")
        for name in () if self.sampling is None else params.given:
            if name != "seed" and not self.accepts(name):
                raise NotSupported(f"{self.model} does not accept {name}: leave it out", param=name)

    def require_conversations(self) -> None:
        """Raises ``NotSupported`` if the backend does not accept whole conversations."""
        if not self.roles:
            raise no_chat_template(self.model)
        if not self.conversations:
            raise NotSupported(f"{self.model} does not accept whole conversations: append turns")

    def require(self, constraint: Constraint | None) -> None:
        """Raises ``NotSupported`` if the backend cannot enforce the constraint."""
        for part in (constraint, constraint and constraint.instead):
            if part is not None and part.as_one_of(self.constraints) is None:
                raise NotSupported(
                    f"{self.model} does not support constraints of the kind {part.kind!r} "
                    f"(supported: {', '.join(self.constraints) or 'none'}): {USE_ANOTHER}"
                )

    def require_embeddings(self, model: str = "", param: str = "model") -> None:
        """Raises ``NotSupported`` if the backend has no embedding model, ``UnknownModel`` with ``param`` if
        it has none with this name (empty: the default)."""
        if not self.embedding_models:
            raise NotSupported(
                f"{self.model} makes no embeddings: give the session an embed_model, or serve one as well"
            )
        if model and model not in self.embedding_models:
            known = ", ".join(self.embedding_models)
            raise UnknownModel(
                f"no model {model[:200]!r} makes embeddings here (there are: {known})", param=param
            )

    def embedding_with(self, model: str | None) -> Capabilities:
        """A copy with ``model`` as the default for embeddings. Raises the errors of
        ``require_embeddings``."""
        if model is None:
            return self
        self.require_embeddings(model, "embed_model")
        names = dict.fromkeys((model, *self.embedding_models))
        return msgspec.structs.replace(self, embedding_models=tuple(names))

    def require_images(self) -> None:
        """Raises ``NotSupported`` if the model does not read images."""
        if not self.images:
            raise NotSupported(f"{self.model} does not accept images: image() needs a model with vision")

    def require_videos(self, num_frames: int | None = None) -> None:
        """Raises ``NotSupported`` if the model does not read videos, or if ``num_frames`` is given and the
        model chooses frames itself."""
        if not self.videos:
            instead = ": af.video(…, as_images=True) shows its frames as images" if self.images else ""
            raise NotSupported(f"{self.model} does not accept videos{instead}")
        if num_frames is not None and not self.video_frames:
            raise NotSupported(
                f"{self.model} chooses the frames of a video itself: leave out num_frames", param="num_frames"
            )


class Usage(Record, msgspec.Struct, frozen=True):
    """The numbers of tokens of one generation. Usages can be added.

    >>> await s["answer"]
    'Plants turn light into sugar.'
    >>> s["answer"].usage.output_tokens
    5
    >>> s["answer"].usage.hit_rate
    0.0
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache."""
    output_tokens: int = 0
    forced_tokens: int = 0
    """Output tokens that a constraint forced, so they were not sampled."""
    reasoning_tokens: int = 0
    """Output tokens of reasoning."""
    written_tokens: int = 0
    """Prompt tokens that were written to a provider's cache."""
    cost: float = 0.0
    """In US dollars, for models behind an API whose price is known."""
    saved_calls: int = 0
    """Generations that took their text from an earlier call (speculative execution, or an input of a map in
    batches that ran again)."""
    saved_tokens: int = 0
    """The estimated number of prompt tokens that these calls would have had."""
    miss_reason: str = ""
    """Why 256 or more tokens of the prompt were not cached: ``first_seen``, ``evicted``, ``salt``,
    ``adapter``, ``tools_changed``, ``system_changed`` or ``rerendered``. In a sum of different reasons:
    ``several``. Empty for fewer tokens, and for models behind an API."""
    rejected_answers: int = 0
    """Answers that violated a constraint and were generated again (``on_unsupported="retry"``,
    ``on_invalid="retry"``)."""

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens / prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.forced_tokens + other.forced_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.written_tokens + other.written_tokens,
            self.cost + other.cost,
            self.saved_calls + other.saved_calls,
            self.saved_tokens + other.saved_tokens,
            _joint_reason(self.miss_reason, other.miss_reason),
            self.rejected_answers + other.rejected_answers,
        )

    def __sub__(self, part: Usage) -> Usage:
        """The usage without ``part``; no number becomes negative."""
        names = [name for name in self.__struct_fields__ if name != "miss_reason"]
        rest = {name: max(0, getattr(self, name) - getattr(part, name)) for name in names}
        return Usage(**rest, miss_reason=self.miss_reason)


MISS_REASONS = ("first_seen", "evicted", "salt", "adapter", "tools_changed", "system_changed", "rerendered")
"""The values of ``Usage.miss_reason`` for a single request."""


def _joint_reason(one: str, other: str) -> str:
    return one or other if not (one and other) or one == other else "several"


CircuitStatus = Literal["closed", "open", "half_open"]
"""The state of an endpoint: it gets requests, it gets none after failures, or it is tried again."""


class EndpointStats(Record, msgspec.Struct, frozen=True):
    """Counters of one of several endpoints that may replace each other (``af.Fallback``)."""

    model: str  # as in ``Value.model``
    circuit: CircuitStatus = "closed"
    answered: int = 0  # requests, counting repeated ones
    failed: int = 0
    retry_after_s: float | None = None  # until an open circuit lets a request try the endpoint


class Stats(Record, msgspec.Struct, frozen=True):
    """Counters of the backend since its start, and current gauges. They count tokens unless the name says
    otherwise; ``steps`` are forward passes, ``*_slots`` tokens in the KV pool. A counter is None if the
    server hides it because it covers all tenants (``sees_metrics``).

    >>> await s
    >>> stats = await flow.stats()
    >>> stats.generated_tokens >= 5, stats.hit_rate
    (True, 0.0)
    """

    model: str
    steps: int | None = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_output_tokens: int | None = 0
    computed_tokens: int | None = 0
    generated_tokens: int = 0
    evicted_tokens: int | None = 0
    rerendered_tokens: int = 0
    preemptions: int | None = 0
    free_slots: int | None = 0
    cached_slots: int | None = 0
    in_use_slots: int | None = 0
    total_slots: int | None = 0
    running: int | None = 0
    waiting: int | None = 0
    peak_resident_bytes: int | None = 0
    restarts: int | None = 0
    forced_tokens: int | None = 0
    cost: float = 0.0
    saved_calls: int = 0
    saved_tokens: int = 0
    failed_speculations: int | None = 0
    endpoints: tuple[EndpointStats, ...] = ()
    hedged_calls: int | None = 0

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens / all prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def summed(parts: Sequence[Stats]) -> Stats:
    """The counters of several backends together, with the model of the first. A counter is None if no backend
    has it."""
    first, *others = parts
    sums: dict[str, Any] = {}
    for name in Stats.__struct_fields__:
        if name != "model":
            values = [value for one in parts if (value := getattr(one, name)) is not None]
            sums[name] = sum(values[1:], values[0]) if values else None
    return msgspec.structs.replace(first, **sums) if others else first


TopLogprobs = tuple[tuple[TokenLogprob, ...] | None, ...]
"""For each generated token the most likely tokens at its position, in descending order; None for a token that
changed because the end of the text was encoded again."""


MAX_ERROR_TEXT = 20_000
"""The maximum length of the answer's text in an error, in characters."""


class ErrorInfo(Record, msgspec.Struct, frozen=True, omit_defaults=True):
    """An error of ``errors.py`` with its cause."""

    code: str
    message: str
    cause: ErrorInfo | None = None
    state: int | None = None  # whose op failed
    op: int | None = None  # its number in the state, from 1, among ops with ``OpSpec.is_numbered``
    retry_after_s: float | None = None  # for ``Overloaded``: the seconds after which to retry
    param: str | None = None  # the invalid argument
    # For ``InvalidValue``: the whole text, if it has at most ``MAX_ERROR_TEXT`` characters.
    text: str | None = None
    # Of an answer that the backend found invalid, or that did not end: then it has only the output tokens.
    usage: Usage | None = None
    reason: ClosedReason | None = None  # for ``StateClosed``

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describes an exception and its causes. Exceptions outside of ``errors.py`` become
        ``run_failed``."""
        chain = [error]
        while chain[-1].__cause__ is not None and len(chain) < MAX_CAUSES:
            chain.append(chain[-1].__cause__)
        info: ErrorInfo | None = None
        for link in reversed(chain):
            code = link.code if isinstance(link, AgentflowError) else RunFailed.code
            message = shorten_message(shown_error(link, str if isinstance(link, AgentflowError) else repr))
            state, op = (link.place if isinstance(link, AgentflowError) else None) or (None, None)
            retry_after_s = link.retry_after_s if isinstance(link, Overloaded) else None
            param = link.param if isinstance(link, AgentflowError) else None
            text = link.text if isinstance(link, InvalidValue) and len(link.text) <= MAX_ERROR_TEXT else ""
            usage = link.usage if isinstance(link, InvalidValue | BudgetExceeded) else None
            reason = link.reason if isinstance(link, StateClosed) else None
            info = cls(code, message, info, state, op, retry_after_s, param, text or None, usage, reason)
        assert info is not None
        return info

    @property
    def origin(self) -> ErrorInfo:
        """The error at the end of the chain of causes: the root cause, or this error."""
        info = self
        while info.cause is not None:
            info = info.cause
        return info

    @property
    def place(self) -> tuple[int, int] | None:
        """The state and op number of the error nearest to the root cause that has them."""
        found: tuple[int, int] | None = None
        info: ErrorInfo | None = self
        while info is not None:
            if info.state is not None and info.op is not None:
                found = info.state, info.op
            info = info.cause
        return found

    @property
    def chain(self) -> list[ErrorInfo]:
        """This error and its causes, at most ``MAX_CAUSES`` together: a hostile peer could nest more than
        Python's stack allows."""
        chain: list[ErrorInfo] = []
        info: ErrorInfo | None = self
        while info is not None and len(chain) < MAX_CAUSES:
            chain.append(info)
            info = info.cause
        return chain

    def at(self, state: int, op: int) -> ErrorInfo:
        """A copy whose root cause has this state and op, unless it has others already."""
        *consequences, info = self.chain
        if info.op is None:
            info = msgspec.structs.replace(info, state=state, op=op)
        for one in reversed(consequences):
            info = msgspec.structs.replace(one, cause=info)
        return info

    def to_exception(self) -> AgentflowError:
        """The exception, with the causes in ``chain``."""
        error: AgentflowError | None = None
        for info in reversed(self.chain):
            cause, error = error, from_code(info.code, info.message, info.param)
            error.__cause__ = cause
            error.place = None if info.state is None or info.op is None else (info.state, info.op)
            if isinstance(error, Overloaded):
                error.retry_after_s = info.retry_after_s
            if isinstance(error, InvalidValue):
                error.text = info.text or ""
            if isinstance(error, InvalidValue | BudgetExceeded):
                error.usage = info.usage
            if isinstance(error, StateClosed):
                error.reason = info.reason
        assert error is not None
        return error


class PassedOver(Record, msgspec.Struct, frozen=True):
    """An endpoint that did not answer, so the next one was asked (``af.Fallback``)."""

    model: str  # as in ``Value.model``
    error: ErrorInfo  # its failure; ``overloaded`` if its circuit was open


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, omit_defaults=True):
    """Common configuration: one JSON object with an ``event`` field, defaults left out."""


DecidedBy = Literal["logprobs", "endpoint", "text"]
"""How a choice was decided: by the log-probabilities of all choices, by the provider's endpoint for
decisions, or by the text that the model wrote under a constraint, without scores of the other choices."""


class Delta(_Event, frozen=True):
    """Variable ``var`` continues with ``text`` at character ``at``, and the reasoning before the text with
    ``reasoning`` at character ``reasoning_at``. After a broken connection, the reasoning may be sent again
    from its start."""

    var: int
    at: int
    text: str
    reasoning: str = ""
    reasoning_at: int = 0


class Value(_Event, frozen=True):
    """Variable ``var`` is complete."""

    var: int
    at: int  # where ``text`` begins, in characters
    text: str  # the rest of the variable's text
    finish_reason: str
    usage: Usage
    logprobs: tuple[float | None, ...] | None = None
    choices: dict[str, float] | None = None  # of a select: the score of each choice
    top_logprobs: TopLogprobs | None = None  # for each token the most likely ones at its position
    # The parts of the whole text that a constraint forced, so they were not sampled, in order: the first
    # character and the number of characters of each.
    forced: tuple[tuple[int, int], ...] | None = None
    reasoning: str | None = None  # before the text
    tokens: tuple[str, ...] | None = None  # the text of each token in ``logprobs``
    decided_by: DecidedBy | None = None  # of a select or a decide
    # The model that answered, if the session chose among several; with its server if two have the same name.
    model: str = ""
    passed_over: tuple[PassedOver, ...] = ()  # the endpoints before it


class VarFailed(_Event, frozen=True):
    """Variable ``var`` failed and has no value."""

    var: int
    error: ErrorInfo


def spent(event: Delta | Value | VarFailed) -> Usage | None:
    """The usage of the generation that this event ends; None if the event has no usage."""
    if isinstance(event, VarFailed):
        return event.error.usage
    return event.usage if isinstance(event, Value) else None


class Reached(_Event, frozen=True):
    """All ops that were submitted to the state before the ``Await`` with this ticket are done."""

    state: int
    ticket: int


class StateFailed(_Event, frozen=True):
    """An op of the state failed, or the state was cancelled: later ops do not run."""

    state: int
    error: ErrorInfo


class StatsReply(_Event, frozen=True):
    """Answers ``GetStats`` with the counters, or with the error that prevented it."""

    ticket: int
    stats: Stats | None = None
    error: ErrorInfo | None = None


class LiveState(Record, msgspec.Struct, frozen=True, omit_defaults=True):
    """One open state, as the scheduler sees it."""

    id: int
    program: int  # the same number for all states of one program
    label: str = ""  # the name of the program
    objective: Literal["latency", "throughput"] = "latency"  # of its next request
    group: int = 0  # the same number for all next requests of one task group; 0: none
    # The number of requests that must end, one after the other, before its next one; None: it waits for its
    # client.
    steps: int | None = 0
    has_ended: bool = False  # it has failed or was cancelled
    miss_reason: str = ""  # of its last request, as in ``Usage``
    missed_tokens: int = 0  # prompt tokens of this request that were not cached, if there is a reason


class LiveMedium(Record, msgspec.Struct, frozen=True, omit_defaults=True):
    """An image or a video before a request."""

    source: str  # ``sha256:`` and the digest of its file, or the beginning of its URL
    kind: MediumKind = "image"
    media_type: str = ""  # of a file
    num_bytes: int = 0  # of a file


class LiveNode(Record, msgspec.Struct, frozen=True, omit_defaults=True):
    """One request, other variable, or fork. It is unfinished, or an unfinished node depends on it, or it has
    failed and its state is open."""

    id: int
    state: int
    kind: str  # the op, ``reply``, or ``gather``: the end of a submitted graph
    var: int = 0  # 0: a fork
    name: str = ""
    status: Literal["waiting", "running", "done", "failed"] = "waiting"
    needs: tuple[int, ...] = ()  # the nodes on which it depends
    objective: Literal["latency", "throughput"] = "latency"
    group: int = 0  # the task group of the request; 0: none
    awaited: Literal["", "value", "stream"] = ""  # the client awaits the value, or reads it while it grows
    # The first images and videos that were appended since the request before it, and the number of all.
    media: tuple[LiveMedium, ...] = ()
    num_media: int = 0
    replica: int | None = None  # where the request runs, if its model has several


def _outline_of_media(node: LiveNode) -> str:
    if not node.num_media:
        return ""
    kinds = {medium.kind for medium in node.media}
    word = kinds.pop() if len(kinds) == 1 else "image or video"
    plural = {"image": "images", "video": "videos"}.get(word, "images and videos")
    return f", {node.num_media} {word if node.num_media == 1 else plural}"


class LiveGraph(Record, msgspec.Struct, frozen=True, omit_defaults=True):
    """The unfinished part of a session: its open states, and running and waiting requests, with the nodes
    on which they depend. ``str`` returns an outline."""

    states: tuple[LiveState, ...] = ()
    nodes: tuple[LiveNode, ...] = ()  # each after the nodes on which it depends
    num_states_left_out: int = 0
    num_nodes_left_out: int = 0

    def __str__(self) -> str:
        names = {node.id: node.name or f"{node.kind} {node.id}" for node in self.nodes}
        done = {node.id for node in self.nodes if node.status == "done"}
        lines: list[str] = []
        for state in self.states:
            match state.steps:
                case _ if state.has_ended:
                    steps = "has failed or was cancelled"
                case None:
                    steps = "waits for its client"
                case 0:
                    steps = "its next request may run"
                case num:
                    steps = f"its next request runs after {num} other{'s' if num > 1 else ''}"
            group = f", group {state.group}" if state.group else ""
            label = f" of {state.label}" if state.label else ""
            lines.append(
                f"state {state.id}{label} (program {state.program}): {state.objective}{group}, {steps}"
            )
            for node in self.nodes:
                if node.state == state.id:
                    needs = ", ".join([names.get(one, str(one)) for one in node.needs if one not in done])
                    after = f" after {needs}" if needs else ""
                    line = f"  {node.kind} {node.name}: {node.status}, {node.objective}{after}"
                    replica = "" if node.replica is None else f", replica {node.replica}"
                    lines.append(f"{line}{replica}{_outline_of_media(node)}")
        if left := self.num_states_left_out + self.num_nodes_left_out:
            lines.append(f"… {left} more")
        return "\n".join(lines) or "nothing is unfinished"


class GraphReply(_Event, frozen=True):
    """Answers ``GetGraph`` with the live graph of the session, or with the error that prevented it."""

    ticket: int
    graph: LiveGraph | None = None
    error: ErrorInfo | None = None
    others: tuple[LiveGraph, ...] = ()  # of the tenant's other sessions with open states, if requested


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass: its ``number``, scheduled tokens by kind, running and waiting requests, the slots of
    the KV pool used by running requests, and its duration in milliseconds."""

    number: int
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    used_slots: int
    duration_ms: float


class WatchedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """One unfinished request."""

    id: int  # its number in this watch
    tenant: str
    program: str  # the ``label`` of its root state, or its ``program`` without one
    status: Literal["running", "waiting"]
    prompt_tokens: int
    cached_tokens: int  # of the prompt
    computed_tokens: int  # of the prompt and the output
    output_tokens: int
    age_s: float  # since the engine received it
    replica: int | None = None  # where it is, if its model has several


class TreeNode(msgspec.Struct, frozen=True, array_like=True):
    """One node of the radix tree."""

    id: int  # its number in this watch
    parent: int  # the number of its parent; 0: none
    num_tokens: int
    num_generated: int  # how many of its tokens were generated
    locks: int  # running requests that use it
    keeps: int  # open states whose text ends here
    age_s: float  # from its last use to the event's ``time_s``
    tenant: int  # an index into ``TreeDelta.tenants``


class TreeDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes in the watched part of the radix tree since the last event."""

    reset: bool = False  # forget all earlier nodes first
    nodes: tuple[TreeNode, ...] = ()  # new or changed, parents before their children
    gone: tuple[int, ...] = ()  # the numbers of removed nodes
    tenants: tuple[str, ...] = ()  # the names of all tenants of the nodes
    num_nodes_left_out: int = 0  # nodes of the tree beyond ``max_nodes``


class GraphDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes in the live graph of one session since the last event."""

    id: int  # its number in this watch; 1: the session that watches
    states: tuple[LiveState, ...] = ()  # new or changed
    nodes: tuple[LiveNode, ...] = ()  # new or changed
    states_gone: tuple[int, ...] = ()  # the ids of states that are no longer shown
    nodes_gone: tuple[int, ...] = ()  # the ids of nodes that are no longer shown
    num_states_left_out: int = 0  # as in ``LiveGraph``
    num_nodes_left_out: int = 0


class GraphsDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes in the live graphs of the tenant's sessions since the last event."""

    reset: bool = False  # forget all earlier graphs first
    graphs: tuple[GraphDelta, ...] = ()  # new or changed
    gone: tuple[int, ...] = ()  # the numbers of the sessions that have ended, or have no open state
    num_graphs_left_out: int = 0  # of further sessions with open states


class Watched(_Event, frozen=True):
    """The scheduler, the radix tree and the programs, for the ``Watch`` with this ticket."""

    ticket: int
    time_s: float = 0.0  # on the engine's clock
    steps: tuple[StepRecord, ...] = ()  # since the last event, at most the newest 512
    steps_skipped: int = 0  # the number of older ones
    requests: tuple[WatchedRequest, ...] = ()  # at most 200, running ones first
    stats: Stats | None = None
    tree: TreeDelta | None = None
    error: ErrorInfo | None = None  # why nothing can be shown now
    graphs: GraphsDelta | None = None


class Peeked(_Event, frozen=True):
    """Answers ``Peek`` with the text of the node's first 500 tokens and its number of tokens, or with the
    error that prevented it."""

    ticket: int
    text: str = ""
    num_tokens: int = 0
    error: ErrorInfo | None = None


Event = Delta | Value | VarFailed | Reached | StateFailed | StatsReply | GraphReply | Watched | Peeked
