"""Sessions on servers whose answers are spoiled in any way, over each API: an error, and they go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.apis import anthropic_answers, openai_answers, responses_answers
from support.apis.fake_server import Answer, AnyAnswer, Hold, fake_server
from support.apis.hostile_answers import hostile, slow, written

import agentflow as af
from agentflow.errors import AgentflowError, ServerLost

pytestmark = pytest.mark.anyio

OPTIONS: dict[str, Any] = {"api_key": "sk-1", "max_retries": 0}
BACKENDS: dict[str, Callable[..., Any]] = {
    "chat": lambda url, **options: af.OpenAI("gpt-4o", base_url=f"{url}/v1", **OPTIONS, **options),
    "responses": lambda url, **options: af.OpenAI(
        "gpt-4o", base_url=f"{url}/v1", api="responses", **OPTIONS, **options
    ),
    "messages": lambda url, **options: af.Anthropic("claude-opus-4-5", base_url=url, **OPTIONS, **options),
}


ANSWERS: dict[str, Callable[..., Answer]] = {
    "chat": partial(openai_answers.text_stream, usage=None),
    "responses": responses_answers.text_stream,
    "messages": anthropic_answers.text_stream,
}


def events(api: str, *texts: str) -> list[bytes]:
    """The events of a valid answer."""
    body = ANSWERS[api](*texts).body
    assert not isinstance(body, bytes)
    return [step for step in body if isinstance(step, bytes)]


async def ask(api: str, *script: AnyAnswer, **options: Any) -> list[str | AgentflowError]:
    """The values of a gen for each answer in one session, or its error."""
    found: list[str | AgentflowError] = []
    async with (
        fake_server(script) as server,
        af.session(backend=BACKENDS[api](server.url, **options)) as flow,
    ):
        for _ in script:
            async with flow.state() as s:
                s += af.user("Hi") + af.assistant(af.gen("x"))
                try:
                    found.append(await s["x"])
                except AgentflowError as error:
                    found.append(error)
    return found


@pytest.mark.parametrize("api", BACKENDS)
async def test_hostile_answers_are_errors_and_the_session_goes_on(api: str) -> None:
    spoiled = hostile(events(api, "a", "b"))
    script = [answer for make in spoiled.values() for answer in (make(), ANSWERS[api]("Hello"))]
    found = await ask(api, *script)
    assert found[1::2] == ["Hello"] * len(spoiled)
    for name, error in zip(spoiled, found[::2], strict=True):
        assert isinstance(error, AgentflowError), (name, error)


@pytest.mark.parametrize("api", BACKENDS)
async def test_pieces_of_a_byte(api: str) -> None:
    assert await ask(api, written(events(api, "Grüße 🎉"), 1)) == ["Grüße 🎉"]


@pytest.mark.parametrize("api", BACKENDS)
async def test_a_stream_that_falls_silent_is_lost(api: str) -> None:
    [error] = await ask(api, slow(events(api, "a", "b"), Hold(), after=3), stall_timeout_s=0.05)
    assert isinstance(error, ServerLost)
