"""Tools with ordinary schemas, over all HTTP APIs: relaxed keywords, violations, and their reports."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx2
import pytest
from support.api_server import ApiServer
from support.engine.tool_template_shapes import LLAMA
from support.server.apis import CHAT, MESSAGES, OLLAMA, RESPONSES, Api, post
from support.server.module_servers import module_fixture
from support.server.openai_peer import any_text_server
from support.server.scripted_model import scripted_server

from agentflow.engine.text.chat_template import ChatTemplate

TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SCHEMA = {"type": "object", "properties": {"tags": TAGS}, "required": ["tags"], "additionalProperties": False}
PLACE = "find#/properties/tags/uniqueItems"
CALL = '<tool_call>{"name": "find", "arguments": {"tags": %s}}</tool_call>'
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/N"}}, "additionalProperties": False}
ROOTS = {
    "$defs": {"$ref": "#/$defs/N", "$defs": {"N": NODE}},
    "#": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
}
EACH_API = pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=lambda api: api.name)


def calling(api: Api, schema: Any, *, words: str = "valid", **tool: Any) -> dict[str, Any]:
    """A request with a tool, which the model must call."""
    tools = [{"name": "find", "parameters": schema, **tool}]
    choice = "" if api is OLLAMA else "required"  # the API has no choice; the model calls it anyway
    return api.body(f"Call it with {words} arguments.", tools=tools, choice=choice, max_tokens=200)


def scripted(before: str) -> str:
    """Calls the tool with valid arguments, or with invalid ones if the request asks for them."""
    return CALL % ('["a", "a"]' if "invalid" in before else '["a", "b"]')


server = module_fixture(scripted_server, scripted)


any_text = pytest.fixture(any_text_server, scope="module")


@EACH_API
@pytest.mark.parametrize("words", ["valid", "invalid"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_headers_name_relaxed_and_violated_constraints(
    server: ApiServer, api: Api, words: str, is_streamed: bool
) -> None:
    answer = post(server, api, {**calling(api, SCHEMA, words=words), "stream": is_streamed})
    assert answer.status_code == 200
    assert answer.headers["x-agentflow-relaxed"] == PLACE
    assert "find" in answer.text
    if is_streamed:
        notes = [line for line in answer.text.splitlines() if line.startswith(": x-agentflow-violated")]
        assert notes == ([f": x-agentflow-violated: {PLACE}"] if words == "invalid" else [])
    else:
        assert answer.headers.get("x-agentflow-violated") == (PLACE if words == "invalid" else None)


@pytest.mark.parametrize("words", ["valid", "invalid"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_f37_every_line_of_an_ollama_stream_is_json(server: ApiServer, words: str, is_streamed: bool) -> None:
    answer = post(server, OLLAMA, {**calling(OLLAMA, SCHEMA, words=words), "stream": is_streamed})
    assert answer.status_code == 200
    lines = [json.loads(line) for line in answer.text.split("\n") if line]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    place = PLACE if words == "invalid" else None
    assert answer.headers.get("x-agentflow-violated") == (None if is_streamed else place)
    assert lines[-1].get("x-agentflow-violated") == (place if is_streamed else None)


@EACH_API
def test_a_strict_tool_is_rejected_with_its_place(server: ApiServer, api: Api) -> None:
    answer = post(server, api, calling(api, SCHEMA, strict=True))
    assert answer.status_code == 400
    member = {CHAT: "function.parameters", RESPONSES: "parameters", MESSAGES: "input_schema"}[api]
    assert api.error(answer.json())[1] == f"tools[0].{member}.properties.tags.uniqueItems"


@EACH_API
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_tool_may_be_a_reference(any_text: ApiServer, api: Api, root: str, is_strict: bool) -> None:
    answer = post(any_text, api, calling(api, ROOTS[root], strict=is_strict))
    assert answer.status_code == 200
    assert "x-agentflow-relaxed" not in answer.headers


@pytest.mark.parametrize("api", [CHAT, RESPONSES], ids=lambda api: api.name)
@pytest.mark.parametrize(("strict", "status"), [(None, 200), (False, 200), (True, 400)])
def test_the_form_of_an_answer_is_relaxed_unless_it_is_strict(
    any_text: ApiServer, api: Api, strict: bool | None, status: int
) -> None:
    named = {"name": "a", "schema": SCHEMA, "strict": strict}
    form = {
        CHAT: {"response_format": {"type": "json_schema", "json_schema": named}},
        RESPONSES: {"text": {"format": {"type": "json_schema", **named}}},
    }[api]
    alternative = {**calling(api, {"type": "object", "properties": {}}), "tool_choice": "auto"}
    for body in (api.body("Hi"), alternative):  # next to a tool, it is the alternative to a call
        answer = post(any_text, api, {**body, **form, "seed": 1})
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.headers["x-agentflow-relaxed"] == "#/properties/tags/uniqueItems"


def test_where_nothing_is_enforced_calls_are_checked() -> None:
    """A call without a mark, which the model may make."""
    call = '{"name": "find", "parameters": {"tags": ["a", "a"]}}'
    llama = ChatTemplate(LLAMA)
    with scripted_server(lambda _: call, opening="<|end_header_id|>\n\n", template=llama) as running:
        answer = post(running, CHAT, {**calling(CHAT, SCHEMA, strict=True), "tool_choice": "auto"})
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert answer.headers["x-agentflow-relaxed"] == "find#"
    assert answer.headers["x-agentflow-violated"] == PLACE


def test_the_metrics_and_the_log_count_them(server: ApiServer, caplog: pytest.LogCaptureFixture) -> None:
    def counts() -> dict[str, float]:
        lines = httpx2.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("agentflow_relaxed")]
        return {name: float(value) for name, value in pairs}

    before = counts()
    with caplog.at_level(logging.INFO, logger="agentflow.requests"):
        post(server, CHAT, calling(CHAT, SCHEMA, words="invalid"))
        post(server, CHAT, calling(CHAT, SCHEMA))
        post(server, CHAT, calling(CHAT, SCHEMA, strict=True))
        server.call(server.service.calls.until_none)  # the log is written after the answer
    after = counts()
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {
        "agentflow_relaxed_requests_total": 2,
        'agentflow_relaxed_outputs_total{result="valid"}': 1,
        'agentflow_relaxed_outputs_total{result="violated"}': 1,
        'agentflow_relaxed_outputs_total{result="unchecked"}': 0,
    }
    logged = [record.request for record in caplog.records if hasattr(record, "request")]
    posted = [one for one in logged if one["method"] == "POST"]
    assert [(one.get("relaxed"), one.get("violated")) for one in posted] == [
        (PLACE, PLACE),
        (PLACE, None),
        (None, None),
    ]
    assert posted[2]["param"] == "tools[0].function.parameters.properties.tags.uniqueItems"
    assert f"param={json.dumps(posted[2]['param'])}" in caplog.text
