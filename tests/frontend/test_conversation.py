"""Whole conversations at the beginning of a state, and replies after them, as programs write them."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import pytest
from fake_engine import FakeEngine

import agentflow as af
from agentflow import ops
from agentflow.conversation import Conversation, ToolChoice, ToolSpec
from agentflow.reply import ReplyReader

pytestmark = pytest.mark.anyio

ASKED = [{"role": "user", "content": "Is it cold in Oslo?"}]
CALL = af.CalledTool("call_1", "weather", '{"city": "Oslo"}')
CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": CALL.arguments}}
LATER = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"},
]


def weather(city: str, days: Annotated[int, msgspec.Meta(ge=1)] = 1) -> str:
    """The weather in a city."""
    return f"rain in {city} for {days}"


def written(*messages: Any, **options: Any) -> Conversation:
    return af.conversation([*messages], **options).conversation


def scripted(*answers: object) -> af.Session:
    return af.session(backend=af.Scripted(answers), seed=1)


# What is made of messages and tools


def test_messages_as_openai_has_them_are_those_of_ours():
    assert written(*LATER).messages == (
        af.Message("user", "Is it cold in Oslo?"),
        af.Message("assistant", "", tool_calls=(CALL,)),
        af.Message("tool", "3 degrees", tool_call_id="call_1"),
    )
    assert written(af.Message("system", "Be brief.")).messages == (af.Message("system", "Be brief."),)


def test_tools_are_functions_schemas_or_specs():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    as_function = {"type": "function", "function": {"name": "b", "description": "B.", "parameters": schema}}
    spec = ToolSpec("c", "C.", {})
    told = written(tools=[weather, as_function, spec]).tools
    assert told[1:] == (ToolSpec("b", "B.", schema), spec)
    assert (told[0].name, told[0].description) == ("weather", "The weather in a city.")
    assert told[0].parameters["properties"] == {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
    }
    assert told[0].parameters["required"] == ["city"]


def test_the_types_of_a_tools_parameters_are_defined_in_its_schema():
    class Place(msgspec.Struct):
        city: str

    def at(place: Place) -> str:
        """What is there."""
        return place.city

    at.__annotations__["place"] = Place
    [told] = written(tools=[at]).tools
    assert told.parameters["properties"] == {"place": {"$ref": "#/$defs/Place"}}
    assert told.parameters["$defs"]["Place"]["required"] == ["city"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice("auto", None, parallel=False)),
        ("required", ToolChoice("required", None, parallel=False)),
        ("none", ToolChoice("none", None, parallel=False)),
        ("weather", ToolChoice("required", "weather", parallel=False)),
        (ToolChoice("none"), ToolChoice("none")),
    ],
)
def test_the_choice_is_a_word_or_a_tools_name(choice, expected):
    assert written(tools=[weather], choice=choice, parallel=False).choice == expected


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (7, "conversation must be a list of messages, not 7"),
        ([7], "conversation: 7 is no message: Expected `object`, got `int`"),
        ([{"content": "x"}], "is no message: Object missing required field `role`"),
        ([{"role": "user", "content": ["x"]}], "is no message: Expected `str | null`, got `array`"),
        ([{"role": "user", "text": "x"}], "is no message: Object contains unknown field `text`"),
        ([{"role": "judge", "content": "x"}], "there is no role 'judge' (there are: system, user, assi"),
        ([af.Message("judge", "x")], "there is no role 'judge'"),
        ([{"role": "user", "tool_calls": [CALLED]}], "a user message calls no tools: an assistant's does"),
    ],
)
def test_what_is_no_message_is_refused_at_once(messages, why):
    with pytest.raises(af.BadArgument) as caught:
        af.conversation(messages)
    assert why in str(caught.value)


# In a program


async def test_a_reply_is_its_prose_and_its_calls():
    prompts = []

    def script(prompt: str) -> af.Reply:
        prompts.append(prompt)
        return af.Reply("I look.", (CALL,))

    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        s += af.conversation(ASKED, tools=[weather]) + af.reply("answer")
        reply = await s["answer"]
        assert (reply.text, reply.tool_calls) == ("I look.", (CALL,))
        assert reply.message() == af.Message("assistant", "I look.", generated=True, tool_calls=(CALL,))
    assert prompts == ["<user>Is it cold in Oslo?</user><assistant>"]


async def test_a_reply_comes_in_pieces():
    async with scripted(af.Reply("It is cold.", (CALL,))) as flow, flow.state() as s:
        s += af.conversation(ASKED, tools=[weather]) + af.reply("answer")
        reader = ReplyReader()
        pieces = [piece async for text in s["answer"] for piece in reader.push(text)]
        assert "".join(getattr(piece, "text", "|") for piece in pieces) == "It is cold.|" + CALL.arguments
        kinds = [type(piece).__name__ for piece in pieces]
        assert list(dict.fromkeys(kinds)) == ["TextPiece", "CallBegun", "Arguments"]
        assert kinds.count("CallBegun") == 1
        assert reader.is_over


async def test_a_conversation_goes_on():
    """The loop of an agent: a reply's calls are answered, and the next reply knows of it."""
    prompts = []

    def script(prompt: str) -> af.Reply:
        prompts.append(prompt)
        return af.Reply("", (CALL,)) if len(prompts) == 1 else af.Reply("Yes.")

    messages = [af.Message("user", "Is it cold in Oslo?")]
    async with af.session(backend=af.Scripted(script)) as flow:
        while True:
            async with flow.state() as s:
                s += af.conversation(messages, tools=[weather]) + af.reply("answer")
                reply = await s["answer"]
            messages.append(reply.message())
            if not reply.tool_calls:
                break
            for call in reply.tool_calls:
                result = weather(**json.loads(call.arguments))
                messages.append(af.Message("tool", result, tool_call_id=call.id))
    assert reply.text == "Yes."
    assert prompts[1].endswith(
        f"<assistant><call weather>{CALL.arguments}</call></assistant>"
        "<tool>rain in Oslo for 1</tool><assistant>"
    )


