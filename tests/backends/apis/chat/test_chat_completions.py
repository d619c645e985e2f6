"""The backends of OpenAI's chat API against a fake server, whose answers have types of OpenAI's client."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from support.apis import openai_answers as answers
from support.apis.api_sessions import api_session, failure, openai_session
from support.apis.api_sessions import compatible_session as compatible
from support.apis.fake_server import Answer, AnyAnswer, Received, fake_server

import agentflow as af
from agentflow.backends.apis.chat.flavours import FLAVOURS
from agentflow.backends.apis.compatible import OpenAICompatible
from agentflow.backends.apis.grammars import gbnf
from agentflow.backends.apis.openai import OpenAI
from agentflow.errors import (
    InvalidValue,
    NotAuthorized,
    NotSupported,
    PromptTooLong,
    ProtocolError,
    RunFailed,
    ServerUnreachable,
    UnknownModel,
)

pytestmark = pytest.mark.anyio

KEY = "sk-very-secret"
HELLO = answers.text_stream("He", "llo")


opened = partial(openai_session, api_key=KEY)


async def test_only_parameters_that_are_set_are_sent() -> None:
    async with opened([HELLO, HELLO]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(
            af.gen("x", stop=["a", "b", "c", "d", "e"], top_p=0.5, logit_bias={7: -1})
        )
        await s
    sent = server.last.json
    assert sent["stop"] == ["a", "b", "c", "d"]
    assert sent["top_p"] == 0.5
    assert sent["logit_bias"] == {"7": -1}
    assert not {"temperature", "frequency_penalty", "presence_penalty", "top_k", "min_tokens"} & sent.keys()


async def test_reasoning_is_reported_apart_from_the_text() -> None:
    for key in ("reasoning", "reasoning_content"):
        spelled: Literal["reasoning", "reasoning_content"] = key  # type: ignore[assignment]
        answer = answers.stream(
            answers.reasoning_chunks("Hm", "m.", key=spelled),
            answers.text_chunks("Yes"),
            answers.ending(usage=answers.usage(9, 8, reasoning=5)),
        )
        async with compatible([answer]) as (flow, _), flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            assert await s["x"] == "Yes"
            assert s["x"].reasoning == "Hmm."
            assert s["x"].usage.reasoning_tokens == 5


async def test_missing_log_probabilities_are_an_error() -> None:
    await failure(opened([HELLO]), NotSupported, logprobs=True)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"12 degrees in {city}"


async def test_tools_are_called_and_their_results_sent() -> None:
    called = answers.call_stream(("c1", "weather", ['{"city"', ': "Oslo"}']), text=["I ", "look."])
    async with opened([called, HELLO]) as (flow, server), flow.state() as s:
        s += af.user("How is it in Oslo?")
        answer = await af.act(s, tools=[weather])
        assert answer == "Hello"
    first, second = (request.json for request in server.received)
    [tool] = first["tools"]
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["strict"] is True
    assert second["messages"][1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
        {"role": "tool", "content": "12 degrees in Oslo", "tool_call_id": "c1"},
    ]


def _call(index: int | None, name: str | None, arguments: Any, call_id: str | None = None) -> bytes:
    call: dict[str, Any] = {"function": {"name": name, "arguments": arguments}, "id": call_id}
    if index is not None:
        call["index"] = index
    return answers.event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})


@pytest.mark.parametrize(
    "parts",
    [
        [_call(0, "f", '{"a": 1}', "c1"), _call(1, "g", "{}", "c2")],
        [_call(0, "f", '{"a"', "c1"), _call(0, None, ": 1}"), _call(1, "g", None, "c2")],
        [_call(None, "f", '{"a": 1}', "c1"), _call(None, "g", "{}", "c2")],  # without indexes
        [_call(0, "f", '{"a": 1}', "c1"), _call(0, "g", "{}", "c2")],  # all are number 0
        [_call(0, "f", {"a": 1}, "c1"), _call(1, "g", {}, "c2")],  # objects, not texts
        [_call(3, "f", '{"a": 1}', "c1"), _call(7, "g", "", "c2")],
        [_call(0, "f", '{"a": 1}'), _call(1, "g", "{}")],  # without ids
    ],
)
async def test_spellings_of_tool_calls(parts: list[bytes]) -> None:
    def tool(name: str) -> Any:
        return af.tool(lambda **_: "", name=name, description=name, parameters={"type": "object"})

    stream = answers.stream(*parts, answers.ending("tool_calls"))
    async with compatible([stream]) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[tool("f"), tool("g")]))
        reply = await s["x"]
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("f", {"a": 1}), ("g", {})]
    assert len({call.id for call in reply.tool_calls}) == 2
    assert all(call.id for call in reply.tool_calls)


@pytest.mark.parametrize(
    "parts",
    [
        [_call(0, "f", "{", "c1"), _call(1, "g", "{", "c2"), _call(0, None, "}")],
        [_call(0, "f", "{", "c1"), *map(answers.event, answers.text_chunks("a")), _call(0, None, "}")],
    ],
)
async def test_mixed_parts_of_tool_calls_are_an_error(parts: list[bytes]) -> None:
    async with opened([answers.stream(*parts, answers.ending("tool_calls"))]) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[weather]))
        with pytest.raises(ProtocolError):
            await s["x"]


async def test_values_that_are_no_objects_are_taken_out_of_one() -> None:
    script = [answers.text_stream('{"value', '": [1, 2]}'), answers.text_stream('{"value":7}')]
    async with opened(script) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", schema=list[int]))
        assert await s["x"] == [1, 2]
        s += af.user("Hi") + af.assistant(af.gen("y", schema=int, stop="}"))
        assert await s["y"] == 7
    assert "stop" not in server.last.json
    assert server.last.json["messages"][1] == {"role": "assistant", "content": "[1, 2]"}


@pytest.mark.parametrize("on_unsupported", ["error", "retry"])
async def test_types_are_schemas_where_the_api_enforces_no_patterns(on_unsupported: Any) -> None:
    script = [answers.text_stream(f'{{"value": {value}}}') for value in ("12", "-2.5e3", '"true"')]
    async with opened(script, on_unsupported=on_unsupported) as (flow, server), flow.state() as s:
        for name, kind, value in (("x", int, 12), ("y", float, -2500.0), ("z", bool, True)):
            s += af.user("Hi") + af.assistant(af.gen(name, type=kind))
            assert await s[name] == value
    schemas = [request.json["response_format"]["json_schema"]["schema"] for request in server.received]
    assert [schema["properties"]["value"] for schema in schemas] == [
        {"type": "integer"},
        {"type": "number"},
        {"type": "string", "enum": ["true", "false"]},
    ]


@pytest.mark.parametrize(
    ("flavour", "field"),
    [("vllm", "structured_outputs"), ("llamacpp", "response_format"), ("ollama", "response_format")],
)
async def test_a_type_has_each_servers_own_field(flavour: str, field: str) -> None:
    async with compatible([answers.text_stream("12")], flavour) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", type=int))
        assert await s["x"] == 12
    assert field in server.last.json


async def test_a_truncated_object_is_no_value() -> None:
    cut = answers.text_stream('{"value": [1,', finish_reason="length")
    await failure(opened([cut]), InvalidValue, schema=list[int])


async def test_select_takes_log_probabilities_where_each_choice_is_a_token() -> None:
    scored = answers.stream(
        answers.logprob_chunk("Well", -0.2, ("Well", -0.2), ("no", -1.5), ("yes", -2.5)),
        answers.ending("length"),
    )
    async with opened([scored, HELLO]) as (flow, server), flow.state() as s:
        s += (
            af.user("Hi")
            + af.assistant(af.select("x", ["yes", "no"]))
            + af.user("Why?")
            + af.assistant(af.gen("y"))
        )
        assert await s["x"] == "no"
        assert s["x"].choices == {"yes": -2.5, "no": -1.5}
        await s
    asked, last = (request.json for request in server.received)
    assert (asked["max_completion_tokens"], asked["logprobs"]) == (1, True)
    assert asked["top_logprobs"] >= 2
    assert last["messages"][1] == {"role": "assistant", "content": "no"}


async def test_a_scored_gen_takes_log_probabilities_unless_one_text_begins_another() -> None:
    scored = answers.stream(
        answers.logprob_chunk("Well", -0.2, ("Well", -0.2), ("2", -1.5), ("1", -2.5)),
        answers.ending("length"),
    )
    apart = af.gen("apart", regex="[12]", scored=True)
    nested = af.gen("nested", regex="1|12", scored=True)
    async with opened([scored, answers.text_stream('{"value":"12"}')]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(apart) + af.user("Hi") + af.assistant(nested)
        assert (await s[apart], s[apart].choices) == ("2", {"1": -2.5, "2": -1.5})
        assert await s[nested] == "12"
        assert (s[apart].decided_by, s[nested].decided_by) == ("logprobs", "text")
    schema = server.last.json["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["value"]["enum"] == ["1", "12"]


@pytest.mark.parametrize("first", [HELLO, answers.REFUSED_PARAMETER])
async def test_select_lets_the_model_write_a_choice(first: AnyAnswer) -> None:
    script = [first, answers.text_stream('{"value":"no"}'), answers.text_stream('{"value":"yes"}')]
    async with opened(script) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.select("x", ["yes", "no"]))
        s += af.user("Hi") + af.assistant(af.select("y", ["yes", "no"]))
        assert (await s["x"], await s["y"]) == ("no", "yes")
        assert s["x"].choices["no"] > s["x"].choices["yes"]
        assert s["x"].usage.output_tokens == (6 if first is HELLO else 3)
    schema = server.last.json["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["value"]["enum"] == ["yes", "no"]
    assert len(server.received) == 3  # the log-probabilities are not asked for again


@pytest.mark.parametrize(
    ("flavour", "fields"),
    [
        ("vllm", {"structured_outputs": {"choice": ["a.b", "c"]}}),
        ("sglang", {"regex": r"(a\.b|c)"}),
        ("llamacpp", {"grammar": 'root ::= "a.b" | "c"'}),
    ],
)
async def test_choices_have_each_servers_own_field(flavour: str, fields: dict[str, Any]) -> None:
    async with compatible([HELLO, answers.text_stream("c")], flavour) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.select("x", ["a.b", "c"]))
        assert await s["x"] == "c"
    assert server.last.json.items() >= fields.items()


VALUES: dict[str, Any] = {
    "min_tokens": 2,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {7: -1.0},
    "stop_token_ids": [7],
    "ignore_eos": True,
    "max_reasoning_tokens": 9,
    "logprobs": True,
    "top_logprobs": 2,
}
KINDS: dict[str, Any] = {
    "regex": {"regex": "a+"},
    "grammar": {"grammar": 'start: "a"'},
    "schema": {"schema": {"type": "integer"}},
    "tags": {"tags": [af.Tag("<a>", end="</a>", regex="b+")]},
}


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_request_has_exactly_the_features_that_the_table_claims(flavour: str) -> None:
    """The others are refused before anything is sent. `make test-peers` tries the claims on the servers."""
    claimed: list[str] = []
    async with compatible(lambda request: HELLO, flavour) as (flow, server):
        features = flow.capabilities
        logprobs = ("logprobs", "top_logprobs") if features.logprobs else ()
        known = {*(features.sampling or ()), *features.constraints, *logprobs}
        for name, options in {**{name: {name: value} for name, value in VALUES.items()}, **KINDS}.items():
            async with flow.state() as s:
                if name in known:
                    claimed.append(name)
                    continue
                with pytest.raises(NotSupported) as caught:
                    s += af.user("Hi") + af.assistant(af.gen("x", **options))
                assert name in KINDS or caught.value.param in (name, "logprobs")
        assert not server.received
        for name in [name for name in claimed if name in VALUES]:
            if name in ("logprobs", "top_logprobs"):
                continue
            async with flow.state() as s:
                s += af.user("Hi") + af.assistant(af.gen("x", **{name: VALUES[name]}))
                assert await s["x"] == "Hello"
            assert server.last.json.keys() & {name, FLAVOURS[flavour].params.get(name, name)}


async def test_llamacpp_gets_choices_in_its_own_notation() -> None:
    choice = 'a "b"\n\b\\€'
    async with (
        compatible([HELLO, answers.text_stream(choice)], "llamacpp") as (flow, server),
        flow.state() as s,
    ):
        s += af.user("Hi") + af.assistant(af.select("x", [choice, "a longer one"]))
        assert await s["x"] == choice
    assert server.last.json["grammar"] == r'root ::= "a \x22b\x22\x0a\x08\x5c€" | "a longer one"'


@pytest.mark.parametrize(
    ("flavour", "field"),
    [
        ("vllm", {"structured_outputs": {"regex": "[0-9]+"}}),
        ("sglang", {"regex": "[0-9]+"}),
        ("llamacpp", {"grammar": "root ::= [0-9]+"}),
    ],
)
async def test_a_regex_has_each_servers_own_field(flavour: str, field: dict[str, Any]) -> None:
    async with compatible([answers.text_stream("12")], flavour) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", regex="[0-9]+"))
        assert await s["x"] == "12"
    assert server.last.json.items() >= field.items()


async def test_long_constraints_are_translated_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, anyio_backend_name: str
) -> None:
    read, threads = gbnf.read_pattern, set[int]()

    def recorded(pattern: str) -> gbnf.GrammarPart:
        threads.add(threading.get_ident())
        return read(pattern)

    monkeypatch.setattr(gbnf, "read_pattern", recorded)
    async with compatible([answers.text_stream("ab")], "llamacpp") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", regex=f"a{'(b|c)?' * 400}({anyio_backend_name})?"))
        assert await s["x"] == "ab"
    assert server.last.json["grammar"].count("?") == 401
    assert threads
    assert threading.get_ident() not in threads


async def test_a_grammar_is_sent_in_the_notation_of_lark() -> None:
    """A grammar in GBNF is sent unchanged: the server recognises it by ``::=``."""
    grammars = ['start: "yes" | "no"', 'root ::= "yes" | "no"']
    async with compatible([answers.text_stream("no")] * 2) as (flow, server), flow.state() as s:
        for grammar in grammars:
            s += af.user("Hi") + af.assistant(af.gen("x", grammar=grammar))
            assert await s["x"] == "no"
        s += af.user("Hi") + af.assistant(af.gen("y", grammar='start: "::="'))  # the server would guess EBNF
        with pytest.raises(NotSupported):
            await s["y"]
    assert [request.json["structured_outputs"]["grammar"] for request in server.received] == grammars


@pytest.mark.parametrize(("flavour", "field"), [("sglang", "ebnf"), ("llamacpp", "grammar")])
async def test_a_grammar_is_translated_where_the_notation_differs(flavour: str, field: str) -> None:
    gbnf = 'root ::= "yes" | "no"'
    async with (
        compatible([answers.text_stream("no"), answers.text_stream("yes")], flavour) as (flow, server),
        flow.state() as s,
    ):
        s += af.user("Hi") + af.assistant(af.gen("x", grammar="start: /yes|no/"))
        s += af.user("Hi") + af.assistant(af.gen("y", grammar=gbnf))
        assert (await s["x"], await s["y"]) == ("no", "yes")
        s += af.user("Hi") + af.assistant(af.gen("z", grammar='start: "a"\n%ignore " "'))
        with pytest.raises(NotSupported):
            await s["z"]
    written = 'root ::= rule1\nrule1 ::= "yes" | "no"'
    assert [request.json[field] for request in server.received] == [written, gbnf]


async def test_a_pattern_without_an_equal_grammar_is_refused() -> None:
    await failure(compatible([], "llamacpp"), NotSupported, num_requests=0, regex=r"\b[0-9]+")


async def test_llamacpp_has_log_probabilities_of_plain_text_in_the_shape_of_chats() -> None:
    """The response has the format of llama.cpp's server b11434. ``logprobs: 0`` turns them off there."""
    token = {"id": 260, "token": " the", "bytes": [32, 116, 104, 101], "logprob": -1.5}
    choice = {"text": " the", "index": 0, "logprobs": {"content": [token | {"top_logprobs": [token]}]}}
    end = {"choices": [{"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}]}
    steps = [answers.event(found) for found in ({"choices": [choice]}, end)] + [answers.DONE]
    answer = Answer(steps, content_type=answers.EVENT_STREAM)
    async with compatible([answer, answer], "llamacpp") as (flow, server), flow.state() as s:
        s += "Once upon" + af.gen("x", logprobs=True, max_tokens=1)
        assert (await s["x"], s["x"].logprobs, s["x"].top_logprobs) == (" the", (-1.5,), None)
        s += af.gen("y", top_logprobs=1, max_tokens=1)
        assert await s["y"] == s["y"].top_logprobs[0][0].text == " the"
    assert [request.json["logprobs"] for request in server.received] == [1, 1]


@pytest.mark.parametrize("choice", ["required", "look"])
async def test_a_required_call_is_made_or_an_error(choice: Any) -> None:
    """llama.cpp's server ignores tools where the chat template has none."""
    look = af.tool(lambda **_: "", name="look", description="Looks.", parameters={"type": "object"})
    cut = answers.text_stream("He", finish_reason="length")
    async with compatible([HELLO, cut], "llamacpp") as (flow, _), flow.state() as s, flow.state() as other:
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[look], choice=choice))
        with pytest.raises(RunFailed):
            await s["x"]
        other += af.user("Hi") + af.assistant(af.reply("x", tools=[look], choice=choice))
        assert (await other["x"]).text == "He"
    async with compatible([], "ollama") as (flow, server), flow.state() as s:  # its API has no such field
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[look], choice=choice))
        with pytest.raises(NotSupported) as caught:
            await s["x"]
    assert caught.value.param == "choice"
    assert not server.received


