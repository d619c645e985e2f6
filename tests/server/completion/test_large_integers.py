"""Integers of 400 digits in schemas, in arguments and in the fields of requests: a value, or one error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.api_server import ApiServer, api_server
from support.fake_engine import FakeEngine
from support.logit_runner import logit_runner
from support.server.apis import CHAT, MESSAGES, OLLAMA, RESPONSES, Api, Called, post

LARGE = 10**400
APIS = [CHAT, RESPONSES, MESSAGES, OLLAMA]
KINDS: list[dict[str, Any]] = [
    {"const": LARGE},
    {"enum": [LARGE]},
    {"enum": [-LARGE], "type": "integer"},
    {"type": "integer", "enum": [1], "default": LARGE},
    {"type": "string", "pattern": "^a$", "default": LARGE},
    {"type": "integer", "minimum": LARGE},
    {"type": "integer", "minimum": 1, "maximum": LARGE},
    {"type": "number", "exclusiveMinimum": -LARGE, "exclusiveMaximum": LARGE},
    {"type": "number", "maximum": -LARGE},
    {"type": "integer", "multipleOf": LARGE},
    {"type": "string", "maxLength": LARGE},
    {"type": "string", "minLength": LARGE},
    {"type": "array", "items": {"type": "null"}, "maxItems": LARGE},
    {"anyOf": [{"const": LARGE}, {"type": "string", "pattern": "^a{3}$"}]},
]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server(FakeEngine(runner=logit_runner(max_context=4096))) as running:
        yield running


def max_tokens(kind: dict[str, Any]) -> int:
    """Enough for 400 digits; a string may go on."""
    return 60 if "maxLength" in kind else 900


def form(api: Api, schema: dict[str, Any]) -> dict[str, Any]:
    if api is OLLAMA:
        return {"format": schema}
    if api is MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    named = {"name": "x", "schema": schema, "strict": True}
    if api is RESPONSES:
        return {"text": {"format": {"type": "json_schema", **named}}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: json.dumps(kind)[:40])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_f37_a_schema_with_a_large_integer(server: ApiServer, api: Api, kind: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"n": kind}, "required": ["n"]}
    check(server, api, api.body("So", extra=form(api, schema), max_tokens=max_tokens(kind), seed=1))
    for strict in (False, True):
        tool: dict[str, Any] = {"name": "f", "parameters": schema}
        if api is OLLAMA:
            body = api.body("So", tools=[tool], extra=form(api, schema), max_tokens=max_tokens(kind), seed=1)
        else:
            tool["strict"] = strict
            body = api.body("So", tools=[tool], choice="required", max_tokens=max_tokens(kind), seed=1)
        check(server, api, body)


def check(server: ApiServer, api: Api, body: dict[str, Any]) -> None:
    for stream in (False, True):
        response = post(server, api, {**body, "stream": stream})
        if response.status_code == 200:
            answer = api.streamed(response.text) if stream else api.whole(response.json())
            if answer.reason != "length":
                assert "n" in (answer.arguments[0] if answer.calls else json.loads(answer.text))
        else:
            assert response.status_code == 400
            assert api.error(response.json())[0] == "invalid_value"


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_f37_arguments_of_a_large_integer_in_the_history(server: ApiServer, api: Api) -> None:
    body = api.body("So", tools=[{"name": "f", "parameters": {"type": "object"}}], max_tokens=5)
    arguments: Any = {"n": LARGE}
    text = json.dumps(arguments)
    call: list[Any]
    if api is CHAT:
        call = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": text}}]
        turn = {"role": "assistant", "content": "", "tool_calls": call}
    elif api is RESPONSES:
        turn = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": text}
    elif api is MESSAGES:
        block = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
        turn = {"role": "assistant", "content": [block]}
    else:
        call = [{"function": {"name": "f", "arguments": arguments}}]
        turn = {"role": "assistant", "content": "", "tool_calls": call}
    results = api.results([Called("c1", "f", arguments)], ["done"])
    body[api.prompt_field] = [*body[api.prompt_field], turn, *results]
    response = post(server, api, body)
    assert response.status_code in (200, 400), response.text
