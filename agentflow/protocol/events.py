"""The events: what a backend tells the frontend.

They describe how far variables and states have got, so they can be made anew at any time from what
the backend knows: a slow reader gets larger deltas, and a resumed one continues at an offset.
"""

from __future__ import annotations

import msgspec

from agentflow.errors import AgentflowError, Overloaded, RunFailed, from_code, shortened
from agentflow.protocol.token_logprob import TopLogprobs
from agentflow.runtime.generator import Stats, Usage

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
