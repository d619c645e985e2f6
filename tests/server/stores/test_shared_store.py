"""The connection of a front to Redis: its start, its loss and its return."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.redis_server import RedisServer, redis_server, shared_store
from support.server.http_clients import only_asyncio

from agentflow.errors import BadArgument, Overloaded, ServerError
from agentflow.server.stores.shared import SharedStore

pytestmark = pytest.mark.anyio
PASSWORD = "hunter2hunter2"


anyio_backend = pytest.fixture(only_asyncio)


@pytest.mark.parametrize(
    "url",
    [
        f"http://:{PASSWORD}@host",
        f"redis://:{PASSWORD}@host:port",
        f"redis://:{PASSWORD}@[::1",
        f"redis://:{PASSWORD}@host/0?no_such_option=1",
        "",
    ],
)
def test_an_invalid_url_is_one_error_without_its_password(url: str) -> None:
    with pytest.raises(BadArgument) as caught:
        SharedStore(url)
    assert caught.value.param == "redis_url"
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("name", ["", "A", "a_b", "a--b", "-a", "x" * 64])
def test_names_of_fronts_are_checked(name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        SharedStore("redis://host", front=name)
    assert caught.value.param == "front_name"


def test_a_front_has_another_id_after_a_restart() -> None:
    first, second = (SharedStore("redis://host", front="a") for _ in range(2))
    assert first.front != second.front
    assert first.front.startswith("a-")


async def test_the_start_fails_without_an_answer_or_with_a_wrong_password(tmp_path: Path) -> None:
    def with_password(password: str) -> SharedStore:
        return SharedStore(server.url.replace("127", f":{password}@127", 1))

    with redis_server(tmp_path, "--requirepass", PASSWORD) as server:
        async with with_password(PASSWORD).running():
            pass
        for store in (with_password("wrong"), SharedStore(server.url)):
            with pytest.raises(ServerError) as caught:
                async with store.running():
                    pass
            assert caught.value.param == "redis_url"
        server.stop()
        with pytest.raises(ServerError) as caught:
            async with with_password(PASSWORD).running():
                pass
        assert PASSWORD not in str(caught.value)


async def test_a_lost_store_is_an_error_that_clients_retry_until_it_returns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server(tmp_path) as server, caplog.at_level(logging.INFO):
        async with shared_store(server) as store:
            await store.call(lambda client: client.set(store.key("a", "b"), 1))
            server.stop()
            for _ in range(3):
                with pytest.raises(Overloaded) as caught:
                    await store.call(lambda client: client.get(store.key("a", "b")))
                assert caught.value.retry_after_s
            with pytest.raises(Overloaded):
                store.check_answers()
            server.start()
            assert await store.call(lambda client: client.get(store.key("a", "b"))) is None
            store.check_answers()
    ours = [record for record in caplog.records if record.name.endswith("stores.shared")]
    assert [record.levelname for record in ours] == ["ERROR", "INFO"]


async def test_a_script_on_a_foreign_value_fails_without_being_a_loss(redis: RedisServer) -> None:
    async with shared_store(redis) as store:
        key = store.key("list", "a")
        await store.call(lambda client: client.set(key, "text"))
        with pytest.raises(Overloaded):
            await store.run("return redis.call('LLEN', KEYS[1])", [key], [])
        store.check_answers()