async def test_llamacpp_has_no_log_probabilities_beside_tools() -> None:
    look = af.tool(lambda **_: "", name="look", description="Looks.", parameters={"type": "object"})
    async with (
        compatible([HELLO, answers.text_stream("no")], "llamacpp") as (flow, server),
        flow.state() as s,
    ):
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[look]))
        s += af.user("Hi") + af.assistant(af.select("y", ["yes", "no"]))
        assert await s["y"] == "no"  # written, not scored
        s += af.user("Hi") + af.assistant(af.gen("z", top_logprobs=1))
        with pytest.raises(NotSupported) as caught:
            await s["z"]
    assert caught.value.param == "logprobs"
    assert len(server.received) == 2


@pytest.mark.parametrize("flavour", ["ollama", "generic"])
async def test_a_grammar_is_refused_where_the_server_has_none(flavour: str) -> None:
    async with compatible([], flavour) as (flow, server), flow.state() as s:
        with pytest.raises(NotSupported):
            s += af.user("Hi") + af.assistant(af.gen("x", grammar='start: "yes" | "no"'))
    assert not server.received


async def test_an_answer_that_is_not_a_choice_fails_the_select() -> None:
    script = [HELLO, answers.text_stream('{"value":"maybe"}')]
    async with opened(script) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.select("x", ["yes", "no"]))
        with pytest.raises(RunFailed):
            await s["x"]


