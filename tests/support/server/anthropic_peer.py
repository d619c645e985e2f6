"""Anthropic's client on a server with the deterministic engine, and the requests that the engine receives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import anyio
from support.api_server import MODEL, ApiServer, api_server
from support.sent_requests import SentRequests
from support.server.http_clients import ClientKind, only_asyncio

HELLO = [{"role": "user", "content": "What do plants do?"}]


@dataclass
class AnthropicPeer:
    """``client`` does not retry."""

    server: ApiServer
    client: anthropic.Anthropic
    requests: SentRequests

    def ask(self, **params: Any) -> Any:
        """``messages.create``, by default for a short deterministic answer."""
        return self.client.messages.create(**asking(**params))

    def called(self, kind: ClientKind, method: str, key: str | None = None, **asked: Any) -> Any:
        """The result of a method of ``client.messages``; for ``stream``, the final message. ``key``: replaces
        the client's."""

        async def call() -> Any:
            async with anthropic.AsyncAnthropic(
                api_key=key or self.client.api_key, base_url=self.server.url, max_retries=0
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


def asking(**params: Any) -> dict[str, Any]:
    """Parameters of a request."""
    extra = {"seed": 3, **params.pop("extra_body", {})}
    return {"model": MODEL, "max_tokens": 12, "messages": HELLO, "extra_body": extra, **params}


@contextmanager
def anthropic_peer(key: str = "any", **options: Any) -> Iterator[AnthropicPeer]:
    """``options``: of ``api_server``. The server is idle at the end."""
    with api_server(**options) as server:
        requests = server.observe_requests()
        with anthropic.Anthropic(api_key=key, base_url=server.url, max_retries=0) as client:
            yield AnthropicPeer(server, client, requests)
        server.assert_idle()
