"""Reasoning models over each API: reasoning whole and streamed, turned off, under a budget, and sent back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import FakeEngine
from support.reasoning_models import CHANNEL_MODEL, DEEPSEEK_MODEL, QWEN_MODEL
from support.server.apis import CHAT, MESSAGES, OLLAMA, OLLAMA_TEXT, RESPONSES, Api, ask, events, post
from support.server.openai_peer import sync_client

REASONING, ANSWER = "It is a greeting.", "Hello!"
SCRIPT = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"
CALL_SCRIPT = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
ASKED: list[Any] = [{"role": "user", "content": SCRIPT}]
LOOK = [{"name": "look", "parameters": {"type": "object"}}]
ENABLED: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
# The fields by which reasoning is asked for, where it is not the default.
ON: dict[Api, Any] = {
    CHAT: {},
    RESPONSES: {},
    MESSAGES: ENABLED,
    OLLAMA: {"think": "high"},
    OLLAMA_TEXT: {"think": True},
}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
MODELS = {"qwen": QWEN_MODEL, "deepseek": DEEPSEEK_MODEL}
PREAMBLE = "«channel»commentary«message»I look.«end»«start»assistant"
THINK = f"«channel»analysis«message»{REASONING}«end»«start»assistant"
FINAL = f"«channel»final«message»{ANSWER}"


def over(*apis: Api) -> Any:
    return pytest.mark.parametrize("api", apis, ids=[api.name for api in apis])


def served(name: str) -> Iterator[ApiServer]:
    model = {**MODELS, "channels": CHANNEL_MODEL}[name]
    engine = FakeEngine(runner=model.runner(), tokenizer=model.tokenizer)
    with api_server(engine, template=model.template) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def qwen() -> Iterator[ApiServer]:
    yield from served("qwen")


@pytest.fixture(scope="module")
def channels() -> Iterator[ApiServer]:
    yield from served("channels")


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    yield from served(request.param)


def prompt_text(server: ApiServer, submit: Any) -> str:
    return server.engine.tokenizer.decode(submit.token_ids, skip_special=False)


@STREAMS
@over(*ON)
def test_reasoning_is_separate_from_the_answer(server: ApiServer, api: Api, stream: bool) -> None:
    answer = ask(server, api, SCRIPT, stream=stream, extra=ON[api], temperature=0)
    assert (answer.reasoning, answer.text, answer.reason) == (REASONING, ANSWER, "stop")


@STREAMS
@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"reasoning_effort": "minimal"}),
        (CHAT, {"thinking_token_budget": 0}),
        (CHAT, {"thinking_budget": 0}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (RESPONSES, {"reasoning": {"effort": "minimal"}}),
        (MESSAGES, {}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "omitted"}}),
        (OLLAMA, {"think": False}),
    ],
)
def test_an_answer_without_reasoning(server: ApiServer, api: Api, fields: Any, stream: bool) -> None:
    answer = ask(server, api, SCRIPT, stream=stream, extra=fields, temperature=0)
    assert (answer.reasoning, answer.text) == ("", ANSWER)


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (CHAT, {"enable_thinking": False}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (OLLAMA, {"think": False}),
    ],
)
def test_the_template_closes_the_reasoning(qwen: ApiServer, api: Api, fields: Any) -> None:
    requests = qwen.observe_requests()
    answer = ask(qwen, api, SCRIPT, extra=fields, temperature=0)
    assert (answer.reasoning, answer.text) == ("", ANSWER)
    assert prompt_text(qwen, requests.submits[-1]).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("api", "fields"), [(CHAT, {"reasoning_effort": "high"}), (RESPONSES, {"reasoning": {"effort": "high"}})]
)
def test_a_high_effort(server: ApiServer, api: Api, fields: Any) -> None:
    body = post(server, api, api.body(SCRIPT, extra=fields, temperature=0)).json()
    assert api.whole(body).reasoning == REASONING
    assert body.get("reasoning", {"effort": "high"})["effort"] == "high"


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (CHAT, {"thinking_token_budget": 3}),
        (CHAT, {"thinking_token_budget": 3, "logprobs": True, "top_logprobs": 2}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 3}}),
    ],
)
def test_a_budget_cuts_the_reasoning(server: ApiServer, api: Api, fields: Any) -> None:
    answer = ask(server, api, SCRIPT, extra=fields, temperature=0)
    assert answer.text == ANSWER
    assert REASONING.startswith(answer.reasoning)
    assert answer.reasoning != REASONING


@over(CHAT, RESPONSES, MESSAGES)
def test_reasoning_that_the_limit_cuts_may_be_sent_back(server: ApiServer, api: Api) -> None:
    answer = ask(server, api, SCRIPT, extra=ON[api], max_tokens=6)
    assert (answer.text, answer.reason) == ("", "length")
    assert REASONING.startswith(answer.reasoning)
    assert ask(server, api, [*ASKED, *answer.turns, *ASKED], max_tokens=2).output_tokens == 2


@pytest.mark.parametrize(
    ("api", "total", "details"),
    [
        (CHAT, "completion_tokens", "completion_tokens_details"),
        (RESPONSES, "output_tokens", "output_tokens_details"),
    ],
)
def test_the_tokens_of_reasoning_are_counted(server: ApiServer, api: Api, total: str, details: str) -> None:
    body = api.body(SCRIPT, temperature=0)
    whole = post(server, api, body).json()["usage"]
    assert 0 < whole[details]["reasoning_tokens"] < whole[total]
    options = {"stream_options": {"include_usage": True}} if api is CHAT else {}
    last = list(events(post(server, api, {**body, "stream": True, **options}).text))[-1]
    usage = last.get("response", last)["usage"]
    assert usage[details]["reasoning_tokens"] == whole[details]["reasoning_tokens"]


# The forms of each API


def test_chunks_of_reasoning_come_before_those_of_the_answer(server: ApiServer) -> None:
    chunks = events(post(server, CHAT, {**CHAT.body(SCRIPT, temperature=0), "stream": True}).text)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    kinds = [name for delta in deltas for name in ("reasoning_content", "content") if delta.get(name)]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"reasoning_content", "content"}


def test_a_reasoning_item_comes_before_the_message(qwen: ApiServer) -> None:
    asked: Any = {"model": MODEL, "input": SCRIPT, "include": ["message.output_text.logprobs"]}
    with sync_client(qwen) as client:
        reasoning, message = client.responses.create(**asked).output
        [cut] = client.responses.create(**asked, max_output_tokens=5).output
        with client.responses.stream(model=MODEL, input=SCRIPT) as stream:
            events = list(stream)
    assert (reasoning.type, reasoning.status, reasoning.summary) == ("reasoning", "completed", [])
    assert (cut.type, cut.status) == ("reasoning", "incomplete")
    logprobs = message.content[0].logprobs  # type: ignore[union-attr]
    assert "".join(token.token for token in logprobs or ()).strip() == ANSWER
    kinds = [event.type.removeprefix("response.") for event in events]
    end = kinds.index("reasoning_text.done")
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert {*kinds[4:end]} == {"reasoning_text.delta"}
    assert kinds[end + 1 : end + 4] == ["content_part.done", "output_item.done", "output_item.added"]
    assert [event.sequence_number for event in events] == [*range(len(events))]


def test_a_thinking_block_is_signed(server: ApiServer) -> None:
    with anthropic.Anthropic(api_key="any", base_url=server.url, max_retries=0) as client:
        asked: Any = {"model": MODEL, "max_tokens": 200, "messages": ASKED}
        thinking: Any = client.messages.create(**asked, **ENABLED).content[0]
        with client.messages.stream(**asked, **ENABLED) as events:
            found = [event for event in events if event.type.startswith("content_block")]
            final: Any = events.get_final_message().content[0]
        omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
        hidden: Any = client.messages.create(**asked, **omitted).content[0]
    assert (thinking.type, hidden.thinking) == ("thinking", "")
    assert thinking.signature == final.signature != ""
    assert hidden.signature
    kinds: list[Any] = [
        event.delta.type if event.type == "content_block_delta" else event.type for event in found
    ]
    last = kinds.index("signature_delta")
    assert {*kinds[1:last]} == {"thinking_delta"}
    assert kinds[last + 1 : last + 3] == ["content_block_stop", "content_block_start"]
    assert [event.index for event in found] == sorted(event.index for event in found)


def test_ollama_lists_the_capability(server: ApiServer) -> None:
    assert "thinking" in post(server, OLLAMA, {"model": MODEL}, path="/api/show").json()["capabilities"]


# Reasoning that comes back


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_template_gets_the_reasoning_of_calls_of_this_turn(qwen: ApiServer, field: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call], field: REASONING},
        {"role": "tool", "tool_call_id": "c1", "content": "A bear."},
    ]
    requests = qwen.observe_requests()
    ask(qwen, CHAT, turns, max_tokens=2)
    ask(qwen, CHAT, [*turns, *ASKED], max_tokens=2)  # the next turn
    texts = [prompt_text(qwen, submit) for submit in requests.submits]
    assert [text.count(f"<think>\n{REASONING}\n</think>\n\n\n<tool_call>") for text in texts] == [1, 0]


def test_the_template_gets_thinking_blocks_of_any_server(qwen: ApiServer) -> None:
    reasoning = {"type": "thinking", "thinking": "I look.", "signature": "of another server"}
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    redacted = {"type": "redacted_thinking", "data": "secret"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "A bear."}]}
    turns = [*ASKED, {"role": "assistant", "content": [reasoning, redacted, call]}, result]
    requests = qwen.observe_requests()
    ask(qwen, MESSAGES, turns, tools=LOOK, max_tokens=2)
    text = prompt_text(qwen, requests.submits[-1])
    assert text.count("<think>\nI look.\n</think>") == 1
    assert "secret" not in text
    body = {"model": MODEL, "messages": turns, "tools": [MESSAGES.tool(**LOOK[0])]}
    count = post(qwen, MESSAGES, body, path=f"{MESSAGES.path}/count_tokens").json()
    assert count["input_tokens"] == len(requests.submits[-1].token_ids)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_call_keeps_its_reasoning_item_until_the_next_turn(qwen: ApiServer, is_stored: bool) -> None:
    def respond(prompt: Any, **extra: Any) -> Any:
        return ask(qwen, RESPONSES, prompt, tools=LOOK, max_tokens=100, extra=extra)

    first = respond(CALL_SCRIPT)
    assert [item["type"] for item in first.turns] == ["reasoning", "function_call"]
    requests = qwen.observe_requests()
    results = RESPONSES.results(first.calls, ["A bear."])
    asked = {"role": "user", "content": CALL_SCRIPT}
    if is_stored:
        second = respond(results, previous_response_id=first.id)
    else:
        second = respond([asked, *first.turns, *results], store=False)
    shown = "<|im_start|>assistant\n<think>\nI look.\n</think>"
    assert prompt_text(qwen, requests.submits[-1]).count(shown) == 1
    if is_stored:
        respond("Hello", previous_response_id=second.id)
        assert shown not in prompt_text(qwen, requests.submits[-1])


@STREAMS
@over(CHAT, RESPONSES, MESSAGES, OLLAMA)
def test_f37_reasoning_after_text_is_apart_from_it(channels: ApiServer, api: Api, stream: bool) -> None:
    script = f"{PREAMBLE}{THINK}{PREAMBLE}{THINK}{FINAL}"
    answer = ask(channels, api, script, stream=stream, temperature=0, extra=ON[api])
    assert answer.text == f"I look.\n\nI look.\n\n{ANSWER}"
    assert answer.reasoning == f"{REASONING}\n\n{REASONING}"


@STREAMS
def test_f37_a_stored_answer_with_reasoning_after_text_is_whole(channels: ApiServer, stream: bool) -> None:
    sent = channels.observe_requests()
    first = ask(channels, RESPONSES, f"{PREAMBLE}{THINK}{FINAL}", stream=stream, temperature=0)
    then = {"previous_response_id": first.id}
    assert ask(channels, RESPONSES, FINAL, temperature=0, extra=then).text == ANSWER
    prompt = prompt_text(channels, sent.submits[-1])
    assert "I look." in prompt.rpartition("<|start|>assistant")[0].rpartition("<|start|>assistant")[2]
    assert f"I look.\n\n{ANSWER}" in prompt


@STREAMS
def test_f37_hidden_reasoning_after_text_is_not_shown(channels: ApiServer, stream: bool) -> None:
    hidden = {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}
    script = f"{THINK}{PREAMBLE}{THINK}{FINAL}"
    answer = ask(channels, MESSAGES, script, stream=stream, temperature=0, extra=hidden)
    assert (answer.text, answer.reasoning) == (f"I look.\n\n{ANSWER}", "")
    kinds = [block["type"] for block in answer.turns[0]["content"]]
    assert kinds == ["thinking", "text", "thinking", "text"]
