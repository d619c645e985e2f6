"""One HTTP request to an API as the ASGI messages of a web server, and the service that answers it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
from support.session_peer import HangingGenerator

from agentflow.server.compatible.error_format import OpenAIErrorFormat
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.http.call import ApiEndpoint, Handler
from agentflow.server.models.models import Models, OneGenerator
from agentflow.server.programs.programs import open_programs
from agentflow.server.responses.background import open_background_runs
from agentflow.server.responses.keeping import LocalResponses
from agentflow.server.responses.store import ResponseStore
from agentflow.server.service import Service
from agentflow.server.tenants.keys import Tenants
from agentflow.server.websocket.sessions import open_sessions

Message = dict[str, Any]


class Exchange:
    """A client's end. ``has_hung_up``: it closes the connection then."""

    def __init__(self, *parts: bytes, headers: dict[str, str] | None = None) -> None:
        self.sent: list[Message] = []
        self.has_hung_up = anyio.Event()
        self.has_answer = anyio.Event()
        self._messages = [
            {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
            for number, part in enumerate(parts)
        ]
        self.headers = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]

    async def receive(self) -> Message:
        if self._messages:
            return self._messages.pop(0)
        await self.has_hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        self.has_answer.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def answer_headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


@asynccontextmanager
async def service(**limits: Any) -> AsyncIterator[Service]:
    async with open_sessions(ServerLimits()) as sessions:
        models = Models([OneGenerator(HangingGenerator())])
        http = HttpLimits(**limits)
        responses = LocalResponses(ResponseStore(http.responses_bytes, http.response_lifetime_s))
        async with open_background_runs(most=1) as background, open_programs(http.programs) as programs:
            yield Service(models, sessions, Tenants(), ServerLimits(), http, background, programs, responses)


async def exchange(
    handler: Handler,
    client: Exchange,
    running: Service | None = None,
    answers: Counter[tuple[str, int]] | None = None,
    **limits: Any,
) -> Exchange:
    """The handler's answer to the client. ``answers``: where it is counted."""
    async with service(**limits) as made:
        state = SimpleNamespace(service=running or made, answers=Counter() if answers is None else answers)
        app = SimpleNamespace(state=state)
        scope = {"type": "http", "method": "POST", "path": "/v1/test", "headers": client.headers, "app": app}
        await ApiEndpoint(handler, OpenAIErrorFormat())(scope, client.receive, client.send)
        assert made.calls.num == 0
    return client