async def test_gen_goes_on_in_the_assistants_turn_and_the_turn_can_be_ended():
    async with scripted("cold, and", "Bring a coat.") as flow, flow.state() as s:
        s += af.conversation([*ASKED, {"role": "assistant", "content": "It is "}])
        s += af.gen("how")
        s.end()
        s += af.user("So?") + af.assistant(af.gen("advice"))
        assert await s["advice"] == "Bring a coat."
        assert await s.text() == (
            "<user>Is it cold in Oslo?</user><assistant>It is cold, and</assistant>"
            "<user>So?</user><assistant>Bring a coat.</assistant>"
        )
        assert await s.messages() == [
            {"role": "user", "content": "Is it cold in Oslo?"},
            {"role": "assistant", "content": "It is cold, and"},
            {"role": "user", "content": "So?"},
            {"role": "assistant", "content": "Bring a coat."},
        ]


async def test_several_replies_are_a_fork():
    async with scripted("One.", "Two.", "Three.") as flow, flow.state() as s:
        s += af.conversation(ASKED)
        async with s.fork(3) as branches:
            for branch in branches:
                branch += af.reply("answer")
        assert sorted([(await branch["answer"]).text for branch in branches]) == ["One.", "Three.", "Two."]


async def test_what_was_cut_is_a_reply_too():
    schema = {"type": "object"}
    async with scripted('{"a": 1} ', "Some more words.") as flow, flow.state() as s:
        async with s.fork(2) as (one, two):
            one += af.conversation(ASKED) + af.reply("a", schema=schema, max_tokens=1)
            await one["a"].settled()
            two += af.conversation(ASKED) + af.reply("b", max_tokens=2)
        assert (await one["a"]).text == '{"a":'
        assert (await two["b"]).text == "Some more"
        assert two["b"].finish_reason == "length"


async def test_a_conversation_begins_a_state():
    async with scripted("x") as flow, flow.state() as s:
        why = "a conversation begins a state: append it first, and nothing before it"
        with pytest.raises(af.BadArgument, match=why):
            s += "Hello." + af.conversation(ASKED)
        with pytest.raises(af.BadArgument, match=why):
            s += af.user("Hello.") + af.conversation(ASKED)
        s += af.conversation(ASKED)
        branch = s.copy()
        with pytest.raises(af.BadArgument, match=why):
            branch += af.conversation(ASKED)
        with pytest.raises(af.BadArgument, match="the assistant turn is open"):
            s += af.user("More.")


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (
            ops.Converse(1, Conversation((af.Message("judge", "x"),))),
            "conversation: there is no role 'judge' (there are: system, user, assistant, tool)",
        ),
        (
            ops.Converse(1, Conversation((af.Message("user", "x", tool_calls=(CALL,)),))),
            "conversation: a user message calls no tools: an assistant's does",
        ),
    ],
)
async def test_a_backend_refuses_what_the_frontend_would_have(op, why):
    async with scripted("x") as flow, flow.state() as s:
        flow.send([ops.Converse(s.id, op.conversation)])
        s += af.gen("x")
        with pytest.raises(af.RunFailed) as caught:
            await s["x"]
        assert type(caught.value.__cause__) is af.BadArgument
        assert str(caught.value.__cause__) == why


async def test_a_reply_records_and_replays(tmp_path):
    path = tmp_path / "run.jsonl"
    backend = af.Scripted([af.Reply("I look.", (CALL,))])

    async def ask(flow: af.Session) -> af.Reply:
        async with flow.state() as s:
            s += af.conversation(ASKED, tools=[weather], choice="required") + af.reply("answer")
            return await s["answer"]

    async with af.session(backend=backend, record=path) as flow:
        said = await ask(flow)
    async with af.session(backend=af.Replay(path)) as flow:
        assert await ask(flow) == said


async def test_a_traced_conversation_is_a_graph():
    @af.program
    async def ask(s: af.State, name: str) -> str:
        s += af.conversation(ASKED) + "He is " + af.gen("a")
        s.end()
        s += af.user("And ", name, "?") + af.assistant(af.gen("b"))
        return await s["b"]

    graph = ask.trace()
    async with scripted("cold.", "Warm.") as flow:
        assert await flow.submit(graph, {"name": "Rome"}) == "Warm."
    assert "conversation" in str(graph.draw())


# On an engine


async def test_an_engine_is_given_what_turns_would_be():
    engine = FakeEngine()
    async with af.session(backend=engine, seed=1) as flow, flow.state() as s, flow.state() as twin:
        s += af.conversation([{"role": "system", "content": "Be brief."}, *ASKED])
        s += af.reply("answer", max_tokens=12)
        twin += af.system("Be brief.") + af.user(ASKED[0]["content"])
        async with twin.assistant():
            twin += af.gen("answer", max_tokens=12)
            assert (await s["answer"]).text == await twin["answer"]
            assert await s.token_ids() == await twin.token_ids()


async def test_an_engine_refuses_tools_that_it_cannot_keep():
    async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
        s += af.conversation(ASKED, tools=[weather], choice="required") + af.reply("answer")
        with pytest.raises(af.NotSupported, match="cannot generate under a constraint of the kind 'tags'"):
            await s["answer"]
