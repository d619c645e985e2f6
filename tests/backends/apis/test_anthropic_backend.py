"""The backend of Anthropic's messages API against a fake server, whose answers have types of Anthropic's
client. Requests are checked against its types too."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from anyio.lowlevel import checkpoint
from pydantic import BaseModel, Field, TypeAdapter
from support.apis import anthropic_answers as answers
from support.apis.api_sessions import anthropic_session, failure
from support.apis.fake_server import (
    Answer,
    AnyAnswer,
    FakeServer,
    Hold,
    Received,
    Script,
    fake_server,
)

import agentflow as af
from agentflow.backends.apis.anthropic import Anthropic
from agentflow.backends.apis.capability_table import model_facts
from agentflow.backends.apis.generation.api_format import Call
from agentflow.backends.apis.generation.conversation import ApiContext
from agentflow.backends.apis.messages.anthropic_messages import AnthropicMessages
from agentflow.backends.apis.messages.anthropic_stream import AnthropicErrors
from agentflow.errors import (
    BadArgument,
    EngineFailed,
    NotAuthorized,
    NotSupported,
    RequestRefused,
)
from agentflow.protocol.chat import CalledTool, Conversation, Message, ToolSpec
from agentflow.protocol.sampling import GenParams

pytestmark = pytest.mark.anyio

KEY = "sk-ant-very-secret"
OLD = "claude-opus-4-5"  # it continues text, and takes a temperature
NEW = "claude-opus-5-5"  # it always reasons
QUIET = "claude-opus-4-8"  # it reasons on request, without a budget
HELLO = answers.text_stream("Hel", "lo")
FORMAT = AnthropicMessages(OLD, model_facts("anthropic", OLD), AnthropicErrors("Anthropic", OLD))
PARAMS = TypeAdapter(MessageCreateParamsStreaming)
KNOWN = MessageCreateParamsStreaming.__required_keys__ | MessageCreateParamsStreaming.__optional_keys__


@asynccontextmanager
async def opened(
    script: Script, model: str = OLD, **options: Any
) -> AsyncIterator[tuple[af.Session, FakeServer]]:
    """A session on a fake server."""
    async with anthropic_session(script, model, api_key=KEY, **options) as (flow, server):
        yield flow, server
        for request in server.received:
            is_old = request.headers["anthropic-version"] == "2023-06-01"  # the client speaks the later one
            assert request.json.keys() <= (KNOWN | {"temperature", "top_p", "top_k"} if is_old else KNOWN)
            PARAMS.dump_json(PARAMS.validate_python(request.json))  # lists are validated during serialisation


async def asked(*script: AnyAnswer, model: str = OLD, options: Any = None, **params: Any) -> Any:
    """The body of a request for one gen."""
    async with opened(script or [HELLO], model, **(options or {})) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", **params))
        await s
    return server.last.json


def texts(message: Any) -> list[str]:
    return [block["text"] for block in message["content"] if block["type"] == "text"]


async def test_an_unset_limit_of_tokens_is_that_of_the_model() -> None:
    assert (await asked())["max_tokens"] == 64_000
    assert (await asked(model="claude-next"))["max_tokens"] == 4_096  # at another address than Anthropic's


@pytest.mark.parametrize(("model", "version"), [(OLD, "2023-06-01"), (NEW, "2026-10-21")])
async def test_models_with_sampling_parameters_need_the_version_that_has_them(
    model: str, version: str
) -> None:
    async with opened([HELLO], model) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await s
    assert server.last.headers["anthropic-version"] == version


async def test_only_parameters_that_are_set_are_sent() -> None:
    plain = await asked()
    assert plain.keys() == {"model", "messages", "max_tokens", "stream"}
    sent = await asked(stop=["END", "\n\n"], top_k=5, top_p=0.5)
    assert (sent["stop_sequences"], sent["top_k"], sent["top_p"]) == (["END"], 5, 0.5)


@pytest.mark.parametrize(
    ("model", "params", "param"),
    [
        (NEW, {"temperature": 0.5}, "temperature"),
        (NEW, {"top_p": 0.5}, "top_p"),
        (NEW, {"top_k": 5}, "top_k"),
        (OLD, {"temperature": 0.5, "top_p": 0.5}, "top_p"),
        (OLD, {"temperature": 1.5}, "temperature"),
        (OLD, {"frequency_penalty": 0.5}, "frequency_penalty"),
        (OLD, {"max_tokens": 64_001}, "max_tokens"),
        (OLD, {"max_reasoning_tokens": 100}, "max_reasoning_tokens"),
        (OLD, {"max_reasoning_tokens": 2000, "max_tokens": 2000}, "max_reasoning_tokens"),
        (OLD, {"max_reasoning_tokens": 2000, "temperature": 0.5}, "temperature"),
        (NEW, {"max_reasoning_tokens": 2000}, "max_reasoning_tokens"),
        (NEW, {"max_reasoning_tokens": 0}, "max_reasoning_tokens"),
        ("claude-3-opus", {"max_reasoning_tokens": 2000}, "max_reasoning_tokens"),
    ],
)
async def test_a_refused_parameter_is_named_before_anything_is_sent(
    model: str, params: Any, param: str
) -> None:
    error = await failure(opened([], model), NotSupported, num_requests=0, **params)
    assert error.param == param
    assert model in str(error)


@pytest.mark.parametrize(
    ("model", "options", "params", "thinking"),
    [
        (OLD, {}, {}, None),
        (OLD, {"reasoning": False}, {}, None),
        (OLD, {"reasoning": True}, {"max_tokens": 4000}, {"type": "enabled", "budget_tokens": 2000}),
        (OLD, {}, {"max_reasoning_tokens": 3000}, {"type": "enabled", "budget_tokens": 3000}),
        (OLD, {"reasoning": True}, {"max_reasoning_tokens": 0}, None),
        (QUIET, {}, {}, None),
        (QUIET, {"reasoning": True}, {}, {"type": "adaptive", "display": "summarized"}),
        (NEW, {}, {}, {"type": "adaptive", "display": "summarized"}),
        ("claude-opus-5", {"reasoning": False}, {}, {"type": "disabled"}),
        ("claude-sonnet-5-5", {}, {"max_reasoning_tokens": 0}, {"type": "between_tools"}),
    ],
)
async def test_reasoning_is_turned_on_and_off(model: str, options: Any, params: Any, thinking: Any) -> None:
    assert (await asked(model=model, options=options, **params)).get("thinking") == thinking


async def test_an_effort_is_sent() -> None:
    assert (await asked(model=NEW, options={"effort": "low"}))["output_config"] == {"effort": "low"}


@pytest.mark.parametrize(
    ("stop_reason", "expected"),
    [
        ("end_turn", "eos"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
    ],
)
async def test_stop_reasons(stop_reason: Any, expected: str) -> None:
    async with opened([answers.text_stream("x", stop_reason=stop_reason)]) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        await s
        assert s["x"].finish_reason == expected


async def test_a_refusal_is_an_error_with_its_reason() -> None:
    refused = answers.text_stream("I ", stop_reason="refusal", refusal="It is dangerous.")
    error = await failure(opened([refused]), RequestRefused)
    assert "It is dangerous." in str(error)


async def test_an_unknown_stop_reason_is_an_error() -> None:
    error = await failure(opened([answers.text_stream("x", stop_reason="pause_turn")]), EngineFailed)
    assert "pause_turn" in str(error)


async def test_reasoning_is_reported_and_sent_back_as_it_came() -> None:
    reasoned = answers.stream(
        answers.beginning(),
        answers.thinking_block("Let me ", "see.", signature="c2ln"),
        answers.redacted_block("aGlkZGVu", index=1),
        answers.text_block("One.", index=2),
        answers.thinking_block("More.", signature="b3RoZXI=", index=3),
        answers.text_block(" Two.", index=4),
        answers.ending(output=30, thinking=20),
    )
    async with opened([reasoned, HELLO, HELLO], NEW) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", stream_reasoning=True))
        assert await s["x"] == "One. Two."
        assert (s["x"].reasoning, s["x"].usage.reasoning_tokens) == ("Let me see.More.", 20)
        s += af.user("Go")
        branches = s.fork(2)
        for branch in branches:
            branch += af.user("on") + af.assistant(af.gen("y"))
        await branches
    _, *later = server.received
    for request in later:
        assert request.json["messages"][1]["content"] == [
            {"type": "thinking", "thinking": "Let me see.", "signature": "c2ln"},
            {"type": "redacted_thinking", "data": "aGlkZGVu"},
            {"type": "text", "text": "One."},
            {"type": "thinking", "thinking": "More.", "signature": "b3RoZXI="},
            {"type": "text", "text": " Two."},
        ]


@af.tool
async def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


async def test_tools_are_called_and_their_results_sent_back() -> None:
    called = answers.stream(
        answers.beginning(),
        answers.thinking_block("I need both.", signature="c2ln"),
        answers.text_block("I look.", index=1),
        answers.call_block("toolu_1", "weather", '{"city":', ' "Oslo"}', index=2),
        answers.call_block("toolu_2", "weather", '{"city": "Rome"}', index=3),
        answers.ending("tool_use"),
    )
    async with opened([called, HELLO], NEW) as (flow, server), flow.state() as s:
        s += af.user("The weather in Oslo and Rome?")
        assert await af.act(s, tools=[weather]) == "Hello"
    first, last = server.received
    (tool,) = first.json["tools"]
    assert (tool["name"], tool["description"]) == ("weather", "The weather of a city.")
    assert tool["strict"] is True
    assert tool["input_schema"]["required"] == ["city"]
    assert "tool_choice" not in first.json
    user, assistant, results = last.json["messages"]
    assert [block["type"] for block in assistant["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert assistant["content"][2]["input"] == {"city": "Oslo"}
    assert (user["role"], results["role"]) == ("user", "user")
    assert results["content"] == [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain in Oslo."},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "Rain in Rome."},
    ]


async def test_as_many_tools_are_strict_as_the_api_allows() -> None:
    """The program checks the arguments of the others."""
    member = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    plain = {"type": "object", "properties": {"a": {"type": "string"}}}
    wide = {"type": "object", "properties": {f"a{number}": member for number in range(5)}}
    for parameters, expected in ((plain, 20), (wide, 1)):
        tools = tuple([ToolSpec(f"tool{number}", "", parameters) for number in range(25)])
        context = ApiContext()
        context.converse(Conversation((Message("user", "Hi"),), tools))
        sent = json.loads(FORMAT.request(context, Call(GenParams(), is_reply=True)).body)["tools"]
        assert len(sent) == 25
        assert [tool.get("strict", False) for tool in sent] == [number < expected for number in range(25)]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", None),
        ("required", {"type": "any"}),
        ("weather", {"type": "tool", "name": "weather"}),
        ("none", {"type": "none"}),
    ],
)
async def test_choices_among_tools(choice: str, expected: Any) -> None:
    answer = answers.call_stream(("toolu_1", "weather", ['{"city": "Oslo"}']))
    async with opened([answer]) as (flow, server), flow.state() as s:
        s += af.user("Oslo?") + af.assistant(af.reply("x", tools=[weather], choice=choice))
        await s
    assert server.last.json.get("tool_choice") == expected


async def test_a_model_that_cannot_be_made_to_call_says_so() -> None:
    async with opened([], NEW) as (flow, server), flow.state() as s:
        s += af.user("Oslo?") + af.assistant(af.reply("x", tools=[weather], choice="required"))
        with pytest.raises(NotSupported) as caught:
            await s
    assert NEW in str(caught.value)
    assert not server.received


async def test_arguments_that_are_cut_are_sent_back_as_text() -> None:
    """The API accepts only objects, so truncated arguments go into its field for invalid JSON."""
    cut = CalledTool("toolu_1", "weather", '{"city": "Os')
    messages = (
        Message("user", "Oslo?"),
        Message("assistant", "", generated=True, tool_calls=(cut,)),
        Message("tool", "", tool_call_id="toolu_1"),
    )
    context = ApiContext()
    context.converse(Conversation(messages))
    request = FORMAT.request(context, Call(GenParams()))
    _, called, results = json.loads(request.body)["messages"]
    assert called["content"][0]["input"] == {"INVALID_JSON": '{"city": "Os'}
    assert results["content"] == [{"type": "tool_result", "tool_use_id": "toolu_1"}]


async def test_a_turn_is_continued_where_the_model_can() -> None:
    """The API refuses white space at the end of the text, which the model then writes itself."""
    first, second = answers.text_stream("\n", "\nParis", " END."), answers.text_stream(" Rome.")
    async with opened([first, second]) as (flow, server), flow.state() as s:
        s += af.user("Capitals?")
        s += af.assistant("Of France:\n\n" + af.gen("x", stop="END") + "of Italy:" + af.gen("y"))
        assert (await s["x"], await s["y"]) == ("Paris ", " Rome.")
        assert await s.text() == (
            "<user>Capitals?</user><assistant>Of France:\n\nParis of Italy: Rome.</assistant>"
        )
    assert texts(server.received[0].json["messages"][-1]) == ["Of France:"]
    assert texts(server.received[1].json["messages"][-1]) == ["Of France:\n\nParis of Italy:"]


@pytest.mark.parametrize(("model", "accepts"), [(NEW, True), (OLD, False)])
async def test_system_turns_between_others(model: str, accepts: bool) -> None:
    async with opened([HELLO], model) as (flow, server), flow.state() as s:
        s += af.system("One.") + af.system("Two.") + af.user("Hi") + af.system("Three.")
        s += af.assistant(af.gen("x"))
        if not accepts:
            with pytest.raises(NotSupported):
                await s
            return
        await s
    assert [block["text"] for block in server.last.json["system"]] == ["One.", "Two."]
    assert [message["role"] for message in server.last.json["messages"]] == ["user", "system"]


async def test_states_without_a_user_are_refused() -> None:
    async with opened([]) as (flow, server), flow.state() as s:
        s += af.system("Be brief.") + af.assistant(af.gen("x"))
        with pytest.raises(NotSupported):
            await s["x"]
    assert not server.received


class Big(BaseModel):
    number: int = Field(ge=3)


async def test_a_schema_that_the_api_does_not_keep_is_refused_or_checked() -> None:
    async with opened([]) as (flow, server), flow.state() as s:
        s += af.user("A number?") + af.assistant(af.gen("x", schema=Big))
        with pytest.raises(NotSupported, match="minimum"):
            await s["x"]
    assert not server.received
    wrong, right = answers.text_stream('{"number": 1}'), answers.text_stream('{"number": 4}')
    async with opened([wrong, right], on_unsupported="retry") as (flow, server), flow.state() as s:
        s += af.user("A number?") + af.assistant(af.gen("x", schema=Big))
        assert await s["x"] == Big(number=4)
    assert len(server.received) == 2


@pytest.mark.parametrize(
    ("model", "options", "temperature"),
    [(OLD, {}, 0), (OLD, {"reasoning": True}, None), (NEW, {}, None), (QUIET, {}, None)],
)
async def test_a_choice_is_made(model: str, options: Any, temperature: float | None) -> None:
    answer = answers.text_stream('{"value": ', '"no"}')
    async with opened([answer], model, **options) as (flow, server), flow.state() as s:
        s += af.user("Yes or no?") + af.assistant(af.select("x", ["yes", "no"]))
        assert await s["x"] == "no"
    assert server.last.json.get("temperature") == temperature
    schema = server.last.json["output_config"]["format"]["schema"]
    assert schema["properties"]["value"]["enum"] == ["yes", "no"]


async def test_a_transient_error_is_repeated() -> None:
    script = [answers.OVERLOADED, answers.rate_limited(ms=1), HELLO]
    async with opened(script, max_retries=2) as (flow, server), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        assert await s["x"] == "Hello"
    assert len({request.body for request in server.received}) == 1


async def test_unknown_events_blocks_and_fields_are_ignored() -> None:
    unknown = {"type": "weather_report", "wind": [1, {"a": None}]}
    block = {"type": "hologram", "light": 3}
    answer = answers.stream(
        answers.event({**answers.beginning(mood="good").to_dict(), "extra": 1}),
        answers.event(unknown),
        answers.PING,
        answers.event({"type": "content_block_start", "index": 0, "content_block": block}),
        answers.event(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "hologram_delta", "light": 4}}
        ),
        answers.event({"type": "content_block_stop", "index": 0}),
        answers.text_block("Hello", index=1)[:2],
        answers.event({"type": "content_block_delta", "index": 1, "delta": {"type": "mood", "mood": "x"}}),
        answers.text_block("", index=1)[-1],
        answers.ending(),
    )
    async with opened([answer]) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x"))
        assert await s["x"] == "Hello"


LONG = "A long constant text. " * 400


def marks(body: Any) -> list[tuple[str, int]]:
    """The parts with a mark: their kind, and their number."""
    found = []
    for kind in ("tools", "system", "messages"):
        for number, part in enumerate(body.get(kind, [])):
            if "cache_control" in json.dumps(part):
                assert (part["content"][-1] if kind == "messages" else part)["cache_control"] == {
                    "type": "ephemeral"
                }
                found.append((kind, number))
    return found


async def test_the_prefix_of_a_fork_is_cached() -> None:
    def script(request: Received) -> Answer:
        return HELLO

    async with opened(script) as (flow, server), flow.state() as s:
        s += af.system("Be brief.") + af.user(LONG)
        branches = s.fork(3)
        for number, branch in enumerate(branches):
            branch += af.user(f"Question {number}") + af.assistant(af.gen("x"))
        await branches
    assert [marks(request.json) for request in server.received] == [[("messages", 0)]] * 3
    bodies = [request.body.partition(b"Question")[0] for request in server.received]
    assert len(set(bodies)) == 1  # equal to the byte


async def test_the_first_branch_of_a_fork_goes_ahead_until_its_answer_begins() -> None:
    """The others can then read its prefix from the cache."""
    hold, begun = Hold(), Hold()
    text = answers.text_block("Hello")
    script = [answers.stream(hold, answers.beginning(), begun, text, answers.ending()), *[HELLO] * 3]
    async with opened(script, "claude-sonnet-4-5") as (flow, server), flow.state() as s:
        s += af.user(LONG)
        branches = s.fork(4)
        for number, branch in enumerate(branches):
            branch += af.user(f"Question {number}") + af.assistant(af.gen("x"))
        await hold.reached.wait()
        for _ in range(20):
            await checkpoint()
        assert len(server.received) == 1
        hold.go_on()
        await server.wait_for_requests(4)
        begun.go_on()
        assert [await branch["x"] for branch in branches] == ["Hello"] * 4


@pytest.mark.parametrize(("model", "prefix"), [("claude-sonnet-4-5", "Hi"), ("claude-haiku-4-5", LONG)])
async def test_the_branches_of_a_short_prefix_do_not_wait(model: str, prefix: str) -> None:
    """The models differ in the shortest prefix that the cache keeps."""
    hold = Hold()
    script = [answers.stream(hold, answers.beginning(), answers.ending())] * 3
    async with opened(script, model) as (flow, server), flow.state() as s:
        s += af.user(prefix)
        branches = s.fork(3)
        for branch in branches:
            branch += af.user(LONG) + af.assistant(af.gen("x"))
        await server.wait_for_requests(3)
        hold.go_on()
        await branches


async def test_short_prompts_and_single_questions_are_not_cached() -> None:
    async with opened([HELLO, HELLO]) as (flow, server), flow.state() as s:
        for branch, text in zip(s.fork(2), ("Hi", LONG), strict=True):
            branch += af.user(text) + af.assistant(af.gen("x"))
            await branch
    assert [marks(request.json) for request in server.received] == [[], []]


async def test_a_state_that_was_not_forked_shares_no_prefix() -> None:
    """Copies of it, for an answer that is checked and for one that several gens take, are no forks."""
    async with (
        opened([answers.text_stream("12")], on_unsupported="retry") as (flow, server),
        flow.state() as s,
    ):
        s += af.user(LONG) + af.assistant(af.gen("x", regex="[0-9]+"))
        assert await s["x"] == "12"
    assert marks(server.last.json) == []
    async with opened([answers.text_stream("A: 1. B: 2.")], NEW) as (flow, server), flow.state() as s:
        s += af.user(LONG)
        s += af.assistant("A: " + af.gen("a", stop_regex=r"\.") + ". B: " + af.gen("b", stop_regex=r"\."))
        assert (await s["a"], await s["b"]) == ("1", "2")
    assert marks(server.last.json) == []


async def test_a_long_system_prompt_and_a_growing_conversation_are_cached() -> None:
    async with opened([HELLO, HELLO]) as (flow, server), flow.state() as s:
        s += af.system(LONG) + af.user("Hi") + af.assistant(af.gen("x"))
        s += af.user("Go on") + af.assistant(af.gen("y"))
        await s
    first, last = server.received
    assert marks(first.json) == [("system", 0)]
    assert marks(last.json) == [("system", 0), ("messages", 2)]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"model": ""}, "model"),
        ({"base_url": "ftp://host"}, "url"),
        ({"like": "gpt-4o"}, "like"),
        ({"effort": "huge"}, "effort"),
        ({"reasoning": 3}, "reasoning"),
        ({"max_retries": -1}, "max_retries"),
        ({"ssl_context": "tls"}, "ssl_context"),
        ({"proxy": 3128}, "proxy"),
    ],
)
def test_wrong_arguments(options: Any, param: str) -> None:
    with pytest.raises(BadArgument) as caught:
        Anthropic(**{"model": NEW, "api_key": KEY, **options})
    assert caught.value.param == param


def test_a_key_is_needed_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NotAuthorized):
        Anthropic(NEW)
    assert KEY not in repr(Anthropic(NEW, api_key=KEY)) + repr(vars(Anthropic(NEW, api_key=KEY)))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ANTHROPIC_API_KEY": "k1", "ANTHROPIC_AUTH_TOKEN": "t1"}, "Bearer k1"),
        ({"ANTHROPIC_AUTH_TOKEN": "t1"}, "Bearer t1"),
    ],
)
async def test_the_environment_has_the_key_and_the_address(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN", raising=False)
    async with fake_server([HELLO]) as server:
        for name, value in {**variables, "ANTHROPIC_BASE_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        async with af.session(backend=Anthropic(OLD)) as flow, flow.state() as s:
            s += af.user("Hi") + af.assistant(af.gen("x"))
            await s
    assert server.last.headers["authorization"] == expected