async def test_constraints_that_nobody_enforces_are_refused_before_anything_is_sent() -> None:
    async with opened([]) as (flow, server), flow.state() as s:
        with pytest.raises(NotSupported):
            s += af.user("Hi") + af.assistant(af.gen("x", regex="[0-9]+"))
        s += af.user("Hi") + af.assistant(af.gen("x", schema=dict[str, int]))
        with pytest.raises(NotSupported):
            await s["x"]
    assert server.received == []


async def test_wrong_answers_are_asked_for_again() -> None:
    script = [answers.text_stream("twelve"), answers.text_stream("1", "2"), HELLO]
    async with opened(script, on_unsupported="retry") as (flow, server), flow.state() as s:
        s += af.user("How many?") + af.assistant(af.gen("x", regex="[0-9]+"))
        assert [delta async for delta in s["x"]] == ["12"]
        assert (s["x"].usage.prompt_tokens, s["x"].usage.rejected_answers) == (18, 1)
        s += af.user("Go") + af.assistant(af.gen("y"))
        await s
    _, again, last = (request.json["messages"] for request in server.received)
    assert [message["role"] for message in again] == ["user", "assistant", "user"]
    assert again[1]["content"] == "twelve"
    assert [message["content"] for message in last] == ["How many?", "12", "Go"]


