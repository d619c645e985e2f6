"""Requests from one front to another through Redis, and fronts that disappear."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
from support.holds import until
from support.redis_server import RedisServer, shared_store
from support.server.http_clients import only_asyncio

from agentflow.errors import EngineDown, Overloaded
from agentflow.server.stores import fronts as fronts_module
from agentflow.server.stores.fronts import ForwardedAnswer, ForwardedRequest, Fronts, open_fronts

pytestmark = pytest.mark.anyio
BODY = bytes(range(256)) * 4


anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture(autouse=True)
def _short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts_module, "BEAT_S", 0.05)


class Peer:
    """Answers requests with their body, or never."""

    def __init__(self) -> None:
        self.has_begun, self.was_cancelled = anyio.Event(), anyio.Event()
        self.tenants: list[str] = []

    async def answer(self, asked: ForwardedRequest) -> ForwardedAnswer:
        self.has_begun.set()
        self.tenants.append(asked.tenant)
        if asked.path == "/fails":
            raise ValueError("a fault")
        if asked.path == "/never":
            try:
                await anyio.sleep_forever()
            finally:
                self.was_cancelled.set()
        return ForwardedAnswer(status=201, headers=((b"a", b"b"),), body=asked.tenant.encode() + asked.body)


def asked(path: str = "/", tenant: str = "ann") -> ForwardedRequest:
    return ForwardedRequest(method="GET", path=path, query=b"", tenant=tenant, headers=(), body=BODY)


@asynccontextmanager
async def two_fronts(redis: RedisServer) -> AsyncIterator[tuple[Fronts, Fronts, Peer]]:
    peer = Peer()
    async with (
        shared_store(redis) as here,
        shared_store(redis, here.prefix, front="b") as there,
        open_fronts(here, Peer().answer) as one,
        open_fronts(there, peer.answer) as other,
    ):
        yield one, other, peer


async def test_a_front_answers_another(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, _):
        answers: list[ForwardedAnswer] = []

        async def ask() -> None:
            answers.append(await here.ask(there.own, asked()))

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(ask)
        assert answers == [ForwardedAnswer(status=201, headers=((b"a", b"b"),), body=b"ann" + BODY)] * 20
        with pytest.raises(Overloaded):
            await here.ask(there.own, asked("/fails"))
        assert (await here.ask(there.own, asked())).status == 201


async def test_a_request_that_is_cancelled_is_cancelled_where_it_runs(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, peer):
        async with anyio.create_task_group() as group:
            group.start_soon(here.ask, there.own, asked("/never"))
            await peer.has_begun.wait()
            group.cancel_scope.cancel()
        await peer.was_cancelled.wait()


async def test_a_front_that_disappears_fails_what_it_was_asked(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, peer):
        key = here._store.key("front", there.own)

        async def kill() -> None:
            await peer.has_begun.wait()
            there._tasks.cancel_scope.cancel()
            await peer.was_cancelled.wait()
            await here._store.call(lambda client: client.delete(key))

        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            with pytest.raises(EngineDown):
                await here.ask(there.own, asked("/never"))
        assert not await here.is_alive(there.own)
        with pytest.raises(EngineDown):
            await here.ask(there.own, asked())


async def test_a_request_whose_message_the_store_lost_fails(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, peer):
        life = await here._life(there.own)

        async def lose() -> None:
            await peer.has_begun.wait()
            await here._store.call(lambda client: client.delete(here._store.key("front", there.own)))
            await there.renew()

        async with anyio.create_task_group() as group:
            group.start_soon(lose)
            with anyio.fail_after(10), pytest.raises((Overloaded, EngineDown)):
                await here.ask(there.own, asked("/never"))
        await peer.was_cancelled.wait()
        assert await here._life(there.own) not in (None, life)


async def test_a_front_that_asked_and_disappeared_runs_nothing(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, peer):
        message = fronts_module._Ask("1", "gone", asked("/never"))
        await here._send(there.own, message)
        await peer.was_cancelled.wait()


async def test_a_message_that_comes_twice_runs_once(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, peer):
        message = fronts_module._Ask("1", here.own, asked("/never"))
        for _ in range(2):
            await here._send(there.own, message)
        await peer.has_begun.wait()
        assert (await here.ask(there.own, asked())).status == 201
        await here._send(there.own, fronts_module._Drop("1"))
        await peer.was_cancelled.wait()
        assert (await here.ask(there.own, asked())).status == 201


@pytest.mark.parametrize("is_sent", [True, False])
async def test_f37_an_answer_is_sent_until_the_store_takes_it(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    """``is_sent``: the store has the answer, and only its reply was lost."""
    async with two_fronts(redis) as (here, there, _):
        send, failures = there._send, [Overloaded("the connection was reset")] * 3

        async def unsure(front: str, message: fronts_module._Message) -> None:
            if is_sent or not failures:
                await send(front, message)
            if failures:
                raise failures.pop()

        monkeypatch.setattr(there, "_send", unsure)
        for status in (201, 201):
            with anyio.fail_after(10):
                assert (await here.ask(there.own, asked())).status == status
        with anyio.fail_after(10):
            await until(lambda: not there._running)
        assert not failures


async def test_f37_a_message_that_is_received_and_lost(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after the store has removed a message from an inbox, and before it arrives."""
    async with two_fronts(redis) as (here, there, peer):
        lost: list[str] = []

        def lose(front: Fronts, kind: str) -> None:
            call = front._store.call

            async def lossy(operation: Callable[[Any], Awaitable[Any]]) -> Any:
                found = await call(operation)
                message = msgspec.msgpack.decode(found[1]) if isinstance(found, list | tuple) else {}
                if message.get("type") == kind and (kind == "drop" or message["number"] in here._pending):
                    lost.append(kind)
                    monkeypatch.setattr(front._store, "call", call)
                    raise Overloaded("the connection was reset")
                return found

            monkeypatch.setattr(front._store, "call", lossy)

        with anyio.fail_after(20):
            for front, kind in ((there, "ask"), (here, "answer")):
                lose(front, kind)
                await here._send(front.own, fronts_module._Drop("unknown"))  # ends the call that waits now
                with pytest.raises(Overloaded):
                    await here.ask(there.own, asked())
            lose(there, "drop")
            with monkeypatch.context() as short:
                short.setattr(fronts_module, "SILENT_S", 0.5)
                async with anyio.create_task_group() as group:
                    group.start_soon(here.ask, there.own, asked("/never"))
                    await until(lambda: bool(there._running))
                    group.cancel_scope.cancel()
                await peer.was_cancelled.wait()
            assert lost == ["ask", "answer", "drop"]
            assert (await here.ask(there.own, asked())).status == 201


