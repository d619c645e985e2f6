"""Which servers get the key in AGENTFLOW_API_KEY."""

from __future__ import annotations

from typing import Any

import pytest
from support.apis.fake_server import Answer, AnyAnswer, FakeServer, Received, fake_server

import agentflow as af
from agentflow.backends.apis.addresses import api_address, environment_key

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
    ("address", "ours", "has_key"),
    [
        ("https://ours.example/v1", "https://ours.example", True),
        ("https://OURS.example:443/v1", "https://ours.example", True),
        ("https://ours.example/v1", "wss://ours.example", True),
        ("http://ours.example/v1", "ws://ours.example:80", True),
        ("http://ours.example/v1", "https://ours.example", False),
        ("http://ours.example:443/v1", "https://ours.example", False),
        ("https://ours.example/v1", "http://ours.example", False),
        ("https://ours.example:8443/v1", "https://ours.example", False),
        ("http://openai/v1", "openai:gpt-4.1-mini", False),
        ("http://anthropic/v1", "anthropic:claude", False),
        ("https://ours.example:port/v1", "https://ours.example:port/v1", False),
        ("ours.example", "ours.example", False),
    ],
)
def test_the_key_needs_the_same_connection_host_and_port(
    monkeypatch: pytest.MonkeyPatch, address: str, ours: str, has_key: bool
) -> None:
    monkeypatch.setenv("AGENTFLOW_URL", ours)
    assert environment_key.environment_key(address) == (KEY if has_key else None)


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
        urls = [f"{server.url}/v1" for server in (first, second)]
        match kind:
            case "fallback":
                session = af.session(urls[0], fallback=urls[1:])
            case "Fallback":
                session = af.session(backend=af.Fallback(*urls))
            case _:
                session = af.session(models=dict(zip("ab", urls, strict=True)))
        async with session:
            assert keys_of(first) == {f"Bearer {KEY}"}
            assert keys_of(second) == {None}


async def test_vendors_are_not_the_first_server() -> None:
    models: Any = {"large": "openai:gpt-4.1-mini", "small": ""}
    async with fake_server(serve) as server:
        models["small"] = f"{server.url}/v1"
        async with af.session(models=models):
            assert keys_of(server) == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("first", "second"),
    [("openai:gpt-4.1-mini", "http://openai/v1"), ("https://ours.example/v1", "http://ours.example/v1")],
)
def test_a_given_key_is_for_one_server(first: str, second: str) -> None:
    with pytest.raises(af.errors.BadArgument) as raised:
        af.session(models={"large": first, "small": second}, api_key="sk-2")
    assert raised.value.param == "api_key"
    af.session(models={"large": first, "small": first}, api_key="sk-2")


def test_the_key_of_a_vendor_does_not_go_to_a_host_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str | None] = {}

    def record(address: str, api_key: str | None = None, first: str | None = None) -> None:
        given[address] = api_key

    monkeypatch.setattr(api_address, "api_backend", record)
    others = ["http://openai/v1", "openai:gpt-4.1-nano"]
    af.session("openai:gpt-4.1-mini", api_key="sk-2", fallback=others)
    assert given == {"http://openai/v1": None, "openai:gpt-4.1-nano": "sk-2"}
