"""One answer of a model while it is streamed: text, reasoning, tool calls, log-probabilities and usage.

The readers of the APIs' streams write into it. It applies the stops, writes the notation of replies, and
delivers the visible text. An answer that is *held* delivers nothing before its end, so that it can be checked
or taken out of an object first.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from agentflow.backends.apis.answers.visible_text import StopFilter
from agentflow.errors import NotSupported, ProtocolError, RunFailed
from agentflow.protocol.chat import Arguments, CallBegun, CalledTool, ReplyPiece, ReplyWriter, TextPiece
from agentflow.protocol.events import TokenLogprob, Usage
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.generator import METER, Generated, OnText

CHARS_PER_TOKEN = 4
"""To estimate tokens that no server has counted."""
_LONG_TOKEN_CHARS = 8
"""Few texts have longer tokens on average."""
NO_TOKEN_ID = -1
"""The id of a token in an API that reports only its text."""


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.arguments) or "{}"


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token of the text with its log-probability, and the likeliest in its place."""

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


class AnswerCollector:
    """Collects one answer.

    Args:
        params: The sampling parameters, for stops and log-probabilities.
        on_text: Receives the visible text; of a reply, its notation.
        on_reasoning: Receives the reasoning.
        is_reply: Whether the text is the notation of a reply.
        is_held: Whether nothing becomes visible before ``deliver``.
    """

    def __init__(
        self,
        params: GenParams,
        on_text: OnText,
        on_reasoning: OnText | None = None,
        *,
        is_reply: bool = False,
        is_held: bool = False,
    ) -> None:
        self._params = params
        self._on_text = on_text
        self._on_reasoning = on_reasoning
        self._is_reply = is_reply
        self._is_held = is_held
        self._filter = StopFilter(params.stop, params.stop_regex)
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._is_call_open = False  # the latest call may get more arguments
        self._tokens: list[TokenInfo] = []
        self._writer = ReplyWriter()
        self._notation: list[str] = []
        self.finish_reason = ""
        self.usage = Usage()
        self.written_tokens = 0  # of the prompt: written to the provider's cache
        self.on_begin: Callable[[], None] = lambda: None  # called when the server begins the answer
        self._native: tuple[str, bytes] = ("", b"")
        self.num_deltas = 0
        self.is_visible = False
        self._meter = METER.get()
        self._num_chars = 0
        self._num_counted = 0  # tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the program asked for log-probabilities. Otherwise they are not read."""
        return self._params.wants_logprobs

    def was_stopped_by(self, stop: object) -> bool:
        """Whether a stop of the program ended the text, by the report of a server: the text or the id of the
        stop, None if no stop ended it, or anything else if it is not reported."""
        match stop:
            case str():
                return True
            case int():
                return stop in self._params.stop_token_ids
            case None:
                return False
            case _:
                return bool(self._params.stop or self._params.stop_regex or self._params.stop_token_ids)

    @property
    def is_stopped(self) -> bool:
        """Whether the text has reached a stop, so that nothing after it counts."""
        return self._filter.is_stopped

    @property
    def text(self) -> str:
        """The text so far, without the part that is held back."""
        return "".join(self._texts)

    @property
    def tokens(self) -> tuple[TokenInfo, ...]:
        """The tokens of the text, with log-probabilities."""
        return tuple(self._tokens)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> tuple[CalledTool, ...]:
        """The tool calls so far."""
        return tuple([CalledTool(call.id, call.name, call.text) for call in self._calls])

    def add_text(self, delta: str) -> None:
        """More text."""
        self._count(delta)
        self._show(self._filter.push(delta))

    def add_reasoning(self, delta: str) -> None:
        """More reasoning."""
        self._count(delta)
        self._reasoning.append(delta)
        if self._on_reasoning is not None and not self._is_held:
            self.is_visible = True
            self._on_reasoning(delta)

    def begin_call(self, call_id: str, name: str) -> None:
        """A tool call begins. ``RunFailed`` if the model may call none: its endpoint works."""
        if not self._is_reply:
            raise RunFailed(f"the model called {name!r:.200}, but this gen may call no tools")
        self._flush()
        self._end_call()
        self._is_call_open = True
        call = _Call(call_id or f"call_{secrets.token_hex(12)}", name)
        self._calls.append(call)
        self._write(CallBegun(call.id, name))

    def add_arguments(self, delta: str) -> None:
        """More of the arguments of the latest call. ``ProtocolError`` if text has come since."""
        if not self._is_call_open:
            raise ProtocolError("arguments of a tool call came without the call")
        self._count(delta)
        self._calls[-1].arguments.append(delta)
        self._write(Arguments(delta))

    def add_token(self, token: TokenInfo) -> None:
        """A token of the text."""
        self._tokens.append(token)

    def take_back(self) -> None:
        """The answer is lost: its tokens do not count against limits."""
        if self._meter is not None and self._num_counted:
            self._meter(-self._num_counted)
            self._num_counted = 0

    def finish(self, reason: str) -> None:
        """The answer ends: ``eos``, ``stop`` or ``length``."""
        self.finish_reason = reason
        self._flush()

    def keep_native(self, text: str, message: bytes) -> None:
        """Keeps the answer as the provider wants it back, with its reasoning; ``text``: the text in it."""
        self._native = text, message

    @property
    def native(self) -> bytes | None:
        """The answer as the provider wants it back; None if that is not needed, or its text has changed."""
        text, message = self._native
        return message if message and text == self.text else None

    def replace_text(self, text: str) -> None:
        """Replaces the text of an answer that is held."""
        self._texts = [text]
        self._tokens = []

    def deliver(self) -> Generated:
        """The complete answer. If it was held back, it becomes visible. ``NotSupported`` if log-probabilities
        are missing."""
        if self._is_held:
            self._end_call()
            self._is_held = False
            if self._reasoning and self._on_reasoning is not None:
                self._on_reasoning(self.reasoning)
            text, calls, self._texts, self._calls = self.text, self._calls, [], []
            self._show(text)
            for call in calls:
                self._calls.append(call)
                self._write(CallBegun(call.id, call.name), Arguments(call.text))
        else:
            self._end_call()
        text = "".join(self._notation) + self._writer.finish() if self._is_reply else self.text
        generated = Generated(text, self.finish_reason, self.usage, reasoning=self.reasoning or None)
        return self._with_logprobs(generated) if self._params.wants_logprobs else generated

    def _with_logprobs(self, generated: Generated) -> Generated:
        tokens = _covering(self._tokens, len(self.text))
        if not tokens and self.text:
            raise NotSupported("the server sent no log-probabilities: leave out logprobs and top_logprobs")
        num_top = self._params.top_logprobs
        return msgspec.structs.replace(
            generated,
            logprobs=tuple([token.logprob for token in tokens]),
            top_logprobs=tuple([token.top[:num_top] for token in tokens]) if num_top else None,
            tokens=tuple([token.text for token in tokens]),
        )

    def _count(self, delta: str) -> None:
        """Counts the tokens of a delta. A server may send several in one delta, or one in several."""
        self.num_deltas += 1
        if self._meter is not None:
            self._num_chars += len(delta)
            num_tokens = min(self.num_deltas, -(-self._num_chars // _LONG_TOKEN_CHARS))
            if num_tokens > self._num_counted:
                self._meter(num_tokens - self._num_counted)
                self._num_counted = num_tokens

    def _flush(self) -> None:
        self._show(self._filter.finish())

    def _end_call(self) -> None:
        """Ends the open call, whose arguments are an object even if none came."""
        if self._is_call_open and not self._calls[-1].arguments:
            self.add_arguments("{}")
        self._is_call_open = False

    def _show(self, text: str) -> None:
        if not text:
            return
        self._end_call()
        self._texts.append(text)
        if self._is_reply:
            self._write(TextPiece(text))
        elif not self._is_held:
            self.is_visible = True
            self._on_text(text)

    def _write(self, *pieces: ReplyPiece) -> None:
        if self._is_reply and not self._is_held:
            self.is_visible = True
            self._notation.append(self._writer.push(pieces))
            self._on_text(self._notation[-1])


def _covering(tokens: list[TokenInfo], num_chars: int) -> list[TokenInfo]:
    """The first tokens, up to the one that completes the text: tokens of a stop are not part of it."""
    found: list[TokenInfo] = []
    covered = 0
    for token in tokens:
        if covered >= num_chars:
            break
        found.append(token)
        covered += len(token.text)
    return found