async def test_f37_a_request_that_is_cancelled_in_error_fails(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, peer):

        async def cancel() -> None:
            await peer.has_begun.wait()
            there._cancel_for(here.own)

        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            with anyio.fail_after(10), pytest.raises(Overloaded):
                await here.ask(there.own, asked("/never"))


async def test_f37_only_requests_that_their_front_has_forgotten_are_cancelled(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts_module, "BEAT_S", 3_600)
    async with two_fronts(redis) as (here, there, peer):
        await here._send(there.own, fronts_module._Ask("1", here.own, asked("/never")))
        await peer.has_begun.wait()
        running = there._running["1"]
        running.heard_s -= 2 * fronts_module.SILENT_S
        there._take(fronts_module._Ping("1", here.own))
        there._cancel_silent()
        assert not running.scope.cancel_called
        running.heard_s -= 2 * fronts_module.SILENT_S
        there._cancel_silent()
        await peer.was_cancelled.wait()


async def test_f37_an_answer_counts_that_crosses_a_ping(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, peer):
        answers: list[ForwardedAnswer] = []

        async def ask() -> None:
            answers.append(await here.ask(there.own, asked("/never")))

        answer = ForwardedAnswer(status=200, headers=(), body=b"")
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await peer.has_begun.wait()
            [number] = here._pending
            for each in (answer, None):
                here._take(fronts_module._Answer(number, each))
        assert answers == [answer]


async def test_f37_a_flood_of_one_tenant_leaves_room_for_others(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts_module, "MAX_ASKED", 4)
    async with two_fronts(redis) as (here, there, peer):
        requests = [("ann", "/never")] * 10 + [("bob", "/never")] * 2 + [("cid", "/")]
        for number, (tenant, path) in enumerate(requests):  # refusals are still under way
            there._take(fronts_module._Ask(str(number), here.own, asked(path, tenant)))
        with anyio.fail_after(10):
            await until(lambda: len(peer.tenants) == 4)
            with pytest.raises(Overloaded):
                await here.ask(there.own, asked(tenant="cid"))
        assert peer.tenants == ["ann", "ann", "bob", "bob"]
        await here._send(there.own, fronts_module._Drop("0"))
        await peer.was_cancelled.wait()
        with pytest.raises(Overloaded):
            await here.ask(there.own, asked(tenant="bob"))
        for tenant in ("ann", "cid"):
            assert (await here.ask(there.own, asked(tenant=tenant))).status == 201


async def test_without_keys_the_one_tenant_has_all_the_room(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts_module, "MAX_ASKED", 4)
    async with two_fronts(redis) as (here, there, peer):
        for number in range(5):
            await here._send(there.own, fronts_module._Ask(str(number), here.own, asked("/never", "")))
        with pytest.raises(Overloaded):
            await here.ask(there.own, asked(tenant=""))
        assert peer.tenants == [""] * 4


async def test_a_beat_asks_once_for_each_front(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts_module, "BEAT_S", 3_600)
    async with two_fronts(redis) as (here, there, peer):
        for number in range(20):
            await here._send(there.own, fronts_module._Ask(str(number), here.own, asked("/never")))
        with anyio.fail_after(10):
            await until(lambda: len(there._running) == 20)
        asked_for: list[str] = []

        async def is_alive(front: str) -> bool:
            asked_for.append(front)
            return False

        monkeypatch.setattr(there, "is_alive", is_alive)
        async with anyio.create_task_group() as group:
            group.start_soon(there.beat)
            await peer.was_cancelled.wait()
            group.cancel_scope.cancel()
        assert asked_for == [here.own]


async def test_foreign_messages_are_skipped(redis: RedisServer) -> None:
    async with two_fronts(redis) as (here, there, _):
        key = here._store.key("inbox", there.own)
        values = (
            b"",
            b"\xc1",
            b"\x91" * 5_000,
            b"{}",
            msgspec.msgpack.encode({"type": "no"}),
        )
        await here._store.call(lambda client: client.rpush(key, *values))
        await here._send(there.own, fronts_module._Answer("unknown", None))
        assert (await here.ask(there.own, asked())).status == 201
