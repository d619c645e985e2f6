"""Thinking blocks with Anthropic's own client: whole, streamed, under a budget, and sent back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from support.fake_engine import FakeEngine
from support.server.anthropic_peer import AnthropicPeer, anthropic_peer
from support.server.http_clients import CLIENTS, ClientKind, only_asyncio
from support.thinking_models import DEEPSEEK_MODEL, QWEN_MODEL, ThinkingModel

THOUGHTS, ANSWER = "It is a greeting.", "Hello!"
SCRIPT = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"
ASKED: list[Any] = [{"role": "user", "content": SCRIPT}]
ENABLED: Any = {"type": "enabled", "budget_tokens": 1024}
EACH = pytest.mark.parametrize("peer", ["qwen", "deepseek"], indirect=True)

anyio_backend = pytest.fixture(only_asyncio)


def peer_of(model: ThinkingModel) -> Iterator[AnthropicPeer]:
    engine = FakeEngine(runner=model.runner(), tokenizer=model.tokenizer)
    with anthropic_peer(engine=engine, template=model.template) as running:
        yield running
        running.server.assert_idle()


@pytest.fixture(scope="module")
def qwen() -> Iterator[AnthropicPeer]:
    yield from peer_of(QWEN_MODEL)


@pytest.fixture(scope="module")
def deepseek() -> Iterator[AnthropicPeer]:
    yield from peer_of(DEEPSEEK_MODEL)


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> AnthropicPeer:
    return request.getfixturevalue(request.param)


def message(peer: AnthropicPeer, kind: ClientKind = "sync", *, stream: bool = False, **fields: Any) -> Any:
    return peer.message(kind, stream, **{"messages": ASKED, "max_tokens": 200, **fields})


@EACH
@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_a_block_before_the_text(peer: AnthropicPeer, kind: ClientKind, stream: bool) -> None:
    thinking, text = message(peer, kind, stream=stream, thinking=ENABLED).content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", THOUGHTS, ANSWER)
    assert thinking.signature == message(peer, thinking=ENABLED).content[0].signature != ""


@EACH
def test_the_events_of_thoughts(peer: AnthropicPeer) -> None:
    with peer.client.messages.stream(
        model="fake", max_tokens=200, messages=ASKED, thinking=ENABLED
    ) as stream:
        events = [event for event in stream if event.type.startswith("content_block")]
    kinds = [event.delta.type if event.type == "content_block_delta" else event.type for event in events]
    last = kinds.index("signature_delta")
    assert {*kinds[1:last]} == {"thinking_delta"}
    assert kinds[last + 1 : last + 3] == ["content_block_stop", "content_block_start"]
    assert [event.index for event in events] == sorted(event.index for event in events)


@EACH
@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}], ids=["left out", "disabled"])
@pytest.mark.parametrize("stream", [False, True])
def test_without_being_enabled_there_are_no_thoughts(
    peer: AnthropicPeer, thinking: Any, stream: bool
) -> None:
    fields = {} if thinking is None else {"thinking": thinking}
    [text] = message(peer, stream=stream, **fields).content
    assert text.text == ANSWER


@EACH
def test_budgets_and_displays(peer: AnthropicPeer) -> None:
    thinking, text = message(peer, thinking={"type": "enabled", "budget_tokens": 3}).content
    assert THOUGHTS.startswith(thinking.thinking)
    assert thinking.thinking != THOUGHTS
    assert text.text == ANSWER
    for stream in (False, True):
        adaptive = {"type": "adaptive", "display": "omitted"}
        thinking, text = message(peer, stream=stream, thinking=adaptive).content
        assert (thinking.thinking, text.text) == ("", ANSWER)
        assert thinking.signature
    with pytest.raises(anthropic.BadRequestError) as error:
        message(peer, thinking={"type": "enabled"})
    assert error.value.body["error"]["details"]["param"] == "thinking.budget_tokens"  # type: ignore[index,call-overload]


@EACH
def test_thoughts_that_the_limit_cuts(peer: AnthropicPeer) -> None:
    answer = message(peer, thinking=ENABLED, max_tokens=6)
    [thinking] = answer.content
    assert answer.stop_reason == "max_tokens"
    assert THOUGHTS.startswith(thinking.thinking)
    message(peer, messages=[*ASKED, {"role": "assistant", "content": answer.content}, *ASKED])


def test_blocks_that_come_back_are_given_to_the_template(qwen: AnthropicPeer) -> None:
    thoughts = {"type": "thinking", "thinking": "I look.", "signature": "of another server"}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    redacted = {"type": "redacted_thinking", "data": "secret"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "A bear."}]}
    turns: list[Any] = [*ASKED, {"role": "assistant", "content": [thoughts, redacted, call]}, result]
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    message(qwen, messages=turns, tools=tools, max_tokens=2)
    text = QWEN_MODEL.tokenizer.decode(qwen.requests.submits[-1].token_ids)
    assert text.count("<think>\nI look.\n</think>") == 1
    assert "secret" not in text
    count = qwen.client.messages.count_tokens(model="fake", messages=turns, tools=tools)
    assert count.input_tokens == len(qwen.requests.submits[-1].token_ids)
    with pytest.raises(anthropic.BadRequestError):
        message(qwen, messages=[{"role": "user", "content": [thoughts]}])
