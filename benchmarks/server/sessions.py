"""The memory of idle sessions: the growth of a server when a thousand sessions are open."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import psutil
from websockets.asyncio.client import ClientConnection, connect

from agentflow.protocol.wire import SESSION_PATH, VERSION, Bye, Hello, Welcome, encode, server_frames
from benchmarks.report import Report
from benchmarks.server.load_process import LoadProcess
from benchmarks.serving import serving

NUM_SESSIONS = 1000
AT_ONCE = 50


async def measure_sessions(report: Report, _: LoadProcess) -> None:
    """Measures ``idle_session_kb``; each run has a separate server."""
    runs = [await _session_kb() for _ in range(3 if report.scale == "full" else 1)]
    note = (
        f"resident memory of a server with {NUM_SESSIONS} idle websocket sessions "
        "minus that without, per session"
    )
    report.median("server.idle_session_kb", runs, "KB", goal="<= 50", note=note)


async def _session_kb() -> float:
    with serving("benchmarks.server.scripted_server") as (url, pid):
        server = psutil.Process(pid)
        async with AsyncExitStack() as warm_up:
            await _open(warm_up, url + SESSION_PATH, 20)
        before = await _settled(server)
        async with AsyncExitStack() as stack:
            for _ in range(0, NUM_SESSIONS, AT_ONCE):
                await _open(stack, url + SESSION_PATH, AT_ONCE)
            return (await _settled(server) - before) / NUM_SESSIONS / 1000


async def _open(stack: AsyncExitStack, url: str, count: int) -> None:
    """Opens this many sessions."""

    async def one() -> None:
        socket = await stack.enter_async_context(connect(url, compression=None, ping_interval=None))
        # A session whose connection breaks is kept, so that its client can resume it.
        stack.push_async_callback(_leave, socket)
        await socket.send(encode(Hello(VERSION), binary=True))
        data = await socket.recv()
        assert isinstance(data, bytes)
        assert isinstance(server_frames().decode(data), Welcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())


async def _leave(socket: ClientConnection) -> None:
    """Ends the session, and waits for its end: sessions of the warm-up would count towards the limit."""
    await socket.send(encode(Bye(), binary=True))
    await socket.wait_closed()


async def _settled(server: psutil.Process) -> int:
    """Waits until the memory of the process is constant, and returns it in bytes."""
    last = -1
    while (now := server.memory_info().rss) != last:
        last = now
        await asyncio.sleep(0.5)  # noqa: TID251  between two samples
    return last
