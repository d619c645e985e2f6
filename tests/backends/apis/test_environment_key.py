"""Which servers get the key in AGENTFLOW_API_KEY."""

from __future__ import annotations

from typing import Any

import pytest
from support.apis.fake_server import Answer, AnyAnswer, FakeServer, Received, fake_server

import agentflow as af
from agentflow.backends.apis import environment_key

pytestmark = pytest.mark.anyio
KEY = "af-secret"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of the tests are not of this machine."""
    monkeypatch.setenv("AGENTFLOW_API_KEY", KEY)
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setattr(environment_key, "_is_here", lambda address: False)


@pytest.mark.parametrize(
    ("address", "first", "has_key"),
    [
        ("ws://any.example:1", None, True),
        ("wss://any.example", None, True),
        ("http://first.example:1/v1", "http://first.example:1", True),
        ("http://other.example:1/v1", "http://first.example:1", False),
        ("http://first.example:2/v1", "http://first.example:1", False),
        ("http://ours.example/v1", "http://first.example:1", True),
        ("https://other.example/v1", None, False),
        ("https://first.example:1@other.example/v1", "http://first.example:1", False),
    ],
)
def test_the_key_is_for_known_servers(
    monkeypatch: pytest.MonkeyPatch, address: str, first: str | None, has_key: bool
) -> None:
    monkeypatch.setenv("AGENTFLOW_URL", "ws://ours.example/v1")
    assert environment_key.environment_key(address, first) == (KEY if has_key else None)


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        ("http://127.0.0.1:8410", True),
        ("http://localhost/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://localhost.example/v1", False),
        ("http://10.0.0.1/v1", False),
        ("http://127.0.0.1@other.example/v1", False),
    ],
)
def test_the_key_is_for_this_machine(monkeypatch: pytest.MonkeyPatch, address: str, is_here: bool) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("AGENTFLOW_API_KEY", KEY)
    monkeypatch.delenv("AGENTFLOW_URL", raising=False)
    assert environment_key.environment_key(address) == (KEY if is_here else None)


def serve(request: Received) -> AnyAnswer:
    """One model, on a server of others."""
    return Answer(b'{"object":"list","data":[{"id":"m","owned_by":"vllm"}]}')


def keys_of(server: FakeServer) -> set[str | None]:
    assert server.received
    return {request.headers.get("authorization") for request in server.received}


@pytest.mark.parametrize("kind", ["fallback", "Fallback", "models"])
async def test_other_servers_of_a_session_do_not_get_it(kind: str) -> None:
    async with fake_server(serve) as first, fake_server(serve) as second:
        addresses = [f"{server.url}/v1" for server in (first, second)]
        match kind:
            case "fallback":
                session = af.session(addresses[0], fallback=addresses[1:])
            case "Fallback":
                session = af.session(backend=af.Fallback(*addresses))
            case _:
                session = af.session(models=dict(zip("ab", addresses, strict=True)))
        async with session:
            assert keys_of(first) == {f"Bearer {KEY}"}
            assert keys_of(second) == {None}


async def test_vendors_are_not_the_first_server() -> None:
    models: Any = {"large": "openai:gpt-4.1-mini", "small": ""}
    async with fake_server(serve) as server:
        models["small"] = f"{server.url}/v1"
        async with af.session(models=models):
            assert keys_of(server) == {f"Bearer {KEY}"}
