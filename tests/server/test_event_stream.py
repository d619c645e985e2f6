"""Server-sent events: when a stream sends keep-alive events, and when it no longer does."""

from __future__ import annotations

import pytest

from agentflow.runtime.task_group import open_task_group
from agentflow.server.event_stream import ServerSentEvents, comment, event

pytestmark = pytest.mark.anyio
KEEPALIVE = comment(b"keep-alive")


async def test_a_silent_stream_is_kept_alive_until_it_ends():
    written: list[tuple[bytes, bool]] = []

    async def write(data: bytes, more: bool) -> None:
        written.append((data, more))
        if len(written) == 3:
            await stream.end(event(b"{}", b"done"))

    stream = ServerSentEvents(write, KEEPALIVE)
    async with open_task_group() as group:
        group.start_soon(stream.keep_alive, 0.001)
    assert written == [(KEEPALIVE, True)] * 3 + [(b"event: done\ndata: {}\n\n", False)]


async def test_no_events_are_not_written():
    written: list[bytes] = []

    async def write(data: bytes, more: bool) -> None:
        written.append(data)

    await ServerSentEvents(write, KEEPALIVE).send(b"")
    assert written == []
