"""Reasoning models with the Responses API: ``reasoning`` items, their events, and later turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.server.http_clients import only_asyncio
from support.server.openai_peer import sync_client
from support.thinking_models import QWEN_MODEL

THOUGHTS, ANSWER = "It is a greeting.", "Hello!"
SCRIPT = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"
CALL_SCRIPT = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
LOOK: Any = {"type": "function", "name": "look"}

anyio_backend = pytest.fixture(only_asyncio)


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    engine = FakeEngine(runner=QWEN_MODEL.runner(), tokenizer=QWEN_MODEL.tokenizer)
    with api_server(engine, template=QWEN_MODEL.template) as running:
        yield running
        running.assert_idle()


def create(server: ApiServer, **fields: Any) -> Any:
    with sync_client(server) as client:
        return client.responses.create(**{"model": MODEL, "input": SCRIPT, **fields})


def test_thoughts_are_an_item_before_the_message(server: ApiServer) -> None:
    answer = create(server, include=["message.output_text.logprobs"])
    thoughts, message = answer.output
    assert (thoughts.type, thoughts.status, thoughts.summary) == ("reasoning", "completed", [])
    assert [part.text for part in thoughts.content] == [THOUGHTS]
    assert answer.output_text == ANSWER
    logprobs = message.content[0].logprobs
    assert "".join(token.token for token in logprobs).strip() == ANSWER
    usage = answer.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_the_events_of_thoughts(server: ApiServer) -> None:
    with sync_client(server) as client, client.responses.stream(model=MODEL, input=SCRIPT) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == ANSWER
    kinds = [event.type.removeprefix("response.") for event in events]
    end = kinds.index("reasoning_text.done")
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert {*kinds[4:end]} == {"reasoning_text.delta"}
    assert kinds[end + 1 : end + 4] == ["content_part.done", "output_item.done", "output_item.added"]
    assert (
        "".join([event.delta for event in events if event.type == "response.reasoning_text.delta"])
        == THOUGHTS
    )
    assert [event.sequence_number for event in events] == [*range(len(events))]


@pytest.mark.parametrize("effort", ["none", "minimal", "high"])
def test_efforts(server: ApiServer, effort: Any) -> None:
    answer = create(server, reasoning={"effort": effort})
    kinds = [item.type for item in answer.output]
    assert kinds == (["reasoning", "message"] if effort == "high" else ["message"])
    assert answer.reasoning.effort == effort


def test_thoughts_that_the_limit_cuts(server: ApiServer) -> None:
    answer = create(server, max_output_tokens=5)
    [thoughts] = answer.output
    assert (answer.status, thoughts.status) == ("incomplete", "incomplete")
    assert THOUGHTS.startswith(thoughts.content[0].text)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_tool_call_keeps_its_thoughts_until_the_next_turn(server: ApiServer, is_stored: bool) -> None:
    first = create(server, input=CALL_SCRIPT, tools=[LOOK])
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    requests = server.observe_requests()
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "A bear."}
    asked: Any = {"role": "user", "content": CALL_SCRIPT}
    before: Any = {} if is_stored else {"store": False}
    items = [result] if is_stored else [asked, *[item.to_dict() for item in first.output], result]
    if is_stored:
        before = {"previous_response_id": first.id}
    second = create(server, input=items, tools=[LOOK], max_output_tokens=40, **before)
    shown = "<|im_start|>assistant\n<think>\nI look.\n</think>"
    decode = QWEN_MODEL.tokenizer.decode
    assert decode(requests.submits[-1].token_ids, skip_special=False).count(shown) == 1
    if is_stored:
        create(server, input="Hello", previous_response_id=second.id, max_output_tokens=2)
        assert shown not in decode(requests.submits[-1].token_ids, skip_special=False)
