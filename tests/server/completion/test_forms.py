"""Answers of a required form over each API, by each field that asks for one, whole and streamed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.api_server import ApiServer
from support.server.apis import CHAT, MESSAGES, OLLAMA, RESPONSES, SGLANG, TEXT, Api, ask
from support.server.openai_peer import constrained_logit_server

pytestmark = pytest.mark.timeout(60)
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
N = r'\{"n": [12]\}'
EBNF = 'root ::= "yes " digit | "no"\ndigit ::= [0-9]'
EITHER = "yes [0-9]|no"
LARK = 'start: "yes" | "no" " thanks"'


def schema_format(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", **fields}


# Fields of OpenAI's, vLLM's and SGLang's servers, of chats and of texts.
OPENAIS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[ab]{3}"}, "[ab]{3}"),
    ({"grammar": LARK}, "yes|no thanks"),
    ({"guided_regex": "a{2,4}b"}, "a{2,4}b"),
    ({"guided_choice": ["red", "green"]}, "red|green"),
    ({"guided_grammar": 'start: "x" "y"*'}, "xy*"),
    ({"guided_grammar": EBNF}, EITHER),
    ({"guided_grammar": 'start: "::=" /[ab]/'}, "::=[ab]"),
    ({"ebnf": EBNF}, EITHER),
    ({"guided_json": SCHEMA}, N),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "xgrammar"}, N),
    ({"structured_outputs": {"json": SCHEMA}}, N),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "a|b"),
    ({"structured_outputs": {"regex": "[ab]"}}, "a|b"),
    ({"structured_outputs": {"grammar": EBNF}}, EITHER),
]
STRICT = [
    ({"response_format": schema_format(json_schema={"name": "x", "schema": SCHEMA, "strict": strict})}, N)
    for strict in (True, False, None)
]
FORMS: dict[Api, list[tuple[dict[str, Any], str]]] = {
    CHAT: [*OPENAIS, *STRICT, ({"response_format": {"type": "text"}}, r"[^{](.|\n)*")],
    TEXT: OPENAIS,
    RESPONSES: [({"text": {"format": schema_format(name="x", schema=SCHEMA)}}, N)],
    MESSAGES: [
        ({"output_config": {"format": schema_format(schema=SCHEMA)}}, N),
        ({"output_format": schema_format(schema=SCHEMA)}, N),
    ],
    OLLAMA: [({"format": SCHEMA}, N)],
    SGLANG: [
        ({"sampling_params": {"regex": "a{2,4}b"}}, "a{2,4}b"),
        ({"sampling_params": {"json_schema": SCHEMA}}, N),
        ({"sampling_params": {"json_schema": json.dumps(SCHEMA)}}, N),
        ({"sampling_params": {"ebnf": 'root ::= "yes " [0-9]'}}, "yes [0-9]"),
    ],
}
CASES = [
    pytest.param(api, extra, pattern, id=f"{api.name} {json.dumps(extra)[:50]}")
    for api, forms in FORMS.items()
    for extra, pattern in forms
]


server = pytest.fixture(constrained_logit_server, scope="module")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("api", "extra", "pattern"), CASES)
def test_an_answer_of_a_form(
    server: ApiServer, api: Api, extra: dict[str, Any], pattern: str, stream: bool
) -> None:
    answer = ask(server, api, "So", stream=stream, extra=extra, max_tokens=100, seed=5)
    assert re.fullmatch(pattern, answer.text)


@pytest.mark.parametrize(
    ("api", "extra"), [(CHAT, {"response_format": {"type": "json_object"}}), (OLLAMA, {"format": "json"})]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_any_object(server: ApiServer, api: Api, extra: dict[str, Any], stream: bool) -> None:
    """Where the limit truncates it, it is the beginning of one."""
    seen = set()
    for seed in range(6):
        answer = ask(server, api, "So", stream=stream, extra=extra, max_tokens=40, seed=seed)
        assert re.match(r'\{(\}|"|$)', answer.text)
        if answer.reason == "stop":
            assert isinstance(json.loads(answer.text), dict)
        seen.add(answer.text)
    assert len(seen) > 3