class Child(BaseModel):
    name: str = Field(max_length=5)
    age: int = Field(ge=0)


async def test_a_schema_is_sent_without_the_bounds_that_the_api_does_not_enforce() -> None:
    script = [answers.text_stream(f'{{"name":"{name}","age":7}}') for name in ("Anneliese", "Ann")]
    async with opened(script, on_unsupported="retry") as (flow, server), flow.state() as s:
        s += af.user("Who?") + af.assistant(af.gen("x", schema=Child))
        assert await s["x"] == Child(name="Ann", age=7)
        assert s["x"].usage.rejected_answers == 1
    for request in server.received:
        schema = request.json["response_format"]["json_schema"]["schema"]
        assert "maxLength" not in schema["properties"]["name"]
        assert schema["properties"]["age"]["type"] == "integer"
    assert "Anneliese" in server.last.json["messages"][1]["content"]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"regex": "[0-9]+"}, "x"),
        ({"schema": dict[str, int]}, '{"a": "b"}'),
        ({"schema": dict[str, int]}, "{"),
    ],
)
async def test_the_third_wrong_answer_is_an_error(options: dict[str, Any], wrong: str) -> None:
    opening = opened([answers.text_stream(wrong)] * 3, on_unsupported="retry")
    await failure(opening, InvalidValue, num_requests=3, **options)


