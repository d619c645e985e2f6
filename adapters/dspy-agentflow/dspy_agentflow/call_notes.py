"""What a call of an LM knows and DSPy does not tell its engine: how many answers are wanted, which rollout it
is, and how the adapter that wrote the prompt will read the answer."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from dspy_agentflow.answer_format import AnswerFormat, format_of


@dataclass(frozen=True)
class _Prompt:
    """The last one that an adapter wrote here. ``outer``: the one that it is being made a part of, as where a
    subclass adds to what ``format`` gives."""

    call_id: str
    adapter: Any
    signature: Any
    messages: Any = None
    outer: _Prompt | None = None


@dataclass
class CallNotes:
    """``n``: so many answers are asked for, one after the other. ``must_call``: of an answer, only the tools
    that it calls are read. ``ready``: answers that came with an earlier one."""

    n: int = 1
    rollout_id: int | None = None
    answer_format: AnswerFormat | None = None
    must_call: bool = False
    num_given: int = 0
    ready: deque[Any] = field(default_factory=deque)

    def seed(self, asked: int, number: int) -> int:
        """The one for answer ``number``: each of several, and each rollout, has its own."""
        if self.rollout_id is None and not number:
            return asked
        digest = hashlib.sha256(repr((asked, self.rollout_id, number)).encode()).digest()
        return int.from_bytes(digest[:7])

    def give(self, answers: Sequence[Any]) -> Any:
        """The first of them; the others are ready for the next calls."""
        self.ready.extend(answers)
        return self.next()

    def next(self) -> Any:
        """One that is ready; None where there is none."""
        self.num_given += bool(self.ready)
        return self.ready.popleft() if self.ready else None


_prompt: ContextVar[_Prompt | None] = ContextVar("agentflow_dspy_prompt", default=None)
_notes: ContextVar[CallNotes | None] = ContextVar("agentflow_dspy_notes", default=None)


def remember_prompt(call_id: str, adapter: Any = None, signature: Any = None, messages: Any = None) -> None:
    """What the adapter writes, when it begins and when it has written it."""
    prompt = _prompt.get()
    if messages is None:
        outer = prompt if prompt is not None and prompt.messages is None else None
        _prompt.set(_Prompt(call_id, adapter, signature, outer=outer))
        return
    known = None  # DSPy also wraps what is inherited, and then does not tell the signature outside
    while prompt is not None and prompt.call_id != call_id:
        known, prompt = prompt.signature if known is None else known, prompt.outer
    if prompt is not None:
        _prompt.set(replace(prompt, messages=messages, signature=prompt.signature or known))


def forget_prompt() -> None:
    """The adapter has failed."""
    _prompt.set(None)


@contextmanager
def noting(messages: Any, asked: dict[str, Any], *, follow_adapter: bool) -> Iterator[None]:
    """A call of an LM with these messages and keyword arguments runs in the block."""
    prompt = _prompt.get()
    told = CallNotes(asked.get("n") or 1, asked.get("rollout_id"))
    if prompt is not None and _are_same(prompt.messages, messages):
        told.must_call = not prompt.signature.output_fields
        told.answer_format = format_of(prompt.adapter, prompt.signature) if follow_adapter else None
    token = _notes.set(told)
    try:
        yield
    finally:
        _notes.reset(token)


def _are_same(written: Any, sent: Any) -> bool:
    """Some versions of DSPy send a copy of what the adapter wrote, its texts in blocks."""
    if not isinstance(written, list) or not isinstance(sent, list):
        return False
    return written is sent or [_said(message) for message in written] == [_said(message) for message in sent]


def _said(message: Any) -> tuple[Any, Any]:
    content = message.get("content")
    if isinstance(content, list) and all(block.get("type") == "text" for block in content):
        content = "".join([block["text"] for block in content])
    return message.get("role"), content


def notes() -> CallNotes:
    """Of the call that runs here."""
    return _notes.get() or CallNotes()
