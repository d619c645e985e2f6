"""Anthropic's own client before a server on the deterministic engine, and what the engine was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import anthropic
import anyio
import anyio.lowlevel
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER
from support.server.http_clients import TLS, ClientKind, only_asyncio

HELLO = [{"role": "user", "content": "What do plants do?"}]


@dataclass
class SentRequests:
    """What the engine was asked."""

    submits: list[Any] = field(default_factory=list)

    def sent(self, submit: Any) -> None:
        self.submits.append(submit)

    def received(self, messages: Any) -> None:
        pass

    @property
    def prompt(self) -> str:
        """Of the latest request."""
        return TOKENIZER.decode(self.submits[-1].token_ids, skip_special=False)


@dataclass
class AnthropicPeer:
    """``client`` never tries again."""

    server: ApiServer
    client: anthropic.Anthropic
    requests: SentRequests

    def ask(self, **params: Any) -> Any:
        """``messages.create``; what is not said is short and the same each time."""
        return self.client.messages.create(**asking(**params))

    def called(self, kind: ClientKind, method: str, key: str | None = None, **asked: Any) -> Any:
        """What a method of ``client.messages`` gives: of ``stream`` the message at its end. ``key``: another
        one than the client has."""

        async def call() -> Any:
            http_client = anthropic.DefaultAsyncHttpxClient(verify=TLS)
            async with anthropic.AsyncAnthropic(
                api_key=key or self.client.api_key,
                base_url=self.server.url,
                max_retries=0,
                http_client=http_client,
            ) as client:
                if method != "stream":
                    return await getattr(client.messages, method)(**asked)
                async with client.messages.stream(**asked) as stream:
                    return await stream.get_final_message()

        if kind == "async":
            return anyio.run(call, backend=only_asyncio())
        messages = self.client.copy(api_key=key or self.client.api_key).messages
        if method != "stream":
            return getattr(messages, method)(**asked)
        with messages.stream(**asked) as stream:
            return stream.get_final_message()

    def message(self, kind: ClientKind, stream: bool, **params: Any) -> Any:
        """As ``ask``: asked for by this client, whole or as a stream."""
        return self.called(kind, "stream" if stream else "create", **asking(**params))

    def until_not_asked(self) -> None:
        """Waits until nobody waits for the engine; the gate may hold it."""
        self.server.call(self._until_not_asked)

    async def _until_not_asked(self) -> None:
        with anyio.fail_after(10):
            while self.server.engine.client.num_calls:
                await anyio.lowlevel.checkpoint()


def asking(**params: Any) -> dict[str, Any]:
    """Parameters of a request."""
    extra = {"seed": 3, **params.pop("extra_body", {})}
    return {"model": MODEL, "max_tokens": 12, "messages": HELLO, "extra_body": extra, **params}


@contextmanager
def anthropic_peer(key: str = "any", **options: Any) -> Iterator[AnthropicPeer]:
    """``options``: of ``api_server``."""
    with api_server(**options) as server:
        requests = SentRequests()
        server.call(server.generator.observe, requests)
        with anthropic.Anthropic(api_key=key, base_url=server.url, max_retries=0) as client:
            yield AnthropicPeer(server, client, requests)
