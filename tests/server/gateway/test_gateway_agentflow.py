"""The gateway before agentflow's own servers, with the real clients: OpenAI's, Anthropic's, and sessions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import anyio
import httpx2
import msgspec
import openai
import pytest
import torch
from support.api_server import MODEL, VENDOR, ApiServer, api_server
from support.engine.adapters import write_plain_adapter
from support.fake_engine import FakeEngine
from support.redis_server import RedisServer
from support.server.gateways import Routed, routed
from support.server.http_clients import only_asyncio
from support.tcp_proxy import proxied

import agentflow as af
from agentflow.backends.remote import Remote
from agentflow.protocol.wire import VERSION, Hello, Welcome
from agentflow.server.gateway.defaults import GatewayLimits
from agentflow.server.stores.shared import SharedStore
from agentflow.server.tenants.keys import Tenants

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
anyio_backend = pytest.fixture(only_asyncio)
# No check changes what a test says about a target.
UNCHECKED = GatewayLimits(check_s=1e6)
LONG = "These are the rules of the game, which everybody knows. " * 12


@contextmanager
def two_servers(*keys: str) -> Iterator[list[ApiServer]]:
    """Two servers with the same keys, which do not know each other's tickets."""
    with ExitStack() as stack:
        options = [{"tenants": Tenants(keys)} if keys else {} for _ in range(2)]
        yield [stack.enter_context(api_server(FakeEngine(), **some)) for some in options]


@asynccontextmanager
async def before(servers: list[ApiServer], **options: Any) -> AsyncIterator[Routed]:
    async with routed([f"{server.url}/v1" for server in servers], **options) as route:
        yield route


def client_of(route: Routed, key: str = "unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{route.url}/v1", api_key=key, max_retries=0)


async def ask(client: openai.AsyncOpenAI, text: str, **fields: Any) -> Any:
    return await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=8, **fields
    )


async def test_openais_client_gets_the_same_answers_as_from_a_server() -> None:
    with two_servers() as servers:
        async with before(servers) as route, client_of(route) as client:
            direct = openai.AsyncOpenAI(base_url=f"{servers[0].url}/v1", api_key="unused")
            async with direct:
                for text in ("one", "two"):
                    [got, expected] = [await ask(one, text, seed=3) for one in (client, direct)]
                    assert got.choices == expected.choices
                    assert got.usage.completion_tokens == expected.usage.completion_tokens
                    stream = await ask(client, text, seed=3, stream=True)
                    parts = [event.choices[0].delta.content or "" async for event in stream]
                    assert "".join(parts) == expected.choices[0].message.content
            assert [model.id async for model in client.models.list()] == [MODEL]
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, "x", top_p=5)
            assert caught.value.param == "top_p"
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(
                    model="other", messages=[{"role": "user", "content": "x"}]
                )


MESSAGES = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 1}},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 1}},
}


@pytest.mark.parametrize(
    ("is_up", "listed", "may_come_back"),
    [
        (True, {MODEL}, False),
        (True, None, False),  # it shows no models, and can be asked
        (False, {MODEL}, False),
        (False, {MODEL, "other"}, True),
        (False, None, True),
    ],
)
async def test_f37_an_unknown_model_is_not_found_unless_a_server_that_may_have_it_is_down(
    is_up: bool, listed: set[str] | None, may_come_back: bool
) -> None:
    with two_servers() as servers:
        async with before(servers, limits=UNCHECKED) as route:
            target = route.gateway.targets[1]
            target.models = None if listed is None else frozenset(listed)
            if not is_up:
                target.circuit.attempt().failed(0.0)
            for path, fields in ASKED.items():
                got = await route.http.post(path, json={"model": "other", **fields})
                expected = 404 if not may_come_back else 529 if path == "/v1/messages" else 503
                code = "no_target" if may_come_back else "model_not_found"
                assert (got.status_code, code in got.text) == (expected, True), (path, got.text)
                assert ("retry-after" in got.headers) == may_come_back
                assert (await route.http.post(path, json={"model": MODEL, **fields})).status_code == 200
            got = await route.http.post("/api/chat", json={"model": f"{MODEL}:latest", **ASKED["/api/chat"]})
            assert (got.status_code, got.headers["x-agentflow-target"]) == (200, "0")
            shown = await route.http.get("/v1/models/other")
            assert shown.status_code == (503 if may_come_back else 404)


