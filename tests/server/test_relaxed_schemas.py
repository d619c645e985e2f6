"""Tools as people write them, over all HTTP APIs: what is relaxed, what violates it, and where that shows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from support.api_server import MODEL, ApiServer, api_server
from support.engine.tool_template_shapes import LLAMA
from support.fake_engine import FakeEngine
from support.logit_runner import logit_runner
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
APIS = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def body_of(api: str, schema: Any, *, words: str = "valid", **tool: Any) -> dict[str, Any]:
    """A request with a tool, which the model must call."""
    asked = [{"role": "user", "content": f"Call it with {words} arguments."}]
    if api == "messages":
        tools = [{"name": "find", "input_schema": schema, **tool}]
        return {"messages": asked, "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": 200}
    function = {"name": "find", "parameters": schema, **tool}
    if api == "responses":
        tools = [{"type": "function", **function}]
        return {"input": asked, "tools": tools, "tool_choice": "required", "max_output_tokens": 200}
    tools = [{"type": "function", "function": function}]
    return {"messages": asked, "tools": tools, "tool_choice": "required", "max_tokens": 200}


def post(server: ApiServer, api: str, body: dict[str, Any]) -> httpx2.Response:
    return httpx2.post(f"{server.url}{PATHS[api]}", json={"model": MODEL, **body}, timeout=60)


def scripted(before: str) -> str:
    """Calls the tool with what the request says."""
    return CALL % ('["a", "a"]' if "invalid" in before else '["a", "b"]')


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with scripted_server(scripted) as running:
        yield running


@pytest.fixture(scope="module")
def any_text() -> Iterator[ApiServer]:
    with api_server(FakeEngine(runner=logit_runner(max_context=1024))) as running:
        yield running


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("words", ["valid", "invalid"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_was_relaxed_is_named_and_what_violates_it(
    server: ApiServer, api: str, words: str, is_streamed: bool
) -> None:
    answer = post(server, api, {**body_of(api, SCHEMA, words=words), "stream": is_streamed})
    assert answer.status_code == 200
    assert answer.headers["x-agentflow-relaxed"] == PLACE
    assert "find" in answer.text
    if is_streamed:
        notes = [line for line in answer.text.splitlines() if line.startswith(": x-agentflow-violated")]
        assert notes == ([f": x-agentflow-violated: {PLACE}"] if words == "invalid" else [])
    else:
        assert answer.headers.get("x-agentflow-violated") == (PLACE if words == "invalid" else None)


@pytest.mark.parametrize("api", APIS)
def test_a_strict_tool_is_rejected_with_its_place(server: ApiServer, api: str) -> None:
    answer = post(server, api, body_of(api, SCHEMA, strict=True))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "'find'" in error["message"]
    assert "properties.tags.uniqueItems" in error["message"]
    if api != "messages":  # its errors have no param
        member = "function.parameters" if api == "chat" else "parameters"
        assert error["param"] == f"tools[0].{member}.properties.tags.uniqueItems"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_tool_may_be_a_reference(any_text: ApiServer, api: str, root: str, is_strict: bool) -> None:
    answer = post(any_text, api, body_of(api, ROOTS[root], strict=is_strict))
    assert answer.status_code == 200
    assert "x-agentflow-relaxed" not in answer.headers


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_form_of_an_answer_is_relaxed_unless_it_is_strict(any_text: ApiServer, api: str) -> None:
    for strict, status in ((None, 200), (False, 200), (True, 400)):
        named = {"name": "a", "schema": SCHEMA, "strict": strict}
        if api == "chat":
            form = {"response_format": {"type": "json_schema", "json_schema": named}}
        else:
            form = {"text": {"format": {"type": "json_schema", **named}}}
        body = {
            key: body_of(api, SCHEMA)[key] for key in ("messages", "input") if key in body_of(api, SCHEMA)
        }
        answer = post(any_text, api, {**body, **form, "seed": 1})
        assert answer.status_code == status
        if status == 200:
            assert answer.headers["x-agentflow-relaxed"] == "#/properties/tags/uniqueItems"
        # Beside a tool, it is the alternative to a call.
        both = {
            **body_of(api, {"type": "object", "properties": {}}),
            **form,
            "tool_choice": "auto",
            "seed": 1,
        }
        answer = post(any_text, api, both)
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.headers["x-agentflow-relaxed"] == "#/properties/tags/uniqueItems"


def test_where_nothing_is_enforced_calls_are_checked() -> None:
    """A call without a mark, which the model may make."""
    call = '{"name": "find", "parameters": {"tags": ["a", "a"]}}'
    llama = ChatTemplate(LLAMA)
    with scripted_server(lambda _: call, opening="<|end_header_id|>\n\n", template=llama) as running:
        answer = post(running, "chat", {**body_of("chat", SCHEMA, strict=True), "tool_choice": "auto"})
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
        post(server, "chat", body_of("chat", SCHEMA, words="invalid"))
        post(server, "chat", body_of("chat", SCHEMA))
        post(server, "chat", body_of("chat", SCHEMA, strict=True))
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
    assert "find" in posted[2]["message"]
    assert f"param={json.dumps(posted[2]['param'])}" in caplog.text
