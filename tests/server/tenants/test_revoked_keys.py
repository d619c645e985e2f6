"""A key over a real websocket: it sees its tenant's counters, and keeps its session until it is revoked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.session_errors import HELLO, Session, gen, session, text
from support.session_peer import opened

from agentflow.backends.remote import Remote
from agentflow.errors import BadArgument, NotAuthorized
from agentflow.protocol import ops
from agentflow.server.config.limits import ServerLimits
from agentflow.server.tenants.keys import Tenants, hashed_key

REVOKED = ("1008", "`not_authorized`")


@dataclass
class KeyedServer:
    """A server with a keys file."""

    server: ApiServer
    file: Path

    def allow(self, **keys: Sequence[str]) -> None:
        """Gives these tenants these keys."""
        self.file.write_text(keys_text(**keys))
        self.server.call(self.server.service.reload_tenants)


def keys_text(**keys: Sequence[str]) -> str:
    return "\n".join(
        f"[tenants.{name}]\nkeys = [{', '.join(repr(hashed_key(key)) for key in some)}]"
        for name, some in keys.items()
    )


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[KeyedServer]:
    file = tmp_path / "keys.toml"
    file.write_text(keys_text(ann=["ann-1", "ann-2"], bob=["bob-1"]))
    limits = ServerLimits(resume_grace_s=1e6)
    with api_server(tenants=Tenants(file=file), server_limits=limits, constraints=False) as server:
        yield KeyedServer(server, file)


def goes_on(opened: Session) -> None:
    opened.check_goes_on(1 if opened.number == 1 else opened.number)


def test_a_revoked_key_loses_its_open_websockets(keyed: KeyedServer) -> None:
    with (
        session(keyed.server, key="ann-1") as first,
        session(keyed.server, key="ann-1") as second,
        session(keyed.server, key="ann-2") as other,
        session(keyed.server, key="bob-1") as bob,
    ):
        keyed.allow(ann=["ann-1", "ann-2"], bob=["bob-1"], carl=["carl-1"])
        for one in (first, second, other, bob):
            goes_on(one)
        keyed.allow(ann=["ann-2"], bob=["bob-1"])
        assert first.end() == REVOKED
        assert second.end() == REVOKED
        goes_on(other)
        goes_on(bob)
        keyed.allow(ann=[], bob=["bob-1"])
        assert other.end() == REVOKED
        keyed.allow(ann=["bob-1"], bob=["bob-2"])  # the key is another tenant's
        assert bob.end() == REVOKED


@pytest.mark.anyio
async def test_the_client_of_this_package_raises_it(keyed: KeyedServer) -> None:
    url = keyed.server.url.replace("http", "ws")
    async with opened(Remote(url, api_key="ann-1")) as (connection, listener):
        connection.send([ops.Open(1), ops.Await(1, 1)])
        await anyio.to_thread.run_sync(lambda: keyed.allow(bob=["bob-1"]))
        assert isinstance(await listener.wait_until_lost(), NotAuthorized)


@pytest.mark.parametrize("key", ["ann-1", "bob-1"])
def test_counters_of_the_engine_are_for_keys_that_see_the_metrics(keyed: KeyedServer, key: str) -> None:
    keyed.file.write_text(
        keys_text(ann=["ann-1"]) + "\n" + keys_text(bob=["bob-1"]) + "\nsees_metrics = true"
    )
    keyed.server.call(keyed.server.service.reload_tenants)
    with session(keyed.server, key="ann-1") as ann:
        for number in (1, 2):
            ann.ops({"op": "open", "state": number}, text("Why?", state=number), gen(number, number + 10))
            assert next(event for event in ann.events() if event["event"] == "value")
        with session(keyed.server, key=key) as asking:
            asking.ops({"op": "getstats", "ticket": 1})
            stats = next(event for event in asking.events() if event["event"] == "statsreply")["stats"]
    assert stats["generated_tokens"] == 8
    assert stats["prompt_tokens"] > 0
    of_all = key == "bob-1"
    assert (bool(stats["steps"]), bool(stats["total_slots"])) == (of_all, of_all)


def test_a_file_that_cannot_be_read_revokes_nothing(keyed: KeyedServer) -> None:
    with session(keyed.server, key="ann-1") as ann:
        keyed.file.write_text("[tenants")
        with pytest.raises(BadArgument):
            keyed.server.call(keyed.server.service.reload_tenants)
        goes_on(ann)


def test_a_key_that_is_revoked_before_the_hello_opens_nothing(keyed: KeyedServer) -> None:
    with session(keyed.server, key="ann-1", greets=False) as ann:
        keyed.allow(ann=["ann-2"])
        ann.send(HELLO)
        assert ann.end() == REVOKED
    assert len(keyed.server.service.sessions) == 0


def test_a_session_belongs_to_the_key_that_resumed_it_last(keyed: KeyedServer) -> None:
    with (
        session(keyed.server, key="ann-1") as first,
        session(keyed.server, key="ann-2", greets=False) as second,
    ):
        second.hello(resume=first.to_resume)
        keyed.allow(ann=["ann-2"])
        goes_on(second)
        keyed.allow(ann=["ann-1"])
        assert second.end() == REVOKED


def test_a_session_without_a_websocket_ends_too(keyed: KeyedServer) -> None:
    with session(keyed.server, key="ann-1") as ann:
        ann.socket.socket.close()
    keyed.allow(bob=["bob-1"])
    keyed.server.call(keyed.server.service.sessions.wait_until_empty)


def test_f29c_background_responses_of_a_revoked_key_are_cancelled(keyed: KeyedServer) -> None:
    server = keyed.server
    server.call(server.engine.gate.allow, 0)
    fields = {"model": MODEL, "input": "Why?", "background": True, "max_output_tokens": 4}
    ids = {}
    for key in ("ann-1", "ann-2"):
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx2.post(f"{server.url}/v1/responses", json=fields, headers=headers)
        ids[key] = answer.json()["id"]
    keyed.allow(ann=["ann-2"])
    server.wait_until(lambda: server.service.background.find("ann", ids["ann-1"]) is None)
    assert server.service.background.find("ann", ids["ann-2"]) is not None
    found = server.call(server.service.responses.find, "ann", ids["ann-1"])
    assert found is not None
    assert b'"status":"cancelled"' in found.body
    server.call(server.engine.gate.open)
    server.wait_until(lambda: server.service.background.find("ann", ids["ann-2"]) is None)
