"""``POST /api/chat``: answers and streams, options, forms, tools, and rejected requests."""

from __future__ import annotations

from typing import Any

import pytest
from support.api_server import MODEL, ApiServer
from support.server.apis import CHAT, ask
from support.server.module_servers import module_fixture
from support.server.ollama_peer import ASKED, SAME, answer, error, lines, post, read_lines
from support.server.openai_peer import logit_server
from support.server.scripted_model import scripted_server

pytestmark = pytest.mark.timeout(60)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
REPORT = "Oslo: sunny."
DURATIONS = ("load_duration", "prompt_eval_duration", "eval_duration")

server = pytest.fixture(logit_server, scope="module")


agent = module_fixture(scripted_server, lambda _: REPORT)
"""Its model writes the report."""


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_a_stream_has_the_text_of_the_whole_answer(server: ApiServer, name: str) -> None:
    whole = answer(server, "chat", model=name, messages=ASKED, options=SAME)
    parts = lines(server, "chat", model=name, messages=ASKED, options=SAME)
    assert {one["model"] for one in (whole, *parts)} == {name}
    assert {one["message"]["role"] for one in (whole, *parts)} == {"assistant"}
    assert "".join(one["message"]["content"] for one in parts) == whole["message"]["content"] != ""
    chat: Any = {"seed": 3, "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "extra": {"top_k": 40}}
    other = ask(server, CHAT, ASKED, **chat)
    assert whole["message"]["content"] == other.text
    for last in (whole, parts[-1]):
        assert last["done_reason"] == other.reason
        assert (last["prompt_eval_count"], last["eval_count"]) == (other.prompt_tokens, other.output_tokens)
        assert all(last[name] > 0 for name in DURATIONS)
        assert sum(last[name] for name in DURATIONS) <= last["total_duration"]


def test_log_probabilities_are_those_of_each_token(server: ApiServer) -> None:
    fields: dict[str, Any] = {"messages": ASKED, "options": SAME, "logprobs": True}
    whole = answer(server, "chat", top_logprobs=2, **fields)
    assert len(whole["logprobs"]) == whole["eval_count"] - (whole["done_reason"] == "stop")
    assert "".join(one["token"] for one in whole["logprobs"]) == whole["message"]["content"]
    assert {len(one["top_logprobs"]) for one in whole["logprobs"]} == {2}
    parts = lines(server, "chat", **fields)
    streamed = [one for part in parts for one in part.get("logprobs", [])]
    assert [one["logprob"] for one in streamed] == [one["logprob"] for one in whole["logprobs"]]
    assert not any("top_logprobs" in one for one in streamed)


def test_results_belong_to_calls_by_id_by_name_or_in_order(agent: ApiServer) -> None:
    calls = [
        {"id": "a", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"id": "b", "function": {"name": "clock", "arguments": {}}},
    ]
    results = [
        {"role": "tool", "content": "noon", "tool_name": "clock"},
        {"role": "tool", "content": "sunny"},
    ]
    history = [*ASKED, {"role": "assistant", "tool_calls": calls}]
    requests = agent.observe_requests()
    answer(agent, "chat", messages=history + results, tools=[WEATHER])
    results[0] = {"role": "tool", "content": "noon", "tool_call_id": "b"}
    answer(agent, "chat", messages=history + results, tools=[WEATHER])
    first, second = requests.submits
    assert first.token_ids == second.token_ids
    third = {"role": "tool", "content": "again", "tool_name": "clock"}
    assert error(agent, "chat", messages=[*history, *results, third]) == (
        400,
        "invalid_value",
        "messages[4].tool_name",
    )


def test_the_last_turn_of_the_assistant_is_continued(agent: ApiServer) -> None:
    history = [*ASKED, {"role": "assistant", "content": REPORT[:4]}]
    assert answer(agent, "chat", messages=history)["message"]["content"] == REPORT[4:]


def test_fields_without_effect_are_accepted(server: ApiServer) -> None:
    plain = answer(server, "chat", messages=ASKED, options=SAME)
    fields = {"keep_alive": "5m", "think": False, "format": "", "truncate": True, "shift": False}
    asked = [{**ASKED[0], "images": [], "thinking": "Hm.", "name": "Ann"}]
    more = answer(server, "chat", messages=asked, options=SAME | {"num_thread": 4}, **fields)
    assert more["message"] == plain["message"]


@pytest.mark.parametrize("fields", [{"messages": []}, {}, {"messages": [], "keep_alive": 0}])
def test_without_messages_the_model_is_reported_as_loaded(server: ApiServer, fields: dict[str, Any]) -> None:
    requests = server.observe_requests()
    response = post(server, "chat", **fields)
    [last] = read_lines(response.text)
    assert (last["done_reason"], last["message"]["content"]) == ("load", "")
    assert not requests.submits
    for name in ("other", "latest", ":latest", f"{MODEL}:7b"):
        assert error(server, "chat", model=name) == (404, "model_not_found", None)
