"""The events: what a backend tells the frontend.

They describe how far variables and states have got, so they can be made anew at any time from what
the backend knows: a slow reader gets larger deltas, and a resumed one continues at an offset.

The likeliest tokens at one place of a generated text: what ``gen(..., top_logprobs=k)`` tells.
"""

from __future__ import annotations

import msgspec

from agentflow.errors import AgentflowError, NotSupported, Overloaded, RunFailed, from_code, shortened
from agentflow.protocol.constraint import Constraint, ConstraintKind


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token, its text (``\ufffd`` for the bytes of half a character), and its log-probability.

    >>> s += af.gen("word", max_tokens=4, top_logprobs=2)
    >>> word = await s["word"]
    >>> likeliest, second = s["word"].top_logprobs[0]
    >>> likeliest.logprob >= second.logprob
    True
    """

    token_id: int
    text: str
    logprob: float


class Capabilities(msgspec.Struct, frozen=True):
    """What a generator can do; the rest is refused before anything runs."""

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
        """``NotSupported`` where the backend takes no whole conversations."""
        if not self.conversations:
            raise NotSupported(f"{self.model} takes no whole conversations: append its turns one by one")

    def require(self, constraint: Constraint | None) -> None:
        """``NotSupported`` where the backend could not keep the constraint."""
        for part in (constraint, constraint and constraint.instead):
            if part is not None and part.kind not in self.constraints:
                raise NotSupported(
                    f"{self.model} cannot generate under a constraint of the kind {part.kind!r} "
                    f"(it can: {', '.join(self.constraints) or 'none'})"
                )

    def require_images(self) -> None:
        """``NotSupported`` where the backend sees no images."""
        if not self.images:
            raise NotSupported(f"{self.model} sees no images: image() needs a model with vision")


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one generation: prompt, of which cached, and output. Usages can be added.

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
        """Cached share of the prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


class Stats(msgspec.Struct, frozen=True):
    """Counters of the backend since its start, and gauges of now. Tokens unless the name says
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
        """Cached share of all prompt tokens, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


TopLogprobs = tuple[tuple[TokenLogprob, ...] | None, ...]
"""For each generated token the likeliest at its place, likeliest first; None for a token that was encoded
anew at the end of the text."""


MAX_CAUSES = 16


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error of the tree in ``errors.py``, with what caused it. ``state`` and ``op``: whose op failed, and
    which, counted from 1 (text, turns, gens and the like; not ``await``, ``seal``, ``close``).
    ``retry_after_s``: of an ``Overloaded``, in so many seconds it is worth another try."""

    code: str
    message: str
    cause: ErrorInfo | None = None
    state: int | None = None
    op: int | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """Describes an exception and its causes. Foreign exceptions travel as ``run_failed``."""
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
        """The failure that this one follows from; itself where it follows from none."""
        info = self
        while info.cause is not None:
            info = info.cause
        return info

    @property
    def place(self) -> tuple[int, int] | None:
        """The op that failed first, of those that are named: its state and its number there."""
        found: tuple[int, int] | None = None
        info: ErrorInfo | None = self
        while info is not None:
            if info.state is not None and info.op is not None:
                found = info.state, info.op
            info = info.cause
        return found

    def at(self, state: int, op: int) -> ErrorInfo:
        """The same; where the failure that it follows from names no op, it was this one."""
        if self.cause is not None:
            return msgspec.structs.replace(self, cause=self.cause.at(state, op))
        return self if self.op is not None else msgspec.structs.replace(self, state=state, op=op)

    def to_exception(self) -> AgentflowError:
        """The exception again, causes included, ``MAX_CAUSES`` of them at most: whoever sends more, nested as
        deep as Python's stack, is not followed."""
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
    """Variable ``var`` goes on with ``text`` at character ``at``."""

    var: int
    at: int
    text: str


class Value(_Event, frozen=True):
    """Variable ``var`` is complete: ``text`` from character ``at`` on is its rest. ``choices``: of a
    select, each choice with its score. ``top_logprobs``: for each token the likeliest there."""

    var: int
    at: int
    text: str
    finish_reason: str
    usage: Usage
    logprobs: tuple[float | None, ...] | None = None
    choices: dict[str, float] | None = None
    top_logprobs: TopLogprobs | None = None


class VarFailed(_Event, frozen=True):
    """Variable ``var`` will never have a value."""

    var: int
    error: ErrorInfo


class Reached(_Event, frozen=True):
    """All that was submitted to the state before the ``Await`` with this ticket is done."""

    state: int
    ticket: int


class StateFailed(_Event, frozen=True):
    """An op of the state failed (or it was cancelled): nothing after it runs."""

    state: int
    error: ErrorInfo


class StatsReply(_Event, frozen=True):
    """Answers ``GetStats``: with the counters, or with why there are none now."""

    ticket: int
    stats: Stats | None = None
    error: ErrorInfo | None = None


Event = Delta | Value | VarFailed | Reached | StateFailed | StatsReply
