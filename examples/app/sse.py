"""Server-sent events of a running program, for any framework that can stream a response."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

import agentflow as af


async def server_sent_events(running: af.ProgramStream) -> AsyncIterator[str]:
    """Runs ``flow.stream(...)`` and yields each new text as ``{"path": [0], "name": "answer", "text": "…"}``.
    The last event is ``done`` with the program's result, or ``error`` with a message. Closing the iterator
    cancels the program."""
    async with running as stream:
        try:
            async for event in stream:
                if isinstance(event, af.TextDelta):
                    yield _encoded("message", event)
                elif isinstance(event, af.RunDone):
                    yield _encoded("done", event.result)
        except af.AgentflowError as error:  # the status 200 is sent already
            yield _encoded("error", str(error))


def _encoded(kind: str, data: object) -> str:
    return f"event: {kind}\ndata: {msgspec.json.encode(data).decode()}\n\n"  # JSON has no line breaks
