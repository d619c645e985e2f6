"""Anthropic's client and the default model on ``agentflow serve``: messages, streams, tools and counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import anyio
import pytest
from end_to_end.serving import served

import agentflow as af

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
SYSTEM = "You answer in short sentences."
QUESTION = "What do plants need?"
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 16,
    "system": SYSTEM,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def url(model_folder: object) -> Iterator[str]:
    with served("--dtype", "float32", "--kv-tokens", "4000", "--threads", "2") as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    base_url = url.replace("ws://", "http://")
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


@af.program
async def ask(s: af.State) -> str:
    s += af.system(SYSTEM)
    s += af.user(QUESTION)
    s += af.assistant(af.gen("answer", max_tokens=16))
    return await s["answer"]


def text_of(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


def prompt_tokens(message: anthropic.types.Message) -> int:
    """All of them, cached or not."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_the_same_as_a_session_whole_and_streamed(client: anthropic.Anthropic, url: str) -> None:
    async def in_session() -> str:
        async with af.session(url) as flow:
            return await flow.run(ask)

    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert text_of(whole) == "".join(pieces) == text_of(final) == anyio.run(in_session)
    assert len(text_of(whole)) > 20
    # A piece for each step, not one for all of it.
    assert len(pieces) > 6
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_a_prompt_is_counted_as_it_is_used(client: anthropic.Anthropic) -> None:
    asked = {name: ASK[name] for name in ("model", "system", "messages")}
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == prompt_tokens(client.messages.create(**{**ASK, "max_tokens": 1}))


def test_the_second_turn_finds_the_first_in_the_cache(client: anthropic.Anthropic) -> None:
    question = {"role": "user", "content": "Name a tree that nobody named so far."}
    asked = {**ASK, "max_tokens": 6, "messages": [question]}
    first = client.messages.create(**asked)
    turns = [question, first.to_param(), {"role": "user", "content": "And another one?"}]
    second = client.messages.create(**{**asked, "messages": turns})
    assert first.usage.cache_read_input_tokens < prompt_tokens(first) - 5
    # But for the token that was drawn last, whose KV nobody has needed yet.
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first) + first.usage.output_tokens - 1
    assert second.usage.input_tokens > 0


PLANTED: list[tuple[str, int]] = []


@anthropic.beta_tool
def plant(kind: Literal["oak", "rose", "grass"], count: int) -> str:
    """Plants something in the garden.

    Args:
        kind: What is planted.
        count: How many of them.
    """
    PLANTED.append((kind, count))
    return json.dumps({"planted": count})


def test_a_loop_that_must_call_a_tool(client: anthropic.Anthropic) -> None:
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=100,
        messages=[{"role": "user", "content": "Plant two oaks in my garden, please."}],
        tools=[plant],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        extra_body={"temperature": 0},
    )
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use"] * 2
    calls = [block for message in messages for block in message.content if block.type == "tool_use"]
    assert [call.name for call in calls] == ["plant"] * 2
    assert [(call.input["kind"], call.input["count"]) for call in calls] == PLANTED
    # The call and what came of it stand in the second prompt, after what was computed for the first.
    first, second = (message.usage for message in messages)
    assert second.cache_read_input_tokens > first.input_tokens + first.cache_read_input_tokens