async def test_anthropics_client() -> None:
    with two_servers() as servers:
        async with (
            before(servers) as route,
            anthropic.AsyncAnthropic(base_url=route.url, api_key="unused") as client,
        ):
            asked: Any = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
            asked["extra_body"] = {"temperature": 0}
            message = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                assert (await stream.get_final_message()).content[0].text == message.content[0].text  # type: ignore[union-attr]
            assert [model.id async for model in client.models.list()] == [MODEL]
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**asked | {"extra_body": {"top_p": 9}})


async def test_the_keys_of_clients_reach_the_servers() -> None:
    with two_servers("right") as servers:
        async with before(servers) as route, client_of(route, "right") as client:
            assert (await ask(client, "hello")).usage.completion_tokens > 0
            assert [model.id async for model in client.models.list()] == [MODEL]
            async with client_of(route, "wrong") as stranger:
                with pytest.raises(openai.AuthenticationError):
                    await ask(stranger, "hello")
                with pytest.raises(openai.AuthenticationError):
                    await stranger.models.list()


async def test_prefixes_are_computed_on_one_server() -> None:
    with two_servers() as servers:
        async with before(servers) as route, client_of(route) as client:
            for number in range(6):
                got = await ask(client, f"{LONG}{number}")
                assert number == 0 or got.usage.prompt_tokens_details.cached_tokens > len(LONG) // 2
        computed = sorted(server.stats().computed_tokens for server in servers)
        assert computed[0] == 0


async def test_responses_go_on_where_they_are_stored() -> None:
    with two_servers() as servers:
        async with before(servers) as route, client_of(route) as client:
            latest = [
                await client.responses.create(model=MODEL, input=f"{number} {LONG}", max_output_tokens=4)
                for number in range(4)
            ]
            for response in latest:
                more = await client.responses.create(
                    model=MODEL, input="more", previous_response_id=response.id, max_output_tokens=4
                )
                assert more.usage is not None
                assert more.usage.input_tokens > len(LONG) // 2
                assert (await client.responses.retrieve(more.id)).id == more.id
            route.gateway.placement._owners.clear()
            for response in latest:
                assert (await client.responses.retrieve(response.id)).id == response.id
                await client.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(latest[0].id)


async def test_a_stream_is_cancelled_on_the_server_when_its_client_leaves() -> None:
    with two_servers() as servers:
        async with before(servers[:1]) as route, client_of(route) as client:
            servers[0].call(servers[0].engine.gate.allow, 3)
            stream = await ask(client, "hello", stream=True, seed=3)
            async for _ in stream:
                break
            await stream.close()
            servers[0].call(servers[0].engine.gate.open)
            servers[0].wait_until(lambda: not servers[0].service.calls.num)
        servers[0].assert_idle()


async def test_sessions_pass_through() -> None:
    with two_servers() as servers:
        async with before(servers) as route:
            async with af.session(route.url.replace("http", "ws")) as flow:
                state = flow.state()
                state += af.user("hello")
                state += af.assistant(af.gen("x", max_tokens=6))
                assert isinstance(await state["x"], str)
                assert sum(target.num_websockets for target in route.gateway.targets) == 1
            with anyio.fail_after(10):
                await route.gateway.until_idle()
            assert sum(target.num_websockets for target in route.gateway.targets) == 0


