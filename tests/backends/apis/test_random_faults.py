"""Random programs at the same time on servers with random faults: values are right or fail, and afterwards
nothing runs, waits, is reserved, or holds a connection."""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.fake_server import Answer, AnyAnswer, FakeServer, Hold, RawAnswer, Received, fake_server
from support.apis.hostile_answers import EVENT_STREAM, hostile

import agentflow as af
from agentflow.backends.apis.generation.generator import ApiGenerator
from agentflow.backends.apis.prices import Costs, Spending
from agentflow.errors import AgentflowError
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost

pytestmark = pytest.mark.full

STREAMS: dict[str, Callable[..., Answer]] = {
    "chat": openai_answers.text_stream,
    "responses": responses_answers.text_stream,
    "messages": anthropic_answers.text_stream,
}
MODELS = {"chat": "gpt-4o", "responses": "gpt-4o", "messages": "claude-opus-4-5"}
SHORT = {"retry-after-ms": "1"}


def answer_to(request: Received) -> str:
    """The model: its text depends on the messages alone."""
    fields = request.json
    return f"<{zlib.crc32(json.dumps(fields.get('messages') or fields['input']).encode())}>\n"


def expected(api: str, *turns: tuple[str, str]) -> str:
    """The text of the model after these turns, without its end."""
    has_blocks = api == "messages"
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if has_blocks else text}
        for role, text in turns
    ]
    return f"<{zlib.crc32(json.dumps(messages).encode())}>"


def faulty(events: list[bytes]) -> dict[str, Callable[[], AnyAnswer]]:
    """All ways to spoil an answer, by name."""

    def streamed(*steps: Any, **headers: str) -> Answer:
        return Answer([*steps], headers=headers, content_type=EVENT_STREAM)

    limits = {
        f"x-ratelimit-{part}-requests": value
        for part, value in (("limit", "50"), ("remaining", "0"), ("reset", "1ms"))
    }
    refused = {str(status): partial(Answer, b"{}", status) for status in (400, 402, 500)}
    busy = {str(status): partial(Answer, b"{}", status, SHORT) for status in (429, 503, 529)}
    return {
        **hostile(events),
        **refused,
        **busy,
        "silent": lambda: RawAnswer([Hold()]),
        "falls silent": lambda: streamed(events[0], Hold()),
        "does not end": lambda: streamed(*events, Hold()),
        "limits": lambda: streamed(*events, **limits),
    }


@dataclass(frozen=True)
class Plan:
    """A random case.

    Attributes:
        api: The kind of API.
        faults: Of each request in the order of their arrival; None: it is answered. Later ones are answered.
        max_retries: Of each request.
        hedge_after_s: As of the backend.
        has_fallback: There is a second endpoint.
        ends: How each program ends: it is awaited, cancelled, or left.
    """

    api: str
    faults: list[str | None]
    max_retries: int
    hedge_after_s: float | None
    has_fallback: bool
    ends: list[str]


FAULTS = tuple(faulty([b"", b"", b""]))
PLANS = st.builds(
    Plan,
    st.sampled_from(sorted(STREAMS)),
    st.lists(st.one_of(st.none(), st.sampled_from(FAULTS)), max_size=30),
    st.integers(0, 2),
    st.sampled_from([None, 0.01]),
    st.booleans(),
    st.lists(st.sampled_from(["awaited", "awaited", "cancelled", "left"]), min_size=1, max_size=4),
)


class Kept:
    """A backend whose generator the test looks at."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.generators: list[ApiGenerator] = []

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with self._inner.connect(deliver, lost) as connection:
            generator: Any = connection.generator
            self.generators = getattr(generator, "_candidates", [generator])
            yield connection

    def unfinished(self) -> Iterator[object]:
        """The requests that run or wait, and the connections that are in use."""
        for one in self.generators:
            transport = one._calls.transport
            pool: Any = transport._http
            yield from (one._calls.num_running, transport.pace.num_running, transport.pace._num_waiting)
            yield pool._connections.num_in_use


def backend_of(plan: Plan, url: str) -> Any:
    options: dict[str, Any] = {
        "api_key": "k",
        "max_retries": plan.max_retries,
        "hedge_after_s": plan.hedge_after_s,
        "timeout_s": 0.1,
        "stall_timeout_s": 0.1,
    }
    if plan.api == "messages":
        return af.Anthropic(MODELS["messages"], base_url=url, **options)
    return af.OpenAI(MODELS[plan.api], base_url=f"{url}/v1", api=plan.api, **options)


async def ask(flow: af.Session, plan: Plan, number: int) -> None:
    """One program. Its values are right, or it fails."""
    async with flow.state() as s:
        s += af.user(f"Question {number}?") + af.assistant(af.gen("first", stop="\n", max_tokens=20))
        if plan.ends[number] == "cancelled":
            async for _ in s["first"]:
                break
            s.cancel()
        branches = s.fork(2)
        for branch in branches:
            branch += af.user("More?") + af.assistant(af.gen("more", stop="\n", max_tokens=20))
        if plan.ends[number] == "left":
            await anyio.lowlevel.checkpoint()
            return
        first = await s["first"]
        turns = [("user", f"Question {number}?")]
        assert first == expected(plan.api, *turns)
        turns += [("assistant", first), ("user", "More?")]
        for branch in branches:
            assert await branch["more"] == expected(plan.api, *turns)


async def run(plan: Plan, server: FakeServer) -> None:
    spending = Spending(50.0)
    price = af.Price(input=1.0, output=1.0)
    backend = backend_of(plan, server.url)
    if plan.has_fallback:
        backend = af.Fallback(backend, backend_of(plan, server.url))
    kept = Kept(backend.with_costs(Costs(spending, dict.fromkeys(MODELS.values(), price))))

    async def program(number: int) -> None:
        try:
            await ask(flow, plan, number)
        except* AgentflowError:
            pass

    async with af.session(backend=kept) as flow:
        async with anyio.create_task_group() as group:
            for number in range(len(plan.ends)):
                group.start_soon(program, number)
        with anyio.fail_after(20):
            while any(kept.unfinished()):
                await anyio.lowlevel.checkpoint()
        stats = await flow.stats()
        assert (stats.running, spending.committed) == (0, spending.spent)
        assert stats.cost is not None
        assert stats.cost <= spending.spent + 1e-9


@pytest.mark.timeout(600)
@given(PLANS)
def test_nothing_is_left_behind_after_random_faults(plan: Plan) -> None:
    faults = iter(plan.faults)

    def script(request: Received) -> AnyAnswer:
        text = answer_to(request)
        body = STREAMS[plan.api](text[:3], text[3:]).body
        assert not isinstance(body, bytes)
        events = [step for step in body if isinstance(step, bytes)]
        fault = next(faults, None)
        return Answer(events, content_type=EVENT_STREAM) if fault is None else faulty(events)[fault]()

    async def main() -> None:
        async with fake_server(script) as server:
            await run(plan, server)

    anyio.run(main)
