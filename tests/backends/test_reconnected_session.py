"""Sessions whose server was lost: running requests fail, and later ones run on another session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.session_peer import HANG
from support.tcp_proxy import Budget, Proxy, proxied
from support.wire_server import ThreadServer, thread_server

import agentflow as af
from agentflow.backends import remote
from agentflow.backends.remote import Remote
from agentflow.backends.websocket import WebSocket
from agentflow.language.batch import retries
from agentflow.protocol.wire import Resume, Welcome
from agentflow.server.config.limits import ServerLimits

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ThreadServer]]:
    """Two servers: a proxy that goes over to the other one looks like a server that was restarted."""
    limits = ServerLimits(resume_grace_s=0.05)
    with thread_server(limits) as first, thread_server(limits) as other:
        yield [first, other]


@asynccontextmanager
async def restartable(
    servers: list[ThreadServer], kind: type[Remote] = Remote, **options: Any
) -> AsyncIterator[tuple[Proxy, af.Session]]:
    """A session over a proxy to the first server."""
    async with (
        proxied(servers[0].port) as proxy,
        af.session(backend=kind(proxy.url, **options), seed=7) as flow,
    ):
        yield proxy, flow


def restart(proxy: Proxy, servers: list[ThreadServer]) -> None:
    """The next bytes end the connection, and the next connection meets a server without the session."""
    ports = {server.port for server in servers}
    proxy.target_port = next(iter(ports - {proxy.target_port}))
    proxy.current.up = 0


@af.program
async def ask(s: af.State, question: str) -> str:
    s += question + af.gen("answer")
    return await s["answer"]


async def test_f18a_runs_in_progress_fail_and_later_runs_succeed(servers: list[ThreadServer]) -> None:
    async with restartable(servers) as (proxy, flow):
        state = flow.state()
        state += "hello #3" + af.gen("before")
        before = await state["before"]
        with pytest.raises(af.ServerLost):  # noqa: PT012
            async for _ in flow.stream(ask, HANG):
                restart(proxy, servers)
                proxy.sever()  # nothing is sent any more
        assert flow.is_alive
        assert (await flow.run(ask, "later #4")).split()[-1].endswith("3é")
        assert flow.is_connected
        # The state is gone, and its values stay.
        with pytest.raises(af.ServerLost):
            state += "again"
        state.cancel()
        fresh = flow.state()
        fresh += state["before"] + af.gen("next")
        assert await fresh["next"] == before.split()[-1]
        assert (await flow.stats()).model == "scripted"


async def test_f37_branches_of_a_lost_state_become_no_task_group(servers: list[ThreadServer]) -> None:
    async with restartable(servers) as (proxy, flow):
        state = flow.state()
        forks = state.fork(2), state.fork(0)
        await state
        with pytest.raises(af.ServerLost):  # noqa: PT012
            async for _ in flow.stream(ask, HANG):
                restart(proxy, servers)
                proxy.sever()
        for branches in forks:
            with pytest.raises(af.ServerLost):
                await branches.__aenter__()


async def test_f18b_a_map_with_retries_finishes_over_restarts(
    servers: list[ThreadServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.01)
    async with restartable(servers) as (proxy, flow):
        questions = [f"question {number} #2" for number in range(60)]
        answers = []
        async with flow.map(ask, questions, retries=5, concurrency=4) as results:
            async for result in results:
                answers.append(result)
                if len(answers) in (10, 20, 40):
                    restart(proxy, servers)
        assert len(answers) == 60
        assert all(len(text.split()) == 2 for text in answers)


class Impatient(Remote):
    """A backend whose runs wait for a server for a fifth of a second; it waits as usual for an answer."""

    async def open(self, resume: Resume | None) -> tuple[WebSocket, Welcome]:
        self.open_timeout_s = 10.0
        opened = await super().open(resume)
        self.open_timeout_s = 0.2
        return opened


async def test_f18c_a_run_without_a_server_waits_and_then_fails(servers: list[ThreadServer]) -> None:
    async with restartable(servers, Impatient) as (proxy, flow):
        proxy.refuses = True
        restart(proxy, servers)
        with pytest.raises(af.ServerLost):
            await flow.run(ask, "one #1")
        assert (flow.is_alive, flow.is_connected) == (True, False)
        with pytest.raises(af.errors.ServerUnreachable):
            await flow.run(ask, "two #1")
        with pytest.raises(af.errors.ServerUnreachable):
            await flow.stats()
        async with anyio.create_task_group() as group:

            @group.start_soon
            async def come_back() -> None:
                while not proxy.num_connections > 5:
                    await anyio.lowlevel.checkpoint()
                proxy.refuses = False

            while True:
                try:
                    assert len((await flow.run(ask, "three #3")).split()) == 3
                    break
                except af.errors.ServerUnreachable:
                    continue


async def test_f37_runs_fail_while_a_server_asks_for_a_long_pause(
    servers: list[ThreadServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_LAST_SESSION_BACKOFF_S", 0.05)
    async with restartable(servers) as (proxy, flow):
        proxy.answers = [
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1000\r\nContent-Length: 0\r\n\r\n"
        ] * 9
        restart(proxy, servers)
        with pytest.raises(af.ServerLost):
            await flow.run(ask, "one #1")
        for _ in range(2):
            with pytest.raises(af.Overloaded):
                await flow.run(ask, "two #1")


async def test_f37_a_run_that_begins_in_a_short_pause_waits_for_the_next_attempt(
    servers: list[ThreadServer],
) -> None:
    async with restartable(servers) as (proxy, flow):
        proxy.answers = [
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
        ] * 9
        restart(proxy, servers)
        with pytest.raises(af.ServerLost):
            await flow.run(ask, "one #1")
        with pytest.raises(af.Overloaded):  # it waits for the attempt that fails
            await flow.run(ask, "two #1")
        proxy.answers.clear()
        assert len((await flow.run(ask, "three #3")).split()) == 3


async def test_f18d_the_limits_of_the_session_outlive_its_server(servers: list[ThreadServer]) -> None:
    async with restartable(servers) as (proxy, flow):
        flow.limit(output_tokens=10)
        await flow.run(ask, "first #1")
        restart(proxy, servers)
        with pytest.raises(af.ServerLost):
            await flow.run(ask, "lost #1")
        await flow.run(ask, "more #4")
        with pytest.raises(af.BudgetExceeded):
            await flow.run(ask, "more #8")
        restart(proxy, servers)
        with pytest.raises(af.ServerLost):
            await flow.stats()
        with pytest.raises(af.BudgetExceeded):
            await flow.run(ask, "still #8")


async def test_f18e_a_server_that_rejects_the_key_ends_the_session(servers: list[ThreadServer]) -> None:
    async with restartable(servers) as (proxy, flow):
        proxy.answers = [b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"] * 2
        proxy.current.up = 0
        with pytest.raises(af.errors.NotAuthorized):
            await flow.run(ask, "one #1")
        assert not flow.is_alive
        with pytest.raises(af.errors.NotAuthorized):
            await flow.run(ask, "two #1")


async def test_f18f_a_session_can_be_made_to_end_with_its_server(servers: list[ThreadServer]) -> None:
    async with restartable(servers, reconnect=False) as (proxy, flow):
        restart(proxy, servers)
        with pytest.raises(af.ServerLost):
            await flow.run(ask, "one #1")
        assert not flow.is_alive


async def test_f18g_a_recording_over_a_restart_can_be_replayed(
    servers: list[ThreadServer], tmp_path: Path
) -> None:
    async def twice(flow: af.Session, on_text: Callable[[], None]) -> str:
        with pytest.raises(af.ServerLost):  # noqa: PT012
            async for _ in flow.stream(ask, HANG):
                on_text()
        return await flow.run(ask, "later #2")

    path = tmp_path / "run.jsonl"
    async with proxied(servers[0].port) as proxy:

        def lose() -> None:
            restart(proxy, servers)
            proxy.sever()

        async with af.session(proxy.url, record=path) as flow:
            recorded = await twice(flow, lose)
    async with af.session(backend=af.Replay(path)) as flow:
        assert await twice(flow, lambda: None) == recorded


@examples(40)
@given(
    breaks=st.lists(
        st.tuples(st.integers(0, 4000), st.booleans(), st.sampled_from(["up", "down"])), max_size=5
    )
)
async def test_f18h_every_input_ends_right_whatever_breaks(
    servers: list[ThreadServer], breaks: list[tuple[int, bool, str]]
) -> None:
    async with restartable(servers) as (proxy, flow):
        proxy.budgets = [Budget(**{side: size}) for size, _, side in breaks]  # type: ignore[arg-type]
        questions = [f"question {number} #3" for number in range(12)]
        for size, is_restart, side in breaks:
            setattr(proxy.current, side, size)
            if is_restart:
                proxy.target_port = next(s.port for s in servers if s.port != proxy.target_port)
            for question in questions:
                try:
                    assert len((await flow.run(ask, question)).split()) == 3
                except (af.ServerLost, af.errors.ServerUnreachable):
                    continue
        proxy.budgets, proxy.current = [], Budget()
        assert flow.is_alive
    for server in servers:
        await server.wait_until_idle()