@contextmanager
def servers_of_two_models() -> Iterator[list[ApiServer]]:
    """Only the second server has the model ``vendor``."""
    with ExitStack() as stack:
        plain = stack.enter_context(api_server(FakeEngine(), tenants=Tenants(["right"])))
        vendor = af.OpenAI("gpt-4.1-mini", base_url="http://127.0.0.1:9/v1", api_key="k")
        yield [
            plain,
            stack.enter_context(api_server(FakeEngine(), tenants=Tenants(["right"]), vendor=vendor)),
        ]


async def test_f37_a_session_is_opened_where_its_model_is() -> None:
    with servers_of_two_models() as servers:
        async with before(servers, api_key="right", limits=UNCHECKED) as route:
            first, second = route.gateway.targets
            url = route.url.replace("http", "ws")
            for model, target in ((VENDOR, second), (MODEL, first), (None, first)):
                second.num_websockets += 10  # the first one is chosen if it can be
                async with af.session(url, model=model, api_key="right") as flow:
                    assert flow.capabilities.model == (model or MODEL)
                    assert target.num_websockets == (11 if target is second else 1)
                second.num_websockets -= 10
                with anyio.fail_after(10):
                    await route.gateway.until_idle()
            with pytest.raises(af.errors.UnknownModel):
                async with af.session(url, model="other", api_key="right"):
                    pytest.fail("it is open")
            second.circuit.attempt().failed(0.0)
            with pytest.raises((af.errors.Overloaded, af.errors.ServerUnreachable)):
                async with af.session(url, model=VENDOR, api_key="right"):
                    pytest.fail("it is open")


async def test_f37_an_adapter_called_latest_is_not_its_model(tmp_path: Path) -> None:
    """Only the second server has it."""
    adapter = write_plain_adapter(tmp_path, {"q_proj.lora_A": torch.ones(4, 8)})
    bearer, name = {"authorization": "Bearer right"}, f"{MODEL}:latest"
    with (
        api_server(FakeEngine(), tenants=Tenants(["right"])) as one,
        api_server(FakeEngine(), tenants=Tenants(["right"])) as other,
    ):
        loaded = httpx2.post(
            f"{other.url}/v1/load_lora_adapter",
            json={"lora_name": "latest", "lora_path": str(adapter)},
            headers=bearer,
        )
        assert loaded.status_code == 200
        async with before([one, other], api_key="right", limits=UNCHECKED) as route:
            second = route.gateway.targets[1]
            second.num_websockets += 10  # the first one is chosen if it can be
            for model, number in ((name, "1"), (MODEL, "0")):
                async with af.session(route.url.replace("http", "ws"), model=model, api_key="right") as flow:
                    assert flow.capabilities.model == model
                ticket = await route.http.post(f"/v1/session-ticket?model={model}", headers=bearer)
                assert ticket.headers["x-agentflow-target"] == number
            chat = {"model": name, **ASKED["/api/chat"]}
            for _ in range(3):
                answer = await route.http.post("/api/chat", json=chat, headers=bearer)
                assert answer.headers["x-agentflow-target"] == "1"


async def test_f37_a_ticket_is_issued_where_the_model_is() -> None:
    with servers_of_two_models() as servers:
        async with before(servers, api_key="right") as route:
            second = route.gateway.targets[1]
            second.num_websockets += 10
            for query, number in (("", "0"), (f"?model={MODEL}", "0"), (f"?model={VENDOR}", "1")):
                got = await route.http.post(
                    f"/v1/session-ticket{query}", headers={"authorization": "Bearer right"}
                )
                assert got.headers["x-agentflow-target"] == number


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_session_goes_on_at_its_server_after_a_broken_connection(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    prefix = f"{secrets.token_hex(8)}:"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                api_server(
                    FakeEngine(),
                    shared=SharedStore(redis.url, prefix=prefix, front=name) if is_shared else None,
                )
            )
            for name in "ab"
        ]
        async with (
            before(servers) as route,
            proxied(int(route.url.rpartition(":")[2])) as proxy,
            af.session(proxy.url) as flow,
        ):
            state = flow.state()
            state += "hello" + af.gen("x", max_tokens=4)
            before_text = await state["x"]
            [own] = [target for target in route.gateway.targets if target.num_websockets]
            own.num_websockets += 10  # a session that is not known would go to the other one
            if is_shared:  # as if the gateway had been restarted: the other server refuses the session
                placement = route.gateway.placement
                placement._sessions.clear()
                monkeypatch.setattr(placement, "own", lambda *_, **__: None)
            proxy.current.up = 0
            state += af.gen("y", max_tokens=4)
            assert isinstance(await state["y"], str)
            assert await state["x"] == before_text
            assert proxy.num_connections == 2
            own.num_websockets -= 10


