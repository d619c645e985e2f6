"""A gateway in the test's event loop, before servers that play scripts or run the deterministic engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2
from anyio.abc import SocketStream
from support.apis.fake_server import Answer, AnyAnswer, FakeServer, Received, fake_server

from agentflow.backends.apis.http.connections import Connections
from agentflow.server.gateway.defaults import GatewayLimits
from agentflow.server.gateway.gateway import Gateway
from agentflow.server.gateway.route import running_gateway
from agentflow.server.gateway.target import parse_targets

CHAT = "/v1/chat/completions"
METRICS = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="8192"} 1.0\n'
Play = Callable[[Received], AnyAnswer]


@dataclass
class Routed:
    """A running gateway. ``http``: a client of it. ``fakes``: the scripted servers behind it."""

    url: str
    gateway: Gateway
    http: httpx2.AsyncClient
    fakes: Sequence[FakeServer] = ()

    def asked(self, number: int) -> list[Received]:
        """The requests that a scripted server received from clients."""
        return [one for one in self.fakes[number].received if not is_check(one)]

    async def chat(self, text: str = "hello", headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """A chat completion."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post(CHAT, json=body, headers=headers)

    @asynccontextmanager
    async def sending(self, data: bytes) -> AsyncIterator[SocketStream]:
        """A connection to the gateway, over which these bytes were sent."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        async with await anyio.connect_tcp(host, int(port)) as client:
            await client.send(data)
            yield client


@asynccontextmanager
async def routed(
    urls: Sequence[str], limits: GatewayLimits | None = None, **options: Any
) -> AsyncIterator[Routed]:
    """A gateway before these servers."""
    targets = parse_targets(list(urls))
    gateway = Gateway(targets, Connections(None, 60.0), limits=limits or GatewayLimits(), **options)
    async with (
        running_gateway(gateway) as url,
        httpx2.AsyncClient(base_url=url, timeout=20) as http,
    ):
        yield Routed(url, gateway, http)


@asynccontextmanager
async def routed_fakes(
    *plays: Play, limits: GatewayLimits | None = None, **options: Any
) -> AsyncIterator[Routed]:
    """A gateway before scripted servers. Each has the model ``m`` until its script answers otherwise."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(fake_server(_with_models(play))) for play in plays]
        route = await stack.enter_async_context(routed([fake.url for fake in fakes], limits, **options))
        route.fakes = fakes
        yield route


def is_check(request: Received) -> bool:
    """Whether the gateway itself asks for the models, or for the metrics."""
    return request.path in ("/v1/models", "/metrics") and "via" not in request.headers


def models(*names: str) -> Answer:
    """A list of models."""
    return json_answer({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


def json_answer(value: Any, status: int = 200, **headers: str) -> Answer:
    """An answer with a body of JSON. ``headers``: with underscores for hyphens."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Answer(json.dumps(value).encode(), status, named)


def completion(text: str = "hi", output_tokens: int = 3) -> Answer:
    """A whole chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 5, "completion_tokens": output_tokens, "total_tokens": 5 + output_tokens}
    return json_answer({"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": usage})


def refused(status: int, **headers: str) -> Answer:
    """An error, as OpenAI's API writes it."""
    return json_answer({"error": {"message": "no", "type": "x", "code": f"e{status}"}}, status, **headers)


def _with_models(play: Play) -> Play:
    def answer(request: Received) -> AnyAnswer:
        if is_check(request):
            return Answer(METRICS) if request.path == "/metrics" else models("m")
        return play(request)

    return answer