async def test_forks_share_their_prefix() -> None:
    async with opened(lambda _: HELLO) as (flow, server), flow.state() as s:
        s += af.system("Be brief.")
        async with s.fork(3) as branches:
            for number, branch in enumerate(branches):
                branch += af.user(f"Question {number}") + af.assistant(af.gen("x"))
        await s
        assert [await branch["x"] for branch in branches] == ["Hello"] * 3
    sent = [request.json for request in server.received]
    assert sorted(one["messages"][1]["content"] for one in sent) == ["Question 0", "Question 1", "Question 2"]
    assert len({one["prompt_cache_key"] for one in sent}) == 1


@pytest.mark.parametrize("flavour", ["vllm", "sglang", "llamacpp"])
async def test_text_in_the_assistants_turn_is_continued_where_the_server_can(flavour: str) -> None:
    async with compatible([HELLO], flavour) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant("He said: ", af.gen("x"))
        assert await s["x"] == "Hello"
    assert server.last.json["messages"][-1] == {"role": "assistant", "content": "He said: "}
    assert server.last.json["continue_final_message"] is True
    assert server.last.json["add_generation_prompt"] is False


async def test_turns_of_the_user_are_refused() -> None:
    async with opened([]) as (flow, server), flow.state() as s:
        s += af.user("Hi ", af.gen("x"))
        with pytest.raises(NotSupported):
            await s["x"]
    assert server.received == []


