"""The gate before requests that share a prefix, and the calls of OpenAI's APIs that pass one."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st
from support.apis import openai_answers, responses_answers
from support.apis.api_sessions import openai_session
from support.apis.fake_server import Answer, Hold, fake_server

import agentflow as af
from agentflow.backends.apis.generation import prefix_gate
from agentflow.backends.apis.generation.prefix_gate import PrefixGate

pytestmark = [pytest.mark.anyio, pytest.mark.on_trio]


class Requests:
    """Requests through one gate, which begin and end as a test says."""

    def __init__(self) -> None:
        self.gate = PrefixGate()
        self.sent: list[int] = []
        self._steps: dict[int, anyio.Event] = {}

    async def run(self, number: int, *, begins: bool = True) -> None:
        async with self.gate.passed() as has_begun:
            self.sent.append(number)
            self._steps[number] = anyio.Event()
            await self._steps[number].wait()
            if begins:
                has_begun()

    async def let(self, number: int) -> None:
        """Lets a request begin, or fail."""
        self._steps[number].set()
        await settled()


async def settled() -> None:
    """Waits until all tasks have run as far as they can."""
    for _ in range(10):
        await checkpoint()


async def test_the_others_wait_for_the_first_answer() -> None:
    requests = Requests()
    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(requests.run, number)
            await settled()
        assert requests.sent == [0]
        await requests.let(0)
        assert sorted(requests.sent) == [0, 1, 2, 3]
        for number in (1, 2, 3):
            await requests.let(number)


async def test_the_next_one_takes_the_place_of_a_first_that_fails() -> None:
    requests = Requests()
    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(lambda number=number: requests.run(number, begins=number != 0))
            await settled()
        await requests.let(0)
        assert len(requests.sent) == 2
        await requests.let(requests.sent[1])
        assert len(requests.sent) == 3
        await requests.let(requests.sent[2])


async def test_a_first_that_is_cancelled_lets_the_next_one_go() -> None:
    requests = Requests()
    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()

        async def first() -> None:
            with scope:
                await requests.run(0)

        for run in (first, lambda: requests.run(1)):
            group.start_soon(run)
            await settled()
        assert requests.sent == [0]
        scope.cancel()
        await settled()
        assert requests.sent == [0, 1]
        await requests.let(1)


async def test_a_prefix_that_is_no_longer_cached_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests()
    async with anyio.create_task_group() as group:
        group.start_soon(requests.run, 0)
        await settled()
        await requests.let(0)
        later = anyio.current_time() + prefix_gate.CACHED_S + 1
        monkeypatch.setattr(prefix_gate.anyio, "current_time", lambda: later)
        for number in (1, 2):
            group.start_soon(requests.run, number)
            await settled()
        assert requests.sent == [0, 1]
        await requests.let(1)
        await requests.let(2)


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_every_request_is_sent(begins: list[bool]) -> None:
    """The prefix gate sends every request, even after failures."""

    async def main() -> None:
        requests = Requests()
        async with anyio.create_task_group() as group:
            for number, does in enumerate(begins):
                group.start_soon(lambda number=number, does=does: requests.run(number, begins=does))
            await settled()
            done: set[int] = set()
            while len(done) < len(begins):
                number = next(sent for sent in requests.sent if sent not in done)
                done.add(number)
                await requests.let(number)
        assert sorted(requests.sent) == list(range(len(begins)))

    anyio.run(main)


LONG = "Plants live on light. " * 400


def held_answer(api: Any, reached: Hold, begun: Hold) -> Answer:
    """An answer that waits before its first piece, and after it."""
    if api == "chat":
        first, *pieces = openai_answers.text_chunks("He", "llo")
        return openai_answers.stream(first, reached, pieces[0], begun, pieces[1:], openai_answers.ending())
    added, *events = responses_answers.message("He", "llo")
    return responses_answers.stream(reached, added, begun, events, responses_answers.ending())


def whole_answer(api: Any) -> Answer:
    return (openai_answers if api == "chat" else responses_answers).text_stream("Hello")


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("prefix", ["Hi", LONG])
async def test_branches_wait_for_the_first_answer_of_openai(api: Any, prefix: str) -> None:
    """Branches wait if the prefix is long enough for the cache."""
    reached, begun = Hold(), Hold()
    script = [held_answer(api, reached, begun), *[whole_answer(api)] * 3]
    async with openai_session(script, api=api) as (flow, server), flow.state() as s:
        s += af.user(prefix)
        branches = s.fork(4)
        for number, branch in enumerate(branches):
            branch += af.user(f"Question {number}") + af.assistant(af.gen("x"))
        await reached.reached.wait()
        if prefix == LONG:
            for _ in range(20):
                await checkpoint()
            assert len(server.received) == 1
        else:
            await server.wait_for_requests(4)
        reached.go_on()
        await server.wait_for_requests(4)
        begun.go_on()
        assert [await branch["x"] for branch in branches] == ["Hello"] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda url: af.OpenAICompatible(url, "m", flavour="vllm"),
        lambda url: af.OpenAI("o3", base_url=url, api_key="sk-1"),  # it would reason before its first piece
    ],
)
async def test_branches_on_other_servers_and_of_hidden_reasoning_do_not_wait(make: Any) -> None:
    reached = Hold()
    script = [openai_answers.stream(reached, openai_answers.text_chunks("a"), openai_answers.ending())] * 3
    async with fake_server(script) as server, af.session(backend=make(server.url)) as flow, flow.state() as s:
        s += af.user(LONG)
        branches = s.fork(3)
        for branch in branches:
            branch += af.user("Hi") + af.assistant(af.gen("x"))
        await server.wait_for_requests(3)
        reached.go_on()
        await branches
