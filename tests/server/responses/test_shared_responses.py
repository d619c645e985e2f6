"""Responses and conversations of several fronts, in a real Redis."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import anyio
import pytest
from support.redis_server import RedisServer, lost_answer, shared_store
from support.server.http_clients import only_asyncio

from agentflow.protocol.chat import CalledTool, Message
from agentflow.protocol.images import Image, PlacedImage
from agentflow.server.responses.background import EventLog
from agentflow.server.responses.item import Item, Reasoning, Step
from agentflow.server.responses.keeping import TooLargeToKeep
from agentflow.server.responses.shared_store import SharedResponses
from agentflow.server.responses.store import History, StoredConversation, StoredResponse
from agentflow.server.stores.entries import _ADD, _SWEEP, ENTRY_BYTES, SharedEntries
from agentflow.server.stores.shared import SharedStore

pytestmark = pytest.mark.anyio
MOST_BYTES = 60_000


anyio_backend = pytest.fixture(only_asyncio)


def item(item_id: str, text: str = "") -> Item:
    return Item.made(item_id, {"id": item_id, "text": text}, Message("user", text))


def response(
    response_id: str, text: str = "", before: History | None = None, items: tuple[Item, ...] = ()
) -> StoredResponse:
    history = History(before, (Message("user", text), Message("assistant", "", generated=True)))
    return StoredResponse(response_id, text.encode(), history, items, ())


async def audit(store: SharedStore) -> Counter[str]:
    """The bytes of each tenant, found by reading everything, are the counted ones; so are the references to
    turns; and every index leads somewhere."""

    async def read(client: Any) -> Counter[str]:
        prefix, found = store.prefix.encode() + b"r:", Counter[str]()
        refs: Counter[bytes] = Counter()
        keys = {key.removeprefix(prefix) async for key in client.scan_iter(prefix + b"*", count=1_000)}
        contents: dict[bytes, Any] = {}
        async with client.pipeline(transaction=False) as pipe:
            for key in (ordered := sorted(keys)):
                match key.partition(b":")[0]:
                    case b"item":
                        pipe.smembers(prefix + key)
                    case b"kept-order":
                        pipe.zrange(prefix + key, 0, -1)
                    case b"kept" | b"turn":
                        pipe.hgetall(prefix + key)
                    case b"kept-sizes":
                        pipe.zrange(prefix + key, 0, -1, withscores=True)
                    case b"kept-total":
                        pipe.get(prefix + key)
                    case _:
                        pipe.exists(prefix + key)
            contents.update(zip(ordered, await pipe.execute(), strict=True))
        for key, content in contents.items():
            kind, _, rest = key.partition(b":")
            tenant = rest.split(b":")[0]
            if kind in (b"kept", b"turn"):
                assert int(content[b"n"]) >= len(content[b"data"])
                found[tenant.decode()] += int(content[b"n"])
                before = content[b"turn"] if kind == b"kept" else content[b"before"]
                if before:
                    refs[b"turn:" + tenant + b":" + before] += 1
            if kind in (b"item", b"kept-order"):
                for stored_id in content:
                    assert b"kept:" + tenant + b":" + stored_id in keys
        for key, content in contents.items():
            if key.startswith(b"turn:"):
                assert int(content[b"refs"]) == refs.pop(key)
        assert not refs
        counted = contents.get(b"kept-sizes", [])
        assert {name.decode(): int(n) for name, n in counted} == dict(found)
        assert int(contents.get(b"kept-total", 0)) == found.total()
        return found

    return await store.call(read)


async def test_all_that_is_kept_is_found_by_another_front(redis: RedisServer) -> None:
    image = PlacedImage(0, Image("sha256:" + "0" * 64, "image/png", bytes(range(256))))
    asked = Message("user", "x", images=(image,))
    steps: tuple[Step, ...] = (
        asked,
        Message("tool", "y", tool_call_id="c", name="f"),
        CalledTool("c", "f", "{}"),
        Reasoning(""),
        Reasoning("so"),
    )
    items = tuple(Item.made(f"i{n}", {"n": n}, step) for n, step in enumerate(steps))
    log = EventLog()
    log.add(b"data: 1\n\ndata: 2\n\n")
    log.end()
    first = StoredResponse("r1", b"{}", History(None, (asked,)), items[:2], items[2:], True, log)
    second = StoredResponse("r2", b"[]", History(first.history, (Message("user", "z"),)), (), ())
    talk = StoredConversation("c1", 7, {"a": "b"}, items, (asked,), sum(one.num_bytes for one in items))
    async with shared_store(redis) as here, shared_store(redis, here.prefix) as there:
        writer, reader = (SharedResponses(SharedEntries(store, "r", 10**6, 60)) for store in (here, there))
        for stored in (first, second, talk):
            assert await writer.add("ann:x", stored)
        found = await reader.find("ann:x", "r2", to_continue=True)
        assert found is not None
        assert found.history is not None
        assert found.history.messages() == [asked, Message("user", "z")]
        again = await reader.find("ann:x", "r1")
        assert again is not None
        assert again.events is not None
        assert [some async for some in again.events.since(1)] == [b"data: 2\n\n"]
        assert (again.body, again.items, again.is_background) == (b"{}", items, True)
        assert await reader.find_conversation("ann:x", "c1") == talk
        assert await reader.find_items("ann:x", ["i1", "i4", "no"]) == {"i1": items[1], "i4": items[4]}
        for other in ("ann", "x", ""):
            assert await reader.find(other, "r2") is None
            assert not await reader.delete(other, "r2")
            assert await reader.find_items(other, ["i1"]) == {}
        assert await reader.find_conversation("ann:x", "r1") is None
        assert await reader.find("ann:x", "c1") is None
        # A turn of a shared history goes with the last response that has it.
        assert await reader.delete("ann:x", "r1")
        found = await writer.find("ann:x", "r2", to_continue=True)
        assert found is not None
        await audit(here)
        third = StoredResponse("r3", b"", History(found.history, ()), (), ())
        assert await reader.delete("ann:x", "r2")
        assert await reader.add("ann:x", third)  # its history had gone: it has all of it
        found = await writer.find("ann:x", "r3", to_continue=True)
        assert found is not None
        assert found.history is not None
        assert len(found.history.messages()) == 2
        await audit(here)
        for stored_id in ("r3", "c1"):
            assert await writer.delete("ann:x", stored_id)
        assert not await audit(here)


@pytest.mark.parametrize("seed", range(2))
async def test_counters_equal_the_stored_entries(redis: RedisServer, seed: int) -> None:
    chance = random.Random(seed)
    async with shared_store(redis) as store:
        responses = SharedResponses(SharedEntries(store, "r", MOST_BYTES, 60))
        latest: dict[str, History | None] = {}
        newest: tuple[str, str] | None = None
        for number in range(80):
            tenant = chance.choice(["", "ann", "b:ob"])
            match chance.randrange(4):
                case 0 | 1:
                    before = latest.get(tenant) if chance.random() < 0.7 else None
                    items = tuple(item(f"i{chance.randrange(9)}") for _ in range(chance.randrange(3)))
                    made = response(f"r{chance.randrange(60)}", "x" * chance.randrange(4_000), before, items)
                    if await responses.add(tenant, made):
                        latest[tenant], newest = made.history, (tenant, made.id)
                case 2:
                    items = (item(f"i{number % 9}"),)
                    talk = StoredConversation(f"c{chance.randrange(3)}", 0, {}, items, (), 0)
                    if await responses.add(tenant, talk):
                        newest = (tenant, talk.id)
                case _:
                    deleted = f"r{chance.randrange(60)}"
                    await responses.delete(tenant, deleted)
                    newest = None if newest == (tenant, deleted) else newest
            found = await audit(store)
            assert found.total() <= MOST_BYTES
            if newest is not None:
                name, stored_id = newest
                is_there = await responses.find(name, stored_id, to_continue=True)
                assert is_there or await responses.find_conversation(name, stored_id)


async def test_the_oldest_of_the_tenant_with_the_most_goes_first(redis: RedisServer) -> None:
    async with shared_store(redis) as store:
        responses = SharedResponses(SharedEntries(store, "r", 20_000, 60))
        assert await responses.add("bob", StoredResponse("small", b"", None, (), ()))
        for n in range(8):
            assert await responses.add("ann", StoredResponse(f"r{n}", b"x" * 4_000, None, (), ()))
        assert [n for n in range(8) if await responses.find("ann", f"r{n}")] == [4, 5, 6, 7]
        assert await responses.find("bob", "small")
        assert not await responses.add("bob", StoredResponse("large", b"x" * 20_000, None, (), ()))
        assert await responses.add("bob", StoredConversation("c", 0, {}, (), (), 0))
        grown = StoredConversation("c", 0, {"a": "x" * 20_000}, (), (), 0)
        with pytest.raises(TooLargeToKeep):
            await responses.change("bob", "c", lambda found: grown)


async def test_expired_entries_are_neither_found_nor_kept(redis: RedisServer) -> None:
    async with shared_store(redis) as store:
        brief = SharedResponses(SharedEntries(store, "r", 10**6, 0.001))
        assert await brief.add("ann", response("r", "x", None, (item("i"),)))
        with anyio.fail_after(5):
            while await brief.find("ann", "r"):
                await anyio.lowlevel.checkpoint()
        assert await brief.find_items("ann", ["i"]) == {}
        await brief._entries.drop_expired()
        assert not await audit(store)


async def test_one_script_drops_few_of_many_that_have_expired(redis: RedisServer) -> None:
    async with shared_store(redis) as store:
        entries = SharedEntries(store, "r", 10**9, 60)
        for tenant in ("ann", "bob"):
            for number in range(400):
                await entries.add(tenant, str(number), b"")

        async def expire(client: Any) -> None:
            for tenant in ("ann", "bob"):
                key = store.key("r:kept-order", tenant)
                await client.zadd(key, {str(number): 0 for number in range(400)})

        async def left(client: Any) -> int:
            return sum([await client.zcard(store.key("r:kept-order", name)) for name in ("ann", "bob")])

        await store.call(expire)
        assert await entries._run(_SWEEP)
        assert await store.call(left) == 300
        await entries.drop_expired()
        assert not await audit(store)


@pytest.mark.parametrize("has_room", [True, False])
async def test_the_cost_of_an_entry_does_not_grow_with_the_tenants(
    redis: RedisServer, has_room: bool
) -> None:
    async with shared_store(redis) as store:

        async def num_commands() -> int:
            stats = await store.call(lambda client: client.info("commandstats"))
            return sum([command["calls"] for command in stats.values()])

        async def cost(num_tenants: int) -> int:
            most_bytes = 10**9 if has_room else num_tenants * ENTRY_BYTES
            entries = SharedEntries(store, f"of-{num_tenants}", most_bytes, 60)
            for number in range(num_tenants):
                await entries.add(f"tenant {number}", "1", b"")
            before = await num_commands()
            await entries.add("ann", "1", b"")
            await entries.delete("ann", "1")
            return await num_commands() - before

        assert await cost(5) == await cost(50)


async def test_changes_of_several_fronts_are_all_kept(redis: RedisServer) -> None:
    async with shared_store(redis) as here, shared_store(redis, here.prefix) as there:
        fronts = [SharedResponses(SharedEntries(store, "r", 10**6, 60)) for store in (here, there)]
        await fronts[0].add("ann", StoredConversation("c", 0, {}, (), (), 0))

        async def append(number: int) -> None:
            def change(found: StoredConversation) -> StoredConversation:
                items = (*found.items, item(f"i{number}"))
                return StoredConversation("c", 0, {}, items, (), sum(one.num_bytes for one in items))

            assert await fronts[number % 2].change("ann", "c", change)

        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(append, number)
        found = await fronts[0].find_conversation("ann", "c")
        assert found is not None
        assert {one.id for one in found.items} == {f"i{number}" for number in range(12)}
        assert await fronts[0].change("ann", "no", lambda found: found) is None


@pytest.mark.parametrize("is_followed", [False, True])
async def test_f37_a_change_whose_answer_is_lost_is_made_once(redis: RedisServer, is_followed: bool) -> None:
    async with shared_store(redis) as here, shared_store(redis, here.prefix) as there:
        fronts = [SharedResponses(SharedEntries(store, "r", 10**6, 60)) for store in (here, there)]
        await fronts[0].add("ann", StoredConversation("c", 0, {}, (), (), 0))

        def append(found: StoredConversation) -> StoredConversation:
            items = (*found.items, item("i"))
            return StoredConversation("c", 0, {}, items, (), sum(one.num_bytes for one in items))

        async def change_elsewhere() -> None:
            if is_followed:
                await fronts[1].change("ann", "c", lambda found: replace(found, metadata={"a": "b"}))

        with lost_answer(here, _ADD, change_elsewhere):
            changed = await fronts[0].change("ann", "c", append)
        found = await fronts[1].find_conversation("ann", "c")
        assert found == changed
        assert [one.id for one in found.items] == ["i"]
        assert found.metadata == ({"a": "b"} if is_followed else {})


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 9_999, b"{}", b"\x81\xa4type\xa8response"])
async def test_a_foreign_value_is_not_found(redis: RedisServer, data: bytes) -> None:
    async with shared_store(redis) as store:
        responses = SharedResponses(SharedEntries(store, "r", 10**6, 60))
        assert await responses.add("ann", response("r", "x", None, (item("i"),)))
        await store.call(lambda client: client.hset(store.key("r:kept", "ann", "r"), "data", data))
        assert await responses.find("ann", "r") is None
        assert await responses.find_items("ann", ["i"]) == {}
        assert await responses.delete("ann", "r")


@pytest.mark.parametrize(("size", "num_items"), [(0, 0), (0, 5), (3_000, 2)])
async def test_bytes_are_those_that_redis_uses(redis: RedisServer, size: int, num_items: int) -> None:
    async with shared_store(redis) as store:
        responses = SharedResponses(SharedEntries(store, "r", 10**9, 60))
        for n in range(50):
            items = tuple(item(f"{n}-{i}") for i in range(num_items))
            await responses.add("ann", response(f"resp_{n:048}", "x" * size, None, items))

        async def used(client: Any) -> int:
            keys = [key async for key in client.scan_iter(store.prefix + "*", count=1_000)]
            return sum([await client.memory_usage(key, samples=0) for key in keys])

        counted = (await audit(store)).total()
        assert 0.6 * counted < await store.call(used) < 1.4 * counted
