"""Requests from one front to another through Redis, and fronts that disappear."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
