"""Records that programs get, such as usage and events, as JSON and in endpoints of web frameworks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pydantic
import pytest
from pydantic import BaseModel, Field
from starlette.testclient import TestClient

import agentflow as af


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