async def test_a_gen_after_turns_is_the_assistants() -> None:
    async with opened([HELLO, HELLO]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.gen("x") + af.user("Go") + af.gen("y")
        await s
    assert [message["role"] for message in server.last.json["messages"]] == ["user", "assistant", "user"]


async def test_the_only_model_of_a_server_is_found() -> None:
    listed = Answer(b'{"object": "list", "data": [{"id": "only", "object": "model"}]}')
    async with fake_server([listed, HELLO]) as server:
        backend = OpenAICompatible(f"{server.url}/v1")
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            assert await s["x"] == "Hello"
        assert server.received[0].path == "/v1/models"
        assert server.last.json["model"] == "only"
    several = Answer(b'{"data": [{"id": "one"}, {"id": "two"}]}')
    for answer in (several, Answer(b'{"data": []}')):
        async with fake_server([answer]) as server:
            with pytest.raises(UnknownModel) as caught:
                async with af.session(backend=OpenAICompatible(f"{server.url}/v1")):
                    pass
            assert caught.value.param == "model"


async def test_the_key_is_removed_from_messages_and_reprs() -> None:
    error = await failure(opened([answers.error(401, f"Incorrect key {KEY}")]), NotAuthorized)
    assert KEY not in str(error)
    backend = OpenAI("gpt-4o", api_key=KEY, base_url="http://ann:password@host/v1")
    shown = f"{backend!r} {backend._settings!r}"
    assert KEY not in shown
    assert "password" not in shown
    assert KEY not in repr(OpenAICompatible("http://ann:pw@host/v1", api_key=KEY))
    assert "pw" not in repr(OpenAICompatible("http://ann:pw@host/v1", api_key=KEY))


async def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(NotAuthorized):
        OpenAI("gpt-4o")
    async with fake_server([HELLO]) as server:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1/")
        monkeypatch.setenv("OPENAI_ORG_ID", "org")
        monkeypatch.setenv("OPENAI_PROJECT_ID", "proj")
        async with af.session(backend=OpenAI("gpt-4o")) as flow, flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            await s
        headers = server.last.headers
    assert headers["authorization"] == f"Bearer {KEY}"
    assert (headers["openai-organization"], headers["openai-project"]) == ("org", "proj")
    assert server.last.path == "/v1/chat/completions"


async def test_a_server_that_is_not_there() -> None:
    async with fake_server([]) as gone:
        url = f"{gone.url}/v1"
    backend = OpenAICompatible(url, "m", flavour="generic", max_retries=0)
    await failure(api_session([], lambda _: backend), ServerUnreachable, num_requests=0)


async def test_a_stream_without_done_is_complete_with_its_finish_reason() -> None:
    answer = answers.stream(answers.text_chunks("Hi"), answers.ending(), done=False)
    async with opened([answer]) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        assert await s["x"] == "Hi"


async def test_the_key_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with fake_server([HELLO, answers.WRONG_KEY]) as server:
        url = server.url.replace("http://", "http://ann:password@")
        backend = OpenAICompatible(f"{url}/v1", "m", flavour="generic", api_key=KEY, max_retries=0)
        async with af.session(backend=backend) as flow, flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            await s["x"]
            s += af.user("Hi") + af.assistant(af.gen("y"))
            with pytest.raises(NotAuthorized):
                await s["y"]
    assert caplog.text
    assert KEY not in caplog.text
    assert "password" not in caplog.text


async def test_a_user_and_a_password_are_sent() -> None:
    def backend(url: str) -> OpenAICompatible:
        url = url.replace("http://", "http://ann:p%40ss@")
        return OpenAICompatible(f"{url}/v1", "m", flavour="generic")

    async with api_session([HELLO], backend) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await s["x"]
    assert server.last.headers["authorization"] == "Basic YW5uOnBAc3M="


async def test_a_map_goes_on_after_an_error() -> None:
    async def ask(s: af.State, question: str) -> str:
        s += af.user(question) + af.assistant(af.gen("x"))
        return await s["x"]

    def answer(request: Received) -> AnyAnswer:
        return answers.TOO_LONG if request.json["messages"][0]["content"] == "two" else HELLO

    async with opened(answer) as (flow, _):
        results = await flow.map(ask, ["one", "two", "three"], on_error="return")
    assert [type(result) for result in results] == [str, PromptTooLong, str]


async def test_a_recording_is_replayed_without_the_server(tmp_path: Path) -> None:
    async def ask(s: af.State) -> Any:
        s += af.user("Hi") + af.assistant(af.gen("x", top_logprobs=1))
        return await s["x"], s["x"].usage, s["x"].top_logprobs

    file = tmp_path / "run.jsonl"
    answer = answers.stream(answers.logprob_chunk("Hi", -0.5, ("Hi", -0.5)), answers.ending())
    async with fake_server([answer]) as server:
        backend = OpenAI("gpt-4o", base_url=f"{server.url}/v1", api_key=KEY)
        async with af.session(backend=backend, record=file) as flow:
            found = await flow.run(ask)
    async with af.session(backend=af.Replay(file)) as flow:
        assert await flow.run(ask) == found
    assert KEY not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(("flavour", "most"), [("vllm", 2**63), ("llamacpp", 2**31), ("generic", 2**31)])
async def test_seeds_fit_the_server(flavour: str, most: int) -> None:
    async with compatible([HELLO, HELLO], flavour) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", temperature=1.0)) + af.user("Go")
        s += af.assistant(af.gen("y", temperature=1.0, seed=5))
        await s
    derived, chosen = (request.json["seed"] for request in server.received)
    assert 0 <= derived < most
    assert chosen == 5


@pytest.mark.parametrize("options", [{"stop": "lo"}, {"stop_regex": "l+o"}])
async def test_stops_that_a_model_does_not_apply_cut_the_text_here(options: dict[str, Any]) -> None:
    async with opened([HELLO], model="o3") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", **options))
        assert await s["x"] in ("Hel", "He")
        assert s["x"].finish_reason == "stop"
        assert "stop" not in server.last.json


@pytest.mark.parametrize(
    ("options", "param"),
    [({"temperature": 0.5}, "temperature"), ({"top_p": 0.5}, "top_p"), ({"logprobs": True}, "logprobs")],
)
async def test_parameters_that_a_reasoning_model_refuses(options: dict[str, Any], param: str) -> None:
    async with opened([], model="o3") as (flow, server), flow.state() as s:
        with pytest.raises(NotSupported) as caught:
            s += af.user("Hi") + af.assistant(af.gen("x", **options))
    assert caught.value.param == param
    assert server.received == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "stop"),  # the server does not say
        ({"stop_reason": None}, "eos"),
        ({"stop_reason": "x"}, "stop"),
        ({"matched_stop": 151645}, "eos"),
        ({"matched_stop": 7}, "stop"),
    ],
)
async def test_a_server_that_says_what_ended_the_text(fields: dict[str, Any], reason: str) -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", **fields}]}
    script = [answers.stream(answers.text_chunks("a"), answers.event(end))]
    async with compatible(script) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", stop="x", stop_token_ids=[7]))
        await s["x"]
        assert s["x"].finish_reason == reason


async def test_contents_in_parts() -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "Hmm."}]},
        {"type": "text", "text": "Yes"},
        {"type": "unknown"},
    ]
    delta = {"choices": [{"index": 0, "delta": {"content": parts, "reasoning": {"effort": 1}}}]}
    script = [answers.stream(answers.event(delta), answers.ending())]
    async with compatible(script) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        assert (await s["x"], s["x"].reasoning) == ("Yes", "Hmm.")
