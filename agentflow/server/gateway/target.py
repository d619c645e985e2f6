"""One server behind the gateway: its address, its health, and its models."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import anyio
import httpx2
import msgspec

from agentflow.errors import BadArgument
from agentflow.protocol.unreadable import UNREADABLE
from agentflow.runtime.circuit import Circuit
from agentflow.server.gateway.cache_size import shown_cache_tokens
from agentflow.server.gateway.defaults import CACHE_TOKENS
from agentflow.server.ollama.request import LATEST

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 5.0
MAX_LIST_BYTES = 4_000_000
MAX_KNOWN_PATHS = 256
CONNECT_TIMEOUT_S = 5.0
HeaderList = list[tuple[bytes, bytes]]


class NotCompatible(Exception):
    """The server answers, but does not have OpenAI's API."""


@dataclass(eq=False)
class Target:
    """A server."""

    number: int  # its place in the list
    base: str  # its address, without ``/v1`` and a slash at the end
    circuit: Circuit = field(default_factory=Circuit)
    models: frozenset[str] | None = None  # their names; None: unknown, because the server does not show them
    cache_tokens: int = CACHE_TOKENS  # the approximate size of its cache
    is_draining: bool = False  # running requests finish, and it gets no new ones
    # Nothing listens at its address, so its sessions have ended. Otherwise, a server that does not answer may
    # still have its sessions.
    is_gone: bool = False
    # The times (``time.monotonic``) until which it asked for a pause, by model: another model has another
    # engine. Empty: the pause after a request for a model that it does not list, which is for all models.
    busy_until_s: dict[str, float] = field(default_factory=dict)
    num_running: int = 0
    num_websockets: int = 0
    why_down: str = ""

    def __post_init__(self) -> None:
        self.origin = httpx2.URL(self.base)
        self.host = self.origin.netloc
        self._urls: dict[bytes, httpx2.URL] = {}

    @property
    def is_up(self) -> bool:
        """Whether the target can get new requests."""
        return self.circuit.is_ready and not self.is_draining

    def pause(self, model: str, pause_s: float) -> None:
        """Records that the target asked for a pause when it got a request for the model."""
        name = model if self.lists_model(model) else ""
        self.busy_until_s[name] = time.monotonic() + pause_s

    def is_busy(self, model: str) -> bool:
        """Whether the target asked for a pause of requests for the model that is not over."""
        return time.monotonic() < max(self.busy_until_s.get(name, 0.0) for name in ("", model))

    def has_model(self, name: str) -> bool:
        """Whether the target has the model, or its models are unknown."""
        return self.models is None or self.lists_model(name)

    def lists_model(self, name: str) -> bool:
        """Whether the target's list has the model, with or without ``LATEST``."""
        return not {name, f"{name}{LATEST}"}.isdisjoint(self.models or ())

    def url(self, raw_path: bytes, query: bytes = b"") -> httpx2.URL:
        """The URL of a path at this target. ``raw_path``: the path as the client sent it."""
        known = None if query else self._urls.get(raw_path)
        if known is None:
            path = self.origin.raw_path.rstrip(b"/") + raw_path
            known = self.origin.copy_with(raw_path=path + b"?" + query if query else path)
            if not query:
                if len(self._urls) >= MAX_KNOWN_PATHS:
                    self._urls.clear()
                self._urls[raw_path] = known
        return known

    async def read_cache_size(self, transport: httpx2.AsyncBaseTransport, api_key: str | None) -> None:
        """Reads the size of the cache from the server's metrics, if they have it."""
        try:
            status, body = await self._fetch(transport, b"/metrics", api_key)
        except (httpx2.HTTPError, TimeoutError):
            return
        found = shown_cache_tokens(body) if status == 200 else None
        self.cache_tokens = found or self.cache_tokens

    async def check(self, transport: httpx2.AsyncBaseTransport, api_key: str | None) -> None:
        """Requests the list of models, which closes or opens the circuit. ``NotCompatible`` if the server
        does not have it."""
        attempt = self.circuit.attempt()
        try:
            status, body = await self._fetch(transport, b"/v1/models", api_key)
        except (httpx2.HTTPError, TimeoutError) as error:
            self.why_down = _why(error)
            self.is_gone = isinstance(error, httpx2.ConnectError)
            attempt.failed(0.0 if self.is_gone else None)
            return
        except BaseException:
            attempt.left()
            raise
        self.is_gone = False
        models = _names(body) if status == 200 else None
        if status >= 500 and status != 501:
            self.why_down = f"answers with the status {status}"  # it loads a model, or drains
        elif status not in (200, 401, 403, 429):
            self.why_down = f"its /v1/models answers with the status {status}"
        elif status == 200 and models is None:
            self.why_down = "its /v1/models is not a list of models"
        else:
            attempt.succeeded()
            self.why_down = ""
            if status != 429:  # a busy server still has its models
                self.models = models
            return
        attempt.failed(0.0)
        if status < 500 or status == 501:
            raise NotCompatible(self.why_down)

    async def _fetch(
        self, transport: httpx2.AsyncBaseTransport, path: bytes, api_key: str | None
    ) -> tuple[int, bytes]:
        headers = {"accept-encoding": "identity"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        request = httpx2.Request("GET", self.url(path), headers=headers)
        with anyio.fail_after(CHECK_TIMEOUT_S):
            return await fetch(transport, request)


async def fetch(transport: httpx2.AsyncBaseTransport, request: httpx2.Request) -> tuple[int, bytes]:
    """Sends a request. Returns the status and the body. ``httpx2.HTTPError`` if the request fails, or the
    body has more than ``MAX_LIST_BYTES`` bytes."""
    response = await transport.handle_async_request(request)
    stream = response.stream
    assert isinstance(stream, httpx2.AsyncByteStream)
    try:
        body = bytearray()
        async for part in stream:
            body += part
            if len(body) > MAX_LIST_BYTES:
                raise httpx2.RemoteProtocolError("the answer is too large")
        return response.status_code, bytes(body)
    finally:
        await stream.aclose()


def _names(body: bytes) -> frozenset[str] | None:
    try:
        items = msgspec.json.decode(body, type=dict[str, Any])["data"]
        return frozenset([str(item["id"]) for item in items])
    except (*UNREADABLE, KeyError, TypeError):
        return None


def _why(error: Exception) -> str:
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return "cannot be reached"
    if isinstance(error, TimeoutError):
        return f"did not answer within {CHECK_TIMEOUT_S:g} s"
    if isinstance(error, httpx2.RemoteProtocolError):
        return f"does not answer with HTTP ({error})"
    return f"does not answer ({error})"


def parse_targets(urls: list[str]) -> list[Target]:
    """The targets at these addresses. ``BadArgument`` for an invalid or repeated address."""
    targets: list[Target] = []
    for url in urls:
        parts = _address(url)
        if parts is None:
            text = f"--to {url!r:.200} is not the address of a server, such as http://127.0.0.1:8000"
            raise BadArgument(text, param="to")
        base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        if base in [target.base for target in targets]:
            raise BadArgument(f"--to {url!r:.200} is given twice", param="to")
        targets.append(Target(len(targets), base))
    if not targets:
        raise BadArgument(
            "the gateway has no servers: give the address of each with --to, such as "
            "`agentflow route --to http://127.0.0.1:8000 --to http://127.0.0.1:8001`",
            param="to",
        )
    return targets


def _address(url: str) -> SplitResult | None:
    """The parts of a server's address; None if it is invalid."""
    try:
        httpx2.URL(url)  # rejects control characters
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, httpx2.InvalidURL):
        return None
    return parts if is_address and not (parts.query or parts.fragment or parts.username) else None
