"""Streams the answers of a completion as server-sent events, in the format of either API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from agentflow.protocol.events import Usage
from agentflow.server.completion.completion import Completion
from agentflow.server.completion.request import CompletionDelta
from agentflow.server.http.call import ApiCall


class EventWriter(Protocol):
    """Writes the events of one stream, in the format of an API."""

    def start(self, prompt_tokens: int) -> bytes:
        """The events before the first delta. ``prompt_tokens``: of the first prompt."""

    def write(self, deltas: Sequence[CompletionDelta]) -> bytes:
        """The events of these deltas."""

    def end(self, usage: Usage) -> bytes:
        """The events after the last delta. ``usage``: of all answers."""


async def stream_completion(
    call: ApiCall,
    completion: Completion,
    writer: EventWriter,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Sends all answers. If the request is rejected, the error is raised before the status is sent; a later
    error is the last event of the stream. ``on_end``: called before the last event is sent."""
    await completion.until_accepted()
    async with call.streaming() as stream:
        await stream.send(writer.start(completion.num_prompt_tokens))
        while deltas := await completion.next():
            await stream.send(writer.write(deltas))
        call.record.count(completion.usage)
        on_end()
        await stream.end(writer.end(completion.usage))
