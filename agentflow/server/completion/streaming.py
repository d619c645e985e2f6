"""Streams the answers of a completion as events, in the format of an API."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from agentflow.protocol.events import Usage
from agentflow.server.completion.checks import write_paths
from agentflow.server.completion.completion import Completion
from agentflow.server.completion.large_answers import count_logprobs, write_beside
from agentflow.server.completion.request import AnswerEnded, CompletionDelta, ToolCallBegun
from agentflow.server.event_stream import comment
from agentflow.server.http.call import ApiCall

logger = logging.getLogger(__name__)


class EventWriter(Protocol):
    """Writes the events of one stream, in the format of an API."""

    def start(self, prompt_tokens: int) -> bytes:
        """The events before the first delta. ``prompt_tokens``: the length of the first prompt."""

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""

    def report(self, violated: str) -> bytes:
        """Reports the paths of violated schema keywords, before ``end``. Returns the bytes to send now."""

    def end(self, usage: Usage) -> bytes:
        """The events after the last delta. ``usage``: the usage of all answers."""


RELAXED = "x-agentflow-relaxed"
VIOLATED = "x-agentflow-violated"
"""Headers with paths in the client's schemas: keywords that the grammar does not enforce, and keywords that
the answer violates. ``checks.write_paths`` writes them."""


class CommentedEvents:
    """The base of writers of server-sent events: they report in comments, which clients skip."""

    def report(self, violated: str) -> bytes:
        """A comment with the paths of violated schema keywords."""
        return comment(f"{VIOLATED}: {violated}".encode())


class PartWriter:
    """Writes the deltas of answers in parts, in a thread where they have many log-probabilities.

    Args:
        call: the request.
        writer: writes the events in the format of the API.
    """

    def __init__(self, call: ApiCall, writer: EventWriter) -> None:
        self._call = call
        self._writer = writer
        self.num_logprobs = 0  # so far

    async def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""
        num_logprobs = count_logprobs(deltas)
        self.num_logprobs += num_logprobs
        # The end of an item or of the answer may have all of its log-probabilities again.
        if any(isinstance(delta, AnswerEnded | ToolCallBegun) for delta in deltas):
            num_logprobs = self.num_logprobs
        return await write_beside(self._call, num_logprobs, self._writer.write, deltas)

    async def end(self, usage: Usage) -> bytes:
        """The events after the last delta."""
        return await write_beside(self._call, self.num_logprobs, self._writer.end, usage)


def announce(call: ApiCall, completion: Completion) -> None:
    """Lists the paths of relaxed keywords in a header of the answer and in the log. The requests must be
    accepted."""
    if completion.relaxed and call.record.relaxed is None:
        text = write_paths([(one.name, one.path) for one in completion.relaxed])
        call.record.relaxed = call.reply_headers[RELAXED] = text
        call.relaxed["requests"] += 1


def report(call: ApiCall, completion: Completion) -> None:
    """Records the usage of a completion that has ended, and the schema keywords that it violates."""
    call.record.count(completion.usage)
    announce(call, completion)
    found: list[tuple[str, tuple[str, ...]]] = []
    for check in completion.checks:
        result = "unchecked" if check.violated is None else "violated" if check.violated else "valid"
        call.relaxed[result] += 1
        found += [(check.name, path) for path in check.violated or ()]
    if found:
        call.record.violated = call.reply_headers[VIOLATED] = write_paths([*dict.fromkeys(found)])
        if call.is_over:  # it ran in the background, and its line was logged before
            logger.info("request %s violated=%s", call.id, call.record.violated)


async def stream_completion(
    call: ApiCall,
    completion: Completion,
    writer: EventWriter,
    on_end: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Sends all answers.

    If the request is rejected, the error is raised before the status is sent. A later error is the last event
    of the stream. Violations of relaxed schemas are reported before the last event, since the headers were
    sent at the beginning.

    Args:
        call: the request.
        completion: its answers.
        writer: writes the events in the format of the API.
        on_end: called before the last event is sent.
    """
    await completion.until_accepted()
    announce(call, completion)
    parts = PartWriter(call, writer)
    async with call.streaming() as stream:
        await stream.send(writer.start(completion.num_prompt_tokens))
        while deltas := await completion.next():
            await stream.send(await parts.write(deltas))
        report(call, completion)
        if on_end is not None:
            await on_end()
        violated = call.record.violated
        reported = writer.report(violated) if violated else b""
        await stream.end(reported + await parts.end(completion.usage))
