"""Data that DSPy does not pass to an engine: the number of answers, the rollout, and the answer format.

During a call, the LM keeps these ``CallNotes`` in a context variable (``noting``), where the engine reads
them (``notes``). A callback records the adapter that formatted the last prompt (``remember_prompt``).
"""

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
    """The last prompt that an adapter formatted in this context. ``outer``: the prompt that contains this
    one, if a subclass extends the result of ``format``."""

    call_id: str
    adapter: Any
    signature: Any
    messages: Any = None
    outer: _Prompt | None = None


@dataclass
class CallNotes:
    """``n``: the number of answers that DSPy will request, one after the other. ``must_call``: DSPy reads
    only the tool calls of an answer. ``ready``: answers that were generated together with an earlier one."""

    n: int = 1
    rollout_id: int | None = None
    answer_format: AnswerFormat | None = None
    must_call: bool = False
    num_given: int = 0
    ready: deque[Any] = field(default_factory=deque)

    def seed(self, asked: int, number: int) -> int:
        """Returns the seed of answer ``number``: each answer and each rollout has its own."""
        if self.rollout_id is None and not number:
            return asked
        digest = hashlib.sha256(repr((asked, self.rollout_id, number)).encode()).digest()
        return int.from_bytes(digest[:7])

    def give(self, answers: Sequence[Any]) -> Any:
        """Returns the first answer and keeps the others for the next calls."""
        self.ready.extend(answers)
        return self.next()

    def next(self) -> Any:
        """Returns an answer that is ready, else None."""
        self.num_given += bool(self.ready)
        return self.ready.popleft() if self.ready else None


_prompt: ContextVar[_Prompt | None] = ContextVar("agentflow_dspy_prompt", default=None)
# The ``WiredCall`` that runs in this context.
WIRED_CALL: ContextVar[Any] = ContextVar("agentflow_dspy_wired_call", default=None)
_notes: ContextVar[CallNotes | None] = ContextVar("agentflow_dspy_notes", default=None)


def remember_prompt(call_id: str, adapter: Any = None, signature: Any = None, messages: Any = None) -> None:
    """Records an adapter's call of ``format`` when it begins, and its ``messages`` when it ends."""
    prompt = _prompt.get()
    if messages is None:
        outer = prompt if prompt is not None and prompt.messages is None else None
        _prompt.set(_Prompt(call_id, adapter, signature, outer=outer))
        return
    known = None  # DSPy also wraps inherited methods; the outer callback then lacks the signature
    while prompt is not None and prompt.call_id != call_id:
        known, prompt = prompt.signature if known is None else known, prompt.outer
    if prompt is not None:
        _prompt.set(replace(prompt, messages=messages, signature=prompt.signature or known))


def forget_prompt() -> None:
    """Forgets the prompt of an adapter that failed."""
    _prompt.set(None)


@contextmanager
def noting(messages: Any, asked: dict[str, Any], *, follow_adapter: bool) -> Iterator[None]:
    """Sets the notes for a call of an LM, with these messages and keyword arguments, in the block."""
    prompt = _prompt.get()
    call = CallNotes(asked.get("n") or 1, asked.get("rollout_id"))
    if prompt is not None and _are_same(prompt.messages, messages):
        call.must_call = not prompt.signature.output_fields
        call.answer_format = format_of(prompt.adapter, prompt.signature) if follow_adapter else None
    token = _notes.set(call)
    try:
        yield
    finally:
        _notes.reset(token)


def _are_same(written: Any, sent: Any) -> bool:
    """Some versions of DSPy send a copy of the adapter's messages, with texts as content blocks."""
    if not isinstance(written, list) or not isinstance(sent, list):
        return False
    return written is sent or [_role_and_text(message) for message in written] == [
        _role_and_text(message) for message in sent
    ]


def _role_and_text(message: Any) -> tuple[Any, Any]:
    content = message.get("content")
    if isinstance(content, list) and all(block.get("type") == "text" for block in content):
        content = "".join([block["text"] for block in content])
    return message.get("role"), content


def notes() -> CallNotes:
    """Returns the notes of the call that runs in this context."""
    return _notes.get() or CallNotes()
