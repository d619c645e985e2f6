"""The parts of the readers of all APIs' streams: the ends of a stream, its errors and its usage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import msgspec

from agentflow.backends.apis.answers.answer import AnswerCollector
from agentflow.backends.apis.http.api_errors import ErrorMapping
from agentflow.backends.apis.http.event_stream import ServerEvent
from agentflow.errors import EngineFailed, ProtocolError
from agentflow.protocol.unreadable import UNREADABLE

PartT = TypeVar("PartT")


class StreamReader(ABC):
    """The ``EventSink`` of one answer. A subclass reads the events of its API.

    Args:
        answer: Receives the answer.
        errors: Makes the errors.
        num_sent: The bytes of the request, to estimate the prompt's tokens if the usage never comes.

    Attributes:
        is_over: The last event of the stream was read.
        is_left: A stop has ended the text before the server did.
    """

    def __init__(self, answer: AnswerCollector, errors: ErrorMapping, num_sent: int) -> None:
        self.answer = answer
        self.errors = errors
        self.is_over = False
        self.is_left = False
        self._num_sent = num_sent
        self._has_ended = False  # the server ended the answer

    @property
    def is_visible(self) -> bool:
        """Whether the answer has become visible."""
        return self.answer.is_visible

    @property
    def has_begun(self) -> bool:
        """Whether the model has written something."""
        return self.answer.num_deltas > 0

    def event(self, event: ServerEvent) -> None:
        """Reads one event."""
        self._read_event(event)
        if self.answer.is_stopped and not self._has_ended:
            self.is_left = True
            self.answer.finish("stop")
            self._set_usage()

    def close(self) -> None:
        """The stream ended. ``ServerLost`` if the answer is not complete."""
        if not self._has_ended:
            raise self.errors.lost("the stream ended before the answer did")
        self._set_usage()

    @abstractmethod
    def _read_event(self, event: ServerEvent) -> None:
        """Reads one event of the API."""

    @abstractmethod
    def _set_usage(self) -> None:
        """Sets the usage of the answer so far."""

    def _end(self, reason: str) -> None:
        """The server ends the answer: ``eos``, ``stop`` or ``length``."""
        self._has_ended = True
        self.answer.finish("stop" if self.answer.is_stopped else reason)

    def _decoded(self, decode: Callable[[bytes | msgspec.Raw], PartT], data: bytes | msgspec.Raw) -> PartT:
        """An event, or a part of one. ``ProtocolError`` if it has another form."""
        try:
            return decode(data)
        except UNREADABLE as error:
            shown = bytes(data)[:100].decode("utf-8", "replace")
            raise self._wrong(f"an event that is not of its API ({error}): {shown!r}") from error

    def _compact(self, data: msgspec.Raw) -> str:
        """A JSON value as text, without white space between its parts. Numbers stay as they are written."""
        return self._decoded(lambda given: msgspec.json.format(bytes(given), indent=-1).decode(), data)

    def _wrong(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self.errors.server} sent {what}")

    def _unknown_end(self, reason: str | None) -> EngineFailed:
        return EngineFailed(f"{self.errors.server} ended the answer of {self.errors.model} with {reason!r}")
