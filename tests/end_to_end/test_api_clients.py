"""OpenAI's and Anthropic's client, and the default model on ``agentflow serve``: they receive what a session
receives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import anyio
import openai
import pydantic
import pytest

import agentflow as af

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
SYSTEM = "You answer in short sentences."
QUESTION = "What do plants need?"
QUESTIONS: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]
MESSAGES: Any = [{"role": "system", "content": SYSTEM}, *QUESTIONS]
NUM_TOKENS = 32
ASK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": NUM_TOKENS,
    "system": SYSTEM,
    "messages": QUESTIONS,
    "extra_body": {"temperature": 0},
}


@af.program
async def ask(s: af.State) -> str:
    s += af.system(SYSTEM)
    s += af.user(QUESTION)
    s += af.assistant(af.gen("answer", max_tokens=NUM_TOKENS))
    return await s["answer"]


@pytest.fixture(scope="module")
def in_session(model_url: str) -> str:
    """The answer that a session receives."""

    async def main() -> str:
        async with af.session(model_url) as flow:
            return await flow.run(ask)

    return anyio.run(main)


# OpenAI's API


class Plant(pydantic.BaseModel):
    """A plant in a garden."""

    kind: Literal["tree", "flower", "grass"]
    height_cm: int
    is_evergreen: bool


@pytest.fixture(scope="module")
def by_openai(model_url: str) -> Iterator[openai.OpenAI]:
    base_url = model_url.replace("ws://", "http://") + "/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


def test_openai_the_same_as_a_session(by_openai: openai.OpenAI, in_session: str) -> None:
    common: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
    }
    whole = by_openai.chat.completions.create(**common)
    chunks = list(by_openai.chat.completions.create(**common, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text == in_session
    assert len(text) > 20
    # A chunk for each step, not one for all of it.
    assert len(chunks) > 10


def test_openai_a_typed_answer(by_openai: openai.OpenAI) -> None:
    parsed = by_openai.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe an oak."}],
        response_format=Plant,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(parsed.choices[0].message.parsed, Plant)


def test_openai_a_tool_call(by_openai: openai.OpenAI) -> None:
    whole = by_openai.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Plant an oak in my garden."}],
        tools=[openai.pydantic_function_tool(Plant, name="plant")],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=200,
    )
    [call] = whole.choices[0].message.tool_calls or ()
    assert call.function.name == "plant"
    assert isinstance(call.function.parsed_arguments, Plant)


def test_openai_a_text_and_its_tokens(by_openai: openai.OpenAI) -> None:
    text = "The capital of France is"
    told = by_openai.completions.create(model=MODEL, prompt=text, max_tokens=6, temperature=0, logprobs=2)
    [choice] = told.choices
    assert "Paris" in choice.text
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    tokens = by_openai.post("/tokenize", body={"model": MODEL, "prompt": text}, cast_to=dict[str, Any])
    assert told.usage is not None
    assert tokens["count"] == told.usage.prompt_tokens
    again = by_openai.completions.create(model=MODEL, prompt=tokens["tokens"], max_tokens=6, temperature=0)
    assert again.choices[0].text == choice.text


def test_openai_a_response_in_the_background_and_its_conversation(by_openai: openai.OpenAI) -> None:
    common: Any = {"model": MODEL, "max_output_tokens": 8, "temperature": 0, "instructions": SYSTEM}
    conversation = by_openai.conversations.create(metadata={"topic": "plants"})
    stream = by_openai.responses.create(
        **common, input=QUESTION, conversation=conversation.id, background=True, stream=True
    )
    first: Any = next(iter(stream))
    stream.close()
    assert first.response.status == "queued"
    rest: list[Any] = list(by_openai.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    answered = by_openai.responses.retrieve(first.response.id)
    assert answered.output_text == rest[-1].response.output_text
    assert by_openai.responses.cancel(answered.id).status == answered.status
    [item] = by_openai.responses.input_items.list(answered.id, order="asc")
    assert item.type == "message"
    second = by_openai.responses.create(**common, input="Why?", conversation=conversation.id)
    assert answered.usage is not None
    assert second.usage is not None
    # Except the last generated token, whose KV is not computed before the next turn.
    assert second.usage.input_tokens_details.cached_tokens >= answered.usage.total_tokens - 1
    items = list(by_openai.conversations.items.list(conversation.id, order="asc"))
    assert [getattr(one, "role", None) for one in items] == ["user", "assistant"] * 2
    assert by_openai.conversations.delete(conversation.id).deleted


# Anthropic's API


@pytest.fixture(scope="module")
def by_anthropic(model_url: str) -> Iterator[anthropic.Anthropic]:
    base_url = model_url.replace("ws://", "http://")
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


def prompt_tokens(message: anthropic.types.Message) -> int:
    """All of them, cached or not."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_anthropic_the_same_as_a_session(by_anthropic: anthropic.Anthropic, in_session: str) -> None:
    whole = by_anthropic.messages.create(**ASK)
    with by_anthropic.messages.stream(**ASK) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert text_of(whole) == "".join(pieces) == text_of(final) == in_session
    assert len(text_of(whole)) > 20
    # A piece for each step, not one for all of it.
    assert len(pieces) > 6
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_anthropic_a_prompt_is_counted_as_it_is_used(by_anthropic: anthropic.Anthropic) -> None:
    asked = {name: ASK[name] for name in ("model", "system", "messages")}
    counted = by_anthropic.messages.count_tokens(**asked)
    assert counted.input_tokens == prompt_tokens(by_anthropic.messages.create(**{**ASK, "max_tokens": 1}))


def test_anthropic_the_second_turn_finds_the_first_in_the_cache(
    by_anthropic: anthropic.Anthropic,
) -> None:
    question = {"role": "user", "content": "Name a tree that was not named before."}
    asked = {**ASK, "max_tokens": 6, "messages": [question]}
    first = by_anthropic.messages.create(**asked)
    turns = [question, first.to_param(), {"role": "user", "content": "And another one?"}]
    second = by_anthropic.messages.create(**{**asked, "messages": turns})
    assert first.usage.cache_read_input_tokens < prompt_tokens(first) - 5
    # Except the last generated token, whose KV is not computed before the next turn.
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


def test_anthropic_a_loop_that_must_call_a_tool(by_anthropic: anthropic.Anthropic) -> None:
    runner = by_anthropic.beta.messages.tool_runner(
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
