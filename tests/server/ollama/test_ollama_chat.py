"""``POST /api/chat``: answers and streams, options, forms, tools, and what is rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.fake_engine import TOKENIZER, FakeEngine
from support.server.ollama_peer import ASKED, SAME, answer, error, lines, post, read_lines
from support.server.openai_peer import logit_server, sync_client
from support.server.scripted_model import scripted_server

from agentflow.engine.fake_runner import FakeRunner
from agentflow.protocol.sampling import SamplingParams

pytestmark = pytest.mark.timeout(60)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (
    'I look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
)
REPORT = "Oslo: sunny. Rome: rain."
DURATIONS = ("load_duration", "prompt_eval_duration", "eval_duration")

server = pytest.fixture(logit_server, scope="module")


def scripted(before: str) -> str:
    """Calls the weather tool twice, and reports when it has a result."""
    return REPORT if "sunny" in before else CALLS


@pytest.fixture(scope="module")
def agent() -> Iterator[ApiServer]:
    """Its model follows the script."""
    with scripted_server(scripted) as running:
        yield running


@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest"])
def test_a_stream_has_the_text_of_the_whole_answer(server: ApiServer, name: str) -> None:
    whole = answer(server, "chat", model=name, messages=ASKED, options=SAME)
    parts = lines(server, "chat", model=name, messages=ASKED, options=SAME)
    assert {one["model"] for one in (whole, *parts)} == {name}
    assert {one["message"]["role"] for one in (whole, *parts)} == {"assistant"}
    assert "".join(one["message"]["content"] for one in parts) == whole["message"]["content"] != ""
    with sync_client(server) as client:
        other = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": ASKED[0]["content"]}],
            max_tokens=12,
            seed=3,
            temperature=0.8,
            top_p=0.9,
            extra_body={"top_k": 40},
        )
    assert other.usage is not None
    assert whole["message"]["content"] == other.choices[0].message.content
    for last in (whole, parts[-1]):
        assert (
            last["done_reason"] == {"stop": "stop", "length": "length"}[str(other.choices[0].finish_reason)]
        )
        assert last["prompt_eval_count"] == other.usage.prompt_tokens
        assert last["eval_count"] == other.usage.completion_tokens
        assert all(last[name] > 0 for name in DURATIONS)
        assert sum(last[name] for name in DURATIONS) <= last["total_duration"]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (None, {}),
        ({"temperature": 0, "top_k": -1, "top_p": 1}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"num_predict": 7, "stop": "z"}, {"max_tokens": 7, "stop": ("z",)}),
        ({"num_predict": -2, "stop": ["y", "z"], "num_ctx": 16}, {"stop": ("y", "z")}),
        (
            {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repeat_penalty": 1.1},
            {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
        ),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, {}),
        ({"seed": 9, "mirostat": 0, "typical_p": 1.0, "tfs_z": 1, "num_gpu": 99, "use_mmap": True}, {}),
        ({"num_ctx": 8192.0, "num_predict": 7.0, "mirostat": 0.0, "warmth": 9}, {"max_tokens": 7}),
    ],
)
def test_the_engine_gets_the_options(
    server: ApiServer, options: dict[str, Any] | None, changes: dict[str, Any]
) -> None:
    requests = server.observe_requests()
    answer(server, "chat", messages=ASKED, options=options)
    room = server.generator.capabilities.max_context
    expected = SamplingParams(
        **({"max_tokens": room, "temperature": 0.8, "top_k": 40, "top_p": 0.9} | changes)
    )
    [sent] = requests.submits
    assert SamplingParams(**{name: getattr(sent.params, name) for name in sent.params.__struct_fields__}) == (
        SamplingParams(
            **{name: getattr(expected, name) for name in expected.__struct_fields__ if name not in ("seed",)},
            seed=sent.params.seed,
        )
    )
    if options is not None and "seed" in options:
        assert sent.params.seed == options["seed"]


def test_f34c_unknown_options_have_no_effect(server: ApiServer) -> None:
    plain = answer(server, "chat", messages=ASKED, options=SAME)["message"]
    unknown = {"warmth": 9, "draft_model": {"name": "x"}, "numa_nodes": [1, 2.0]}
    assert answer(server, "chat", messages=ASKED, options={**SAME, **unknown})["message"] == plain
    for changing in ({"mirostat": 1}, {"typical_p": 0.5}, {"tfs_z": 2.0}):
        status, code, param = error(server, "chat", messages=ASKED, options={**unknown, **changing})
        assert (status, code, param) == (400, "invalid_request", f"options.{next(iter(changing))}")


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


def test_a_stop_is_not_part_of_the_answer(server: ApiServer) -> None:
    text = answer(server, "chat", messages=ASKED, options=SAME)["message"]["content"]
    stopped = answer(server, "chat", messages=ASKED, options=SAME | {"stop": [text[2:4]]})
    assert stopped["message"]["content"] == text[: text.index(text[2:4])]
    assert stopped["done_reason"] == "stop"


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
    history = [*ASKED, {"role": "assistant", "content": CALLS[:4]}]
    assert answer(agent, "chat", messages=history)["message"]["content"] == CALLS[4:]


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}


@pytest.mark.parametrize(("form", "schema"), [("json", {"type": "object"}), (SCHEMA, SCHEMA)])
def test_the_answer_has_the_form(agent: ApiServer, form: Any, schema: dict[str, Any]) -> None:
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, max_context=512)
    with api_server(FakeEngine(runner=runner)) as server:
        found = answer(server, "chat", messages=ASKED, format=form, options={"num_predict": 200})
    if found["done_reason"] == "stop":
        jsonschema.validate(json.loads(found["message"]["content"]), schema)
    else:
        assert form == "json"
        assert found["message"]["content"].startswith("{")


def test_what_has_no_effect_is_accepted(server: ApiServer) -> None:
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
    assert error(server, "chat", model="other") == (404, "model_not_found", None)


def test_an_unknown_model_is_not_found(server: ApiServer) -> None:
    for name in ("other", "latest", ":latest", f"{MODEL}:7b"):
        assert error(server, "chat", model=name, messages=ASKED) == (404, "model_not_found", None)
