"""OpenAI's responses API as a backend, against a fake server whose answers have types of OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import BaseModel, TypeAdapter
from support.apis import openai_answers
from support.apis import responses_answers as answers
from support.apis.api_sessions import failure, openai_session
from support.apis.fake_server import AnyAnswer, FakeServer, Script

import agentflow as af
from agentflow.backends.apis.openai import OpenAI
from agentflow.errors import (
    AgentflowError,
    BadArgument,
    EngineFailed,
    NotAuthorized,
    NotSupported,
    Overloaded,
    PromptTooLong,
    RateLimited,
    RequestRefused,
    RunFailed,
)

pytestmark = pytest.mark.anyio

REQUESTS = TypeAdapter(ResponseCreateParamsStreaming)
HELLO = answers.text_stream("He", "llo")


@asynccontextmanager
async def opened(
    script: Script, model: str = "gpt-4o", **options: Any
) -> AsyncIterator[tuple[af.Session, FakeServer]]:
    """A session with OpenAI's backend on a fake server. All requests have the type of OpenAI's client."""
    async with openai_session(script, model, **{"api": "responses", **options}) as (flow, server):
        yield flow, server
    for request in server.received:
        if request.path == "/v1/responses":
            REQUESTS.validate_python(request.json)
            assert request.json.keys() <= ResponseCreateParamsStreaming.__annotations__.keys()


async def test_a_conversation_is_sent_and_its_answer_streamed() -> None:
    second = answers.text_stream("Bye", usage=answers.usage(20, 1, cached=16))
    async with opened([HELLO, second]) as (flow, server), flow.state() as s:
        s += af.system("Be brief.") + af.user("Hi")
        s += af.assistant(af.gen("x", max_tokens=90, temperature=0.5, top_p=0.9))
        deltas = [delta async for delta in s["x"]]
        s += af.user("Go") + af.assistant(af.gen("y"))
        assert await s["y"] == "Bye"
        assert "".join(deltas) == "Hello"
        assert (s["x"].finish_reason, s["x"].usage.prompt_tokens, s["x"].usage.output_tokens) == ("eos", 9, 3)
        assert s["y"].usage.cached_tokens == 16
        stats = await flow.stats()
    first, last = server.received
    assert first.path == "/v1/responses"
    assert first.headers["authorization"] == "Bearer sk-1"
    sent = first.json
    assert (sent["model"], sent["stream"], sent["store"]) == ("gpt-4o", True, False)
    assert (sent["max_output_tokens"], sent["temperature"], sent["top_p"]) == (90, 0.5, 0.9)
    assert sent["input"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert not {"include", "reasoning", "text", "tools", "instructions", "previous_response_id"} & sent.keys()
    assert last.json["input"] == [
        *sent["input"],
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Go"},
    ]
    assert last.json["prompt_cache_key"] == sent["prompt_cache_key"]
    assert last.body.startswith(first.body.partition(b"]")[0])  # equal to the byte, for the provider's cache
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (29, 16, 4)


@pytest.mark.parametrize(
    ("model", "api", "path"),
    [
        ("gpt-4o", None, "/v1/chat/completions"),
        ("gpt-4o", "responses", "/v1/responses"),
        ("gpt-5-pro", None, "/v1/responses"),
    ],
)
async def test_the_api_that_serves_the_model_is_the_default(model: str, api: Any, path: str) -> None:
    script = [openai_answers.text_stream("Hi") if "chat" in path else answers.text_stream("Hi")]
    async with opened(script, model, api=api) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        assert await s["x"] == "Hi"
    assert server.last.path == path


async def test_an_api_that_does_not_serve_the_model_is_refused() -> None:
    with pytest.raises(NotSupported) as caught:
        async with opened([], "gpt-5-pro", api="chat"):
            pass
    assert caught.value.param == "model"
    with pytest.raises(BadArgument) as wrong:
        OpenAI("gpt-4o", api_key="sk-1", api="completions")  # type: ignore[arg-type]
    assert wrong.value.param == "api"


async def test_a_model_has_the_features_of_the_one_that_it_is_like() -> None:
    async with opened([HELLO], "my-deployment", like="gpt-4o") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", temperature=0.5))
        await s
    assert (server.last.json["model"], server.last.json["temperature"]) == ("my-deployment", 0.5)
    for like in ("gpt-0", 7):
        with pytest.raises(BadArgument) as caught:
            OpenAI("m", api_key="sk-1", like=like)  # type: ignore[arg-type]
        assert caught.value.param == "like"


async def test_stops_are_applied_to_the_received_text() -> None:
    endless = answers.stream(answers.message("one ", "two <", "/end> three"))
    async with opened([endless]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", stop=["</end>"]))
        assert "".join([delta async for delta in s["x"]]) == "one two "
        assert s["x"].finish_reason == "stop"
        assert s["x"].usage.output_tokens > 0
    assert "stop" not in server.last.json


async def test_a_limit_ends_the_text() -> None:
    script = [answers.text_stream("He", incomplete="max_output_tokens")]
    async with opened(script) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", max_tokens=16))
        assert (await s["x"], s["x"].finish_reason) == ("He", "length")


@pytest.mark.parametrize(
    ("options", "param"),
    [({"seed": 3}, "seed"), ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"top_k": 3}, "top_k")],
)
async def test_parameters_that_the_api_does_not_have(options: dict[str, Any], param: str) -> None:
    async with opened([]) as (flow, server), flow.state() as s:
        with pytest.raises(NotSupported) as caught:
            s += af.user("Hi") + af.assistant(af.gen("x", **options))
    assert caught.value.param == param
    assert server.received == []


async def test_reasoning_is_given_back_as_it_was() -> None:
    first = answers.stream(
        answers.reasoning(["Hm", "m."], encrypted="gAAA"),
        answers.message("Look. ", index=1, phase="commentary"),
        answers.message("Yes", index=2, phase="final_answer"),
        answers.ending(usage=answers.usage(9, 8, reasoning=5)),
    )
    async with opened([first, HELLO], "gpt-5.5") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", stream_reasoning=True)) + af.user("Go")
        assert "".join([delta async for delta in s["x"].reasoning_deltas()]) == "Hmm."
        s += af.assistant(af.gen("y"))
        await s
        assert (await s["x"], s["x"].reasoning) == ("Look. Yes", "Hmm.")
        assert s["x"].usage.reasoning_tokens == 5
    asked, again = (request.json for request in server.received)
    assert asked["include"] == again["include"] == ["reasoning.encrypted_content"]
    assert asked["reasoning"] == {"summary": "auto"}
    assert "reasoning" not in again
    reasoning, commentary, answer = again["input"][1:-1]
    assert reasoning == {
        "type": "reasoning",
        "id": "rs_0",
        "summary": [{"type": "summary_text", "text": "Hmm."}],
        "encrypted_content": "gAAA",
    }
    assert (commentary["phase"], answer["phase"]) == ("commentary", "final_answer")
    assert [part["text"] for part in answer["content"]] == ["Yes"]


async def test_a_text_that_was_cut_is_given_back_without_its_reasoning() -> None:
    first = answers.stream(
        answers.reasoning([], encrypted="gAAA"), answers.message("Yes. No", index=1), answers.ending()
    )
    async with opened([first, HELLO], "gpt-5.5") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", stop=".")) + af.user("Go") + af.assistant(af.gen("y"))
        await s
        assert await s["x"] == "Yes"
    assert server.last.json["input"][1] == {"role": "assistant", "content": "Yes"}


async def test_reasoning_can_be_turned_off() -> None:
    async with opened([HELLO], model="gpt-5.6") as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", temperature=0.5, max_reasoning_tokens=0))
        await s["x"]
        assert server.last.json["reasoning"] == {"effort": "none"}
        assert server.last.json["temperature"] == 0.5
        assert "include" not in server.last.json


async def test_log_probabilities_cover_the_text() -> None:
    answer = answers.stream(
        answers.message(
            answers.logprob("A", -0.1, ("A", -0.1), ("B", -2.5)),
            answers.logprob("é", -0.2, ("é", -0.2), ("C", -2.0)),
            answers.logprob("END", -0.3, ("END", -0.3)),
        ),
        answers.ending(),
    )
    async with opened([answer]) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", top_logprobs=2, stop="END"))
        assert await s["x"] == "Aé"
        assert s["x"].logprobs == (-0.1, -0.2)
        assert [[top.text for top in tops] for tops in s["x"].top_logprobs] == [["A", "B"], ["é", "C"]]
    assert server.last.json["include"] == ["message.output_text.logprobs"]
    assert server.last.json["top_logprobs"] == 2


def weather(city: str) -> str:
    """The weather in a city."""
    return f"12 degrees in {city}"


async def test_tools_are_called_and_their_results_sent() -> None:
    """A model that reasons calls tools, too; its reasoning goes back with the call."""
    called = answers.stream(
        answers.reasoning([], encrypted="gAAA"),
        answers.message("I ", "look.", index=1),
        answers.call("c1", "weather", '{"city"', ': "Oslo"}', index=2),
        answers.ending(),
    )
    async with opened([called, HELLO], "gpt-5.6") as (flow, server), flow.state() as s:
        s += af.user("How is it in Oslo?")
        assert await af.act(s, tools=[weather]) == "Hello"
    first, second = (request.json for request in server.received)
    [tool] = first["tools"]
    assert (tool["type"], tool["name"], tool["strict"]) == ("function", "weather", True)
    assert tool["parameters"]["additionalProperties"] is False
    reasoning, text, call, result = second["input"][1:]
    assert (reasoning["type"], text["content"][0]["text"]) == ("reasoning", "I look.")
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "c1", "weather")
    assert call["arguments"] == '{"city": "Oslo"}'
    assert result == {"type": "function_call_output", "call_id": "c1", "output": "12 degrees in Oslo"}


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ("auto", {}),
        ("required", {"tool_choice": "required"}),
        ("weather", {"tool_choice": {"type": "function", "name": "weather"}}),
    ],
)
async def test_a_choice_among_tools(choice: str, fields: dict[str, Any]) -> None:
    script = [answers.stream(answers.call("c1", "weather", "{}"), answers.ending()), HELLO]
    async with opened(script) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[weather], choice=choice, parallel=False))
        await s["x"]
        s += af.user("Hi") + af.assistant(af.gen("y"))
        await s
    asked, last = (request.json for request in server.received)
    assert asked["parallel_tool_calls"] is False
    assert {"tool_choice": asked["tool_choice"]} == fields if fields else "tool_choice" not in asked
    assert last["tool_choice"] == "none"


async def test_a_call_where_none_is_allowed_is_an_error() -> None:
    called = answers.stream(answers.call("c1", "weather", "{}"), answers.ending())
    await failure(opened([called]), RunFailed)


async def test_conversations_are_sent_as_items() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "cold", "tool_call_id": "c1"},
    ]
    async with opened([HELLO]) as (flow, server), flow.state() as s:
        s += af.conversation(messages) + af.gen("x")
        assert await s["x"] == "Hello"
    assert server.last.json["input"] == [
        messages[0],
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "cold"},
    ]


class Report(BaseModel):
    title: str
    pages: int = 1


async def test_schemas_are_sent_in_the_strict_subset() -> None:
    script = [answers.text_stream('{"title":"A"', ',"pages":3}'), answers.text_stream('{"value":[1, 2]}')]
    async with opened(script) as (flow, server), flow.state() as s:
        report = af.gen("x", schema=Report)
        s += af.user("Hi") + af.assistant(report) + af.user("Hi")
        s += af.assistant(af.gen("y", schema=list[int]))
        assert await s[report] == Report(title="A", pages=3)
        assert await s["y"] == [1, 2]
    form = server.received[0].json["text"]["format"]
    assert (form["type"], form["strict"]) == ("json_schema", True)
    assert form["schema"]["required"] == ["title", "pages"]
    assert form["name"]


async def test_select_takes_log_probabilities_or_lets_the_model_write_a_choice() -> None:
    scored = answers.stream(
        answers.message(answers.logprob("Well", -0.2, ("no", -1.5), ("yes", -2.5)), "!"),
        answers.ending("max_output_tokens"),
    )
    script = [scored, HELLO, answers.text_stream('{"value":"b"}')]
    async with opened(script) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.select("x", ["yes", "no"])) + af.user("And?")
        s += af.assistant(af.select("y", ["a", "b"]))
        assert (await s["x"], await s["y"]) == ("no", "b")
        assert s["x"].choices == {"yes": -2.5, "no": -1.5}
    asked, _, last = (request.json for request in server.received)
    assert asked["max_output_tokens"] == 16  # the fewest that the API accepts
    assert last["text"]["format"]["schema"]["properties"]["value"]["enum"] == ["a", "b"]
    assert last["input"][1] == {"role": "assistant", "content": "no"}


async def test_one_call_answers_several_gens_of_a_turn() -> None:
    async with opened([answers.text_stream("Name: ", "Ada\n", "Age: 36")]) as (flow, server):
        async with flow.state() as s:
            s += af.user("Who?")
            s += af.assistant("Name: ", af.gen("name", stop="\n"), "\nAge: ", af.gen("age"))
            assert [await s["name"], await s["age"]] == ["Ada", "36"]
        assert len(server.received) == 1


async def test_text_without_turns_and_continued_turns_are_refused() -> None:
    async with opened([], speculate=False) as (flow, server):
        for begun in ("Once upon a time" + af.gen("x"), af.user("Hi") + af.assistant("I ", af.gen("x"))):
            async with flow.state() as s:
                s += begun
                with pytest.raises(NotSupported):
                    await s["x"]
    assert server.received == []


@pytest.mark.parametrize(
    ("answer", "kind", "param"),
    [
        (openai_answers.WRONG_KEY, NotAuthorized, None),
        (openai_answers.TOO_LONG, PromptTooLong, None),
        (openai_answers.BROKEN, EngineFailed, None),
        (openai_answers.rate_limited(s=2.5), RateLimited, None),
        (
            openai_answers.error(
                400, "Expected a value >= 16.", code="integer_below_min_value", param="max_output_tokens"
            ),
            RequestRefused,
            "max_tokens",
        ),
        (
            openai_answers.error(400, "Not verified.", code="unsupported_value", param="reasoning.summary"),
            NotSupported,
            "stream_reasoning",
        ),
        (answers.stream(answers.refusal("I ", "cannot."), answers.ending()), RequestRefused, None),
        (answers.text_stream("Hi", incomplete="content_filter"), RequestRefused, None),
        (answers.stream(answers.failed("server_error", "Oh")), EngineFailed, None),
        (answers.stream(answers.failed("rate_limit_exceeded", "Slow.")), RateLimited, None),
        (answers.stream(answers.failed("invalid_prompt", "No.")), RequestRefused, None),
        (answers.stream(answers.error_event("rate_limit_exceeded", "Slow.")), RateLimited, None),
        (answers.stream(answers.error_event(None, "Oh")), EngineFailed, None),
        (
            answers.stream(openai_answers.error_event("Overloaded", kind="overloaded_error")),
            Overloaded,
            None,
        ),
        (
            answers.stream(b"event: error\n" + openai_answers.error_event("Full", kind="overloaded_error")),
            Overloaded,
            None,
        ),
    ],
)
async def test_errors_of_the_api(answer: AnyAnswer, kind: type[AgentflowError], param: str | None) -> None:
    error = await failure(opened([answer]), kind)
    assert type(error) is kind
    assert error.param == param
