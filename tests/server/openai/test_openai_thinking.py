"""Reasoning models with OpenAI's own client: ``reasoning_content`` whole, streamed and sent back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.server.http_clients import CLIENTS, ClientKind, only_asyncio
from support.server.openai_peer import called
from support.thinking_models import DEEPSEEK_MODEL, QWEN_MODEL, ThinkingModel

THOUGHTS, ANSWER = "It is a greeting.", "Hello!"
SCRIPT = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"
ASKED: list[Any] = [{"role": "user", "content": SCRIPT}]

anyio_backend = pytest.fixture(only_asyncio)


def server_of(model: ThinkingModel) -> Iterator[ApiServer]:
    engine = FakeEngine(runner=model.runner(), tokenizer=model.tokenizer)
    with api_server(engine, template=model.template) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def qwen() -> Iterator[ApiServer]:
    yield from server_of(QWEN_MODEL)


@pytest.fixture(scope="module")
def deepseek() -> Iterator[ApiServer]:
    yield from server_of(DEEPSEEK_MODEL)


def create(server: ApiServer, kind: ClientKind = "sync", **fields: Any) -> Any:
    asked = {"model": MODEL, "messages": ASKED, "temperature": 0, **fields}
    return called(server, kind, "chat.completions.create", **asked)


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("name", ["qwen", "deepseek"])
def test_thoughts_whole_and_streamed(request: pytest.FixtureRequest, name: str, kind: ClientKind) -> None:
    ask = partial(create, request.getfixturevalue(name), kind)
    answer = ask()
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHTS, ANSWER)
    num_thoughts = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < num_thoughts < answer.usage.completion_tokens
    chunks = ask(stream=True, stream_options={"include_usage": True})
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    streamed = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    contents = [delta.content or "" for delta in deltas]
    assert "".join(streamed) == THOUGHTS
    assert "".join(contents) == ANSWER
    assert max(n for n, text in enumerate(streamed) if text) < min(
        n for n, text in enumerate(contents) if text
    )
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == num_thoughts


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"reasoning_effort": "minimal"},
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"thinking_token_budget": 0}},
        {"extra_body": {"thinking_budget": 0}},
    ],
    ids=str,
)
def test_thinking_is_turned_off(qwen: ApiServer, fields: dict[str, Any]) -> None:
    answer = create(qwen, **fields)
    assert answer.choices[0].message.content == ANSWER
    assert not hasattr(answer.choices[0].message, "reasoning_content")


def test_efforts_and_budgets(qwen: ApiServer, deepseek: ApiServer) -> None:
    for server in (qwen, deepseek):
        assert create(server, reasoning_effort="high").choices[0].message.reasoning_content == THOUGHTS
        short = create(server, extra_body={"thinking_token_budget": 3}).choices[0].message
        assert short.content == ANSWER
        assert THOUGHTS.startswith(short.reasoning_content)
        assert short.reasoning_content != THOUGHTS
    # A template without a variable for it: the model is given the end of its thoughts.
    off = create(deepseek, reasoning_effort="none")
    assert off.choices[0].message.content == ANSWER
    assert not hasattr(off.choices[0].message, "reasoning_content")
    with pytest.raises(openai.BadRequestError) as error:
        create(qwen, extra_body={"thinking_token_budget": 3, "thinking_budget": 3})
    assert error.value.param == "thinking_budget"
    with pytest.raises(openai.BadRequestError) as error:
        create(qwen, extra_body={"thinking_token_budget": -1})
    assert error.value.param == "thinking_token_budget"


def test_thoughts_cut_by_the_limit(qwen: ApiServer) -> None:
    answer = create(qwen, max_completion_tokens=5).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("length", "")
    assert THOUGHTS.startswith(answer.message.reasoning_content)
    # The client may send it back.
    create(qwen, messages=[*ASKED, answer.message, *ASKED])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_past_thoughts_are_given_to_the_template(qwen: ApiServer, field: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call], field: THOUGHTS},
        {"role": "tool", "tool_call_id": "c1", "content": "A bear."},
    ]
    requests = qwen.observe_requests()
    create(qwen, messages=turns, max_tokens=2)
    create(qwen, messages=[*turns, *ASKED], max_tokens=2)  # the next turn
    texts = [QWEN_MODEL.tokenizer.decode(submit.token_ids) for submit in requests.submits]
    assert [text.count(f"<think>\n{THOUGHTS}\n</think>\n\n\n<tool_call>") for text in texts] == [1, 0]
