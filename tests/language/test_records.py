"""Records that programs get, such as usage and events, as JSON and in endpoints of web frameworks."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from typing import Any

import msgspec
import pydantic
import pytest
from pydantic import BaseModel, Field
from starlette.testclient import TestClient
from support.faults import has_param

import agentflow as af
from agentflow.language.typed.json_form import JsonForm
from agentflow.protocol import images, wire
from agentflow.protocol.events import Capabilities, ErrorInfo, LiveMedium, LiveNode, LiveState
from agentflow.protocol.record import Record


class Grade(BaseModel):
    mark: int = Field(alias="Mark")


def weather(city: str) -> str:
    return city


CALL = af.ToolCall("weather", {"city": "Oslo"}, "call_1", function=weather)
USAGE = af.Usage(3, 2, 1)
SHOWN_USAGE = {
    "prompt_tokens": 3,
    "cached_tokens": 2,
    "output_tokens": 1,
    "forced_tokens": 0,
    "reasoning_tokens": 0,
    "written_tokens": 0,
    "cost": 0.0,
    "saved_calls": 0,
    "saved_tokens": 0,
    "miss_reason": "",
    "rejected_answers": 0,
}
TAGGED = af.Tagged(af.Tag("<grade>", schema=Grade, end="</grade>"), '{"Mark": 1}', Grade(Mark=1))
SHOWN_TAGGED = {"tag": "<grade>", "text": '{"Mark": 1}', "value": {"Mark": 1}}
SHOWN_CALL = {"name": "weather", "arguments": {"city": "Oslo"}, "id": "call_1"}
RECORDS = [
    (USAGE, SHOWN_USAGE),
    (af.Stats("m", 3), {"model": "m", "steps": 3}),
    (af.TextDelta((0, 1), "x", "text"), {"path": [0, 1], "name": "x", "text": "text"}),
    (
        af.VariableDone((), "x", "text", "eos", USAGE, (CALL,)),
        {"path": [], "value": "text", "usage": SHOWN_USAGE, "tool_calls": [SHOWN_CALL]},
    ),
    (af.RunDone([Grade(Mark=1)]), {"result": [{"Mark": 1}]}),
    (af.RoundStarted(1), {"number": 1}),
    (af.ToolStarted(CALL), {"call": SHOWN_CALL}),
    (af.ToolDone(CALL, "cold"), {"call": SHOWN_CALL, "text": "cold", "failed": False}),
    (af.ActDone(Grade(Mark=1)), {"result": {"Mark": 1}}),
    (af.Reply("text", (CALL,)), {"text": "text", "tool_calls": [SHOWN_CALL]}),
    (TAGGED, SHOWN_TAGGED),
    (af.RunDone(["Sure: ", TAGGED]), {"result": ["Sure: ", SHOWN_TAGGED]}),
    (CALL, SHOWN_CALL),
    (af.Message("user", "Hi"), {"role": "user", "content": "Hi"}),
    (
        af.Message("assistant", "", (CALL,)),
        {
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ]
        },
    ),
    (af.TokenLogprob(42, " the", -0.25), {"token_id": 42, "text": " the", "logprob": -0.25}),
    (
        af.RunDone([af.TokenLogprob(1, "a", -1.0)]),
        {"result": [{"token_id": 1, "text": "a", "logprob": -1.0}]},
    ),
    (Capabilities("m", candidates=(Capabilities("n"),)), {"model": "m", "max_context": None}),
    (ErrorInfo("run_failed", "b", ErrorInfo("error", "a")), {"cause": {"code": "error", "message": "a"}}),
    (LiveState(1, 2), {"id": 1, "program": 2}),
    (LiveNode(1, 2, "gen", media=(LiveMedium("sha256:1"),)), {"media": [{"source": "sha256:1"}]}),
    (LiveMedium("sha256:1"), {"source": "sha256:1", "kind": "image"}),
]


@pytest.mark.parametrize(("record", "shown"), RECORDS, ids=lambda item: type(item).__name__)
def test_f16c_a_record_is_a_dict_of_json(record: Any, shown: dict[str, Any]) -> None:
    found = json.loads(json.dumps(record.to_dict()))
    assert found.items() >= shown.items()
    assert json.loads(json.dumps(dict(record))) == found


@pytest.mark.parametrize(("record", "shown"), RECORDS, ids=lambda item: type(item).__name__)
@pytest.mark.parametrize("is_annotated", [False, True])
def test_f16c_an_endpoint_returns_a_record(record: Any, shown: dict[str, Any], is_annotated: bool) -> None:
    if dataclasses.is_dataclass(record) and not is_annotated:
        pytest.skip("which FastAPI reads field by field")
    fastapi = pytest.importorskip("fastapi")
    app = fastapi.FastAPI()

    async def endpoint():
        return record

    async def several():
        return {"records": [record]}

    if is_annotated:
        endpoint.__annotations__["return"] = type(record)
        several.__annotations__["return"] = dict[str, list[type(record)]]
    app.get("/one")(endpoint)
    app.get("/several")(several)
    with TestClient(app) as client:
        assert client.get("/one").json().items() >= shown.items()
        assert client.get("/several").json()["records"][0].items() >= shown.items()
        assert client.get("/openapi.json").status_code == 200


def test_f16c_a_model_of_pydantic_has_records() -> None:
    class Answer(BaseModel):
        text: str
        usage: af.Usage

    answer = Answer(text="a", usage=USAGE)
    assert Answer.model_validate_json(answer.model_dump_json()) == answer
    assert Answer.model_json_schema()["properties"]["usage"]["type"] == "object"
    with pytest.raises(pydantic.ValidationError):
        Answer.model_validate({"text": "a", "usage": {"prompt_tokens": "many"}})


@pytest.mark.parametrize(
    "record",
    [
        USAGE,
        af.TokenLogprob(42, " the", -0.25),
        CALL,
        af.Message("tool", "12 degrees", (), "call_1", "weather"),
        af.Message("assistant", "Let me look.", (CALL,)),
    ],
    ids=str,
)
def test_f37_the_json_of_a_record_is_read_again(record: Any) -> None:
    Answer = pydantic.create_model("Answer", record=(type(record), ...))
    answer = Answer(record=record)
    assert json.loads(answer.model_dump_json()) == {"record": record.to_dict()}
    assert Answer.model_validate_json(answer.model_dump_json()) == answer
    with pytest.raises(pydantic.ValidationError):
        Answer.model_validate({"record": 3})


@pytest.mark.parametrize("record", [USAGE, af.TokenLogprob(42, " the", -0.25)], ids=str)
def test_f37_a_record_in_a_results_file_is_read_again(record: Any) -> None:
    form = JsonForm(list[type(record)], "map")
    assert form.read(json.dumps(form.plain([record]))) == [record]


def _mentioned(kind: Any) -> set[type]:
    """The classes that a type mentions, at any depth; of structs, those of their fields too."""
    found, pending = set(), [kind]
    while pending:
        one = pending.pop()
        pending += typing.get_args(one)
        if isinstance(one, type) and one not in found:
            found.add(one)
            if issubclass(one, msgspec.Struct):
                pending += typing.get_type_hints(one).values()
    return found


def _returned(public: type) -> set[type]:
    """The classes that the properties and methods of a class return."""
    found = set()
    for name, member in inspect.getmembers(public):
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        try:
            found |= _mentioned(typing.get_type_hints(function).get("return"))
        except (NameError, TypeError):  # imported for type checkers only
            continue
    return found


def test_f37_structs_that_programs_get_are_records() -> None:
    public = [one for name in af.__all__ if inspect.isclass(one := getattr(af, name))]
    returned = {kind for one in public for kind in _returned(one) | _mentioned(one)}
    assert {af.Usage, af.TokenLogprob, Capabilities, ErrorInfo, LiveNode} <= returned
    others = {one for one in returned if issubclass(one, msgspec.Struct) and not issubclass(one, Record)}
    assert {one.__module__ for one in others} <= {images.__name__, wire.__name__}  # files, and frames


@pytest.mark.parametrize("record", [af.Message("user", "?"), USAGE], ids=lambda record: type(record).__name__)
def test_f37_a_record_is_no_list_of_its_fields(record: Any) -> None:
    async def program(s: af.State, one: Any) -> None:
        pass

    with pytest.raises(af.errors.BadArgument, check=has_param("messages")):
        af.conversation(record)
    with pytest.raises(af.errors.BadArgument, check=has_param("inputs")):
        af.map(program, record, session=af.session(backend=af.Scripted([])))
