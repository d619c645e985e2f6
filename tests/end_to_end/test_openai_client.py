"""OpenAI's client and the default model on ``agentflow serve``: what it says is what a session is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anyio
import openai
import pydantic
import pytest
from end_to_end.serving import served

import agentflow as af

MODEL = "smollm2-135m"
MESSAGES: Any = [
    {"role": "system", "content": "You answer in short sentences."},
    {"role": "user", "content": "What do plants need?"},
]


class Plant(pydantic.BaseModel):
    """A plant in a garden."""

    kind: Literal["tree", "flower", "grass"]
    height_cm: int
    is_evergreen: bool


@pytest.fixture(scope="module")
def url(model_folder: object) -> Iterator[str]:
    with served("--dtype", "float32", "--kv-tokens", "4000", "--threads", "2") as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    base_url = url.replace("ws://", "http://") + "/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


@af.program
async def ask(s: af.State) -> str:
    for message in MESSAGES:
        s += getattr(af, message["role"])(message["content"])
    s += af.assistant(af.gen("answer", max_tokens=32))
    return await s["answer"]


def test_the_same_as_a_session_whole_and_streamed(client: openai.OpenAI, url: str) -> None:
    async def in_session() -> str:
        async with af.session(url) as flow:
            return await flow.run(ask)

    common: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**common)
    chunks = list(client.chat.completions.create(**common, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text == anyio.run(in_session)
    assert len(text) > 20
    # A chunk for each step, not one for all of it.
    assert len(chunks) > 10


def test_a_typed_answer(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe an oak."}],
        response_format=Plant,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(parsed.choices[0].message.parsed, Plant)


def test_a_tool_call(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(
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


def test_a_text_and_its_tokens(client: openai.OpenAI) -> None:
    text = "The capital of France is"
    told = client.completions.create(model=MODEL, prompt=text, max_tokens=6, temperature=0, logprobs=2)
    [choice] = told.choices
    assert "Paris" in choice.text
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    tokens = client.post("/tokenize", body={"model": MODEL, "prompt": text}, cast_to=dict[str, Any])
    assert told.usage is not None
    assert tokens["count"] == told.usage.prompt_tokens
    again = client.completions.create(model=MODEL, prompt=tokens["tokens"], max_tokens=6, temperature=0)
    assert again.choices[0].text == choice.text
