"""The events that a backend sends to the frontend, and what they carry: usage, counters, errors,
capabilities.

Events describe the progress of variables and states, so a backend can make them at any time from its records:
a slow reader gets larger deltas, and a client that resumes continues at an offset.
"""

from __future__ import annotations

import msgspec

from agentflow.errors import AgentflowError, NotSupported, Overloaded, RunFailed, from_code, shortened
from agentflow.protocol.constraint import Constraint, ConstraintKind


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
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


class Capabilities(msgspec.Struct, frozen=True):
    """The features of a generator. Ops that need others are rejected before anything runs."""

    model: str
    roles: bool = True
    select: bool = True
    logprobs: bool = True
    seeds: bool = True
    max_context: int | None = None
    constraints: tuple[ConstraintKind, ...] = ()
    images: bool = False
    token_ids: bool = True
    conversations: bool = False

    def require_conversations(self) -> None:
        """Raises ``NotSupported`` if the backend does not accept whole conversations."""
        if not self.conversations:
            raise NotSupported(f"{self.model} does not accept whole conversations: append turns")

    def require(self, constraint: Constraint | None) -> None:
        """Raises ``NotSupported`` if the backend cannot enforce the constraint."""
        for part in (constraint, constraint and constraint.instead):
            if part is not None and part.kind not in self.constraints:
                raise NotSupported(
                    f"{self.model} does not support constraints of the kind {part.kind!r} "
                    f"(supported: {', '.join(self.constraints) or 'none'})"
                )

    def require_images(self) -> None:
        """Raises ``NotSupported`` if the model has no vision."""
        if not self.images:
            raise NotSupported(f"{self.model} does not accept images: image() needs a model with vision")


class Usage(msgspec.Struct, frozen=True):
    """The tokens of one generation: of the prompt, those of them that were cached, and of the output. Usages
    can be added.

    >>> await s["answer"]
    'Plants turn light into sugar.'
    >>> s["answer"].usage.output_tokens
    5
    >>> s["answer"].usage.hit_rate
    0.0
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens / prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


class Stats(msgspec.Struct, frozen=True):
    """Counters of the backend since its start, and current gauges. They count tokens unless the name says
    otherwise; ``steps`` are forward passes, ``*_slots`` tokens in the KV pool.

    >>> await s
    >>> stats = await flow.stats()
    >>> stats.generated_tokens, stats.hit_rate
    (5, 0.0)
    """

    model: str
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_output_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    evicted_tokens: int = 0
    rerendered_tokens: int = 0
    retractions: int = 0
    free_slots: int = 0
    cached_slots: int = 0
    in_use_slots: int = 0
    total_slots: int = 0
    running: int = 0
    waiting: int = 0
    peak_resident_bytes: int = 0
    restarts: int = 0
    forced_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens / all prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


TopLogprobs = tuple[tuple[TokenLogprob, ...] | None, ...]
"""For each generated token the most likely ones at its position, in descending order; None for a token that
re-encoding the end of the text changed."""


MAX_CAUSES = 16


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error of ``errors.py`` with its cause. ``state`` and ``op``: the state whose op failed, and the op's
    number there, from 1, among the ops that ``op_table`` numbers (text, turns, gens and the like).
    ``retry_after_s``: of an ``Overloaded``, when another attempt may succeed."""

    code: str
    message: str
    cause: ErrorInfo | None = None
    state: int | None = None
    op: int | None = None
    retry_after_s: float | None = None

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
            message = shortened(str(link) if isinstance(link, AgentflowError) else repr(link))
            state, op = (link.place if isinstance(link, AgentflowError) else None) or (None, None)
            retry_after_s = link.retry_after_s if isinstance(link, Overloaded) else None
            info = cls(code, message, info, state, op, retry_after_s)
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
        """The state and number of the op nearest to the root cause, of the errors that name one."""
        found: tuple[int, int] | None = None
        info: ErrorInfo | None = self
        while info is not None:
            if info.state is not None and info.op is not None:
                found = info.state, info.op
            info = info.cause
        return found

    def at(self, state: int, op: int) -> ErrorInfo:
        """A copy in which the root cause names this op, if it named none."""
        if self.cause is not None:
            return msgspec.structs.replace(self, cause=self.cause.at(state, op))
        return self if self.op is not None else msgspec.structs.replace(self, state=state, op=op)

    def to_exception(self) -> AgentflowError:
        """The exception with its causes, ``MAX_CAUSES`` at most: a hostile peer may nest more than Python's
        stack can hold."""
        chain: list[ErrorInfo] = []
        info: ErrorInfo | None = self
        while info is not None and len(chain) < MAX_CAUSES:
            chain.append(info)
            info = info.cause
        error: AgentflowError | None = None
        for info in reversed(chain):
            cause, error = error, from_code(info.code, info.message)
            error.__cause__ = cause
            error.place = None if info.state is None or info.op is None else (info.state, info.op)
            if isinstance(error, Overloaded):
                error.retry_after_s = info.retry_after_s
        assert error is not None
        return error


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, omit_defaults=True):
    """Common configuration: one JSON object with an ``event`` field, defaults left out."""


class Delta(_Event, frozen=True):
    """Variable ``var`` continues with ``text`` at character ``at``."""

    var: int
    at: int
    text: str


class Value(_Event, frozen=True):
    """Variable ``var`` is complete: its text ends with ``text``, from character ``at`` on. ``choices``: the
    score of each choice of a select. ``top_logprobs``: for each token the most likely ones at its
    position."""

    var: int
    at: int
    text: str
    finish_reason: str
    usage: Usage
    logprobs: tuple[float | None, ...] | None = None
    choices: dict[str, float] | None = None
    top_logprobs: TopLogprobs | None = None


class VarFailed(_Event, frozen=True):
    """Variable ``var`` failed and has no value."""

    var: int
    error: ErrorInfo


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


Event = Delta | Value | VarFailed | Reached | StateFailed | StatsReply