async def test_a_websocket_that_a_server_refuses() -> None:
    with two_servers("right") as servers:
        async with before(servers) as route:
            with pytest.raises(af.errors.NotAuthorized):
                async with af.session(route.url.replace("http", "ws"), api_key="wrong"):
                    pytest.fail("it is open")


async def test_a_ticket_opens_a_websocket_where_it_was_issued() -> None:
    import websockets

    with two_servers("right") as servers:
        async with before(servers) as route:
            for number in range(4):
                route.gateway.targets[number % 2].num_websockets += 10  # the other one is chosen
                got = await route.http.post("/v1/session-ticket", headers={"authorization": "Bearer right"})
                ticket = got.json()["ticket"]
                route.gateway.targets[number % 2].num_websockets -= 20
                async with websockets.connect(
                    f"{route.url.replace('http', 'ws')}/v1/session",
                    subprotocols=[
                        websockets.Subprotocol(name)
                        for name in ("agentflow.v2", f"agentflow.ticket.{ticket}")
                    ],
                ) as socket:
                    assert socket.subprotocol == "agentflow.v2"
                route.gateway.targets[number % 2].num_websockets += 10


async def test_f37_a_ticket_that_resumes_a_session_is_from_its_server() -> None:
    import websockets

    async def offer(route: Routed, query: str) -> list[websockets.Subprotocol]:
        got = await route.http.post(f"/v1/session-ticket{query}", headers={"authorization": "Bearer right"})
        names = ("agentflow.v2", f"agentflow.ticket.{got.json()['ticket']}")
        return [websockets.Subprotocol(name) for name in names]

    with two_servers("right") as servers:
        async with before(servers) as route:
            url = f"{route.url.replace('http', 'ws')}/v1/session"
            for _ in range(2):
                async with websockets.connect(url, subprotocols=await offer(route, "")) as socket:
                    await socket.send(msgspec.json.encode(Hello(VERSION)).decode())
                    session = msgspec.json.decode(await socket.recv(), type=Welcome).session
                own = route.gateway.placement.owner((session,))
                assert own is not None
                own.num_websockets += 10  # the other server is chosen without the session
                query = f"?session={session}"
                offered = await offer(route, query)
                async with websockets.connect(f"{url}{query}", subprotocols=offered) as socket:
                    assert socket.subprotocol == "agentflow.v2"
                own.num_websockets -= 10


async def test_a_server_that_stops_loses_its_sessions_and_no_others() -> None:
    with ExitStack() as stack:
        stays = stack.enter_context(api_server(FakeEngine()))
        stops = ExitStack()
        gone = stops.enter_context(api_server(FakeEngine()))
        async with before([gone, stays]) as route, client_of(route) as client:
            async with Remote(route.url.replace("http", "ws"), reconnect=False).connect(
                lambda events: None, lambda error: None
            ):
                gone.call(gone.engine.gate.allow, 2)
                route.gateway.targets[1].busy_until_s[""] = 1e12
                stream = await ask(client, "hello", stream=True, seed=3)  # its first token is visible
                assert await anext(stream.__aiter__())
                route.gateway.targets[1].busy_until_s.clear()
                await anyio.to_thread.run_sync(stops.close)
                with pytest.raises(openai.APIError):
                    async for _ in stream:
                        pass
            for number in range(4):
                assert (await ask(client, f"{number} {LONG}")).choices
            assert not route.gateway.targets[0].is_up
