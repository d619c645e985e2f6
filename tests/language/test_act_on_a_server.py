"""The tool loop on a server whose frames are small."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.runtime.generator import Generator
from agentflow.server.config.limits import ServerLimits
from agentflow.server.models.models import one_model
from agentflow.server.serve import running_server

pytestmark = pytest.mark.anyio

ANSWERS = [[af.ToolCall("large", {}), af.ToolCall("small", {})], "done"]


@contextmanager
def small_frames() -> Iterator[str]:
    """The address of a server that accepts frames of 64 KiB."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Generator[Any]]:
        yield ScriptedGenerator(list(ANSWERS))

    with start_blocking_portal("asyncio") as portal:
        running = portal.call(
            lambda: running_server(one_model(opened), limits=ServerLimits(frame_bytes=65_536))
        )
        with portal.wrap_async_context_manager(running) as server:
            yield server.url


async def small() -> str:
    return "small"


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
@pytest.mark.parametrize("text", ["x" * 100_000, "\x00é😀" * 50_000], ids=["ascii", "escaped"])
async def test_f37_a_result_larger_than_a_frame_is_sent_in_parts(encoding: Any, text: str) -> None:
    def large() -> str:
        return text

    with small_frames() as url, anyio.fail_after(60):
        async with af.session(backend=af.Remote(url, encoding=encoding)) as flow, flow.state() as s:
            s += af.user("?")
            assert await af.act(s, tools=[large, small]) == "done"
            results = [m["content"] for m in await s.messages() if m["role"] == "tool"]
            assert results == [text, "small"]


class Refusing:
    """A backend that refuses provided texts with more characters than ``most``."""

    def __init__(self, backend: Backend, most: int) -> None:
        self._backend = backend
        self._most = most

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with self._backend.connect(deliver, lost) as connection:
            send = connection.send

            def refuse(sent: Sequence[ops.Op]) -> None:
                if any(isinstance(op, ops.Provide) and len(op.text) > self._most for op in sent):
                    raise af.errors.FrameTooLarge("too large")
                send(sent)

            connection.send = refuse  # type: ignore[method-assign]
            yield connection


async def test_f37_a_result_that_the_backend_refuses_is_an_error_for_the_model() -> None:
    def large() -> str:
        return "x" * 1_000

    with anyio.fail_after(30):
        backend = Refusing(af.Scripted({"answer": list(ANSWERS)}), 100)
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += af.user("?")
            events = [event async for event in af.act(s, tools=[large, small])]
            ended = {event.call.name: event for event in events if isinstance(event, af.ToolDone)}
            assert ended["large"].failed
            results = [m["content"] for m in await s.messages() if m["role"] == "tool"]
            assert results == [ended["large"].text, "small"]
            assert results[0].startswith("error: FrameTooLarge: too large")
