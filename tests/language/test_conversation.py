"""Whole conversations at the beginning of a state, and replies after them, as programs write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any

import anyio
import msgspec
import pytest
from pydantic import BaseModel
from support.fake_engine import FakeEngine
from support.faults import has_param
from support.observed_backends import Unbatched

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.language.expressions import Offer
from agentflow.language.typed.replies import read_message
from agentflow.protocol import ops
from agentflow.protocol.chat import CalledTool, Conversation, Message, ToolChoice, ToolSpec
from agentflow.protocol.sampling import GenParams
from agentflow.runtime.interpreter.checking import CheckingInterpreter

pytestmark = pytest.mark.anyio

ASKED = [{"role": "user", "content": "Is it cold in Oslo?"}]
CALL = af.ToolCall("weather", {"city": "Oslo"}, "call_1")
CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": CALL.text}}
LATER = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "3 degrees"},
]


def weather(city: str, days: Annotated[int, msgspec.Meta(ge=1)] = 1) -> str:
    """The weather in a city."""
    return f"rain in {city} for {days}"


def written(*messages: Any) -> Conversation:
    return af.conversation([*messages]).conversation


def offered(**options: Any) -> Offer:
    offer = af.reply("answer", **options).offer
    assert offer is not None
    return offer


def scripted(*answers: object) -> af.Session:
    return af.session(backend=af.Scripted(answers), seed=1)


# States of messages and tools


def test_openai_messages_are_converted():
    called = CalledTool("call_1", "weather", '{"city": "Oslo"}')
    sent = (
        Message("user", "Is it cold in Oslo?"),
        Message("assistant", "", tool_calls=(called,)),
        Message("tool", "3 degrees", tool_call_id="call_1"),
    )
    assert written(*LATER).messages == sent
    assert written(af.Message("system", "Be brief.")).messages == (Message("system", "Be brief."),)
    as_messages = [
        af.Message("user", "Is it cold in Oslo?"),
        af.Message("assistant", "", (CALL,)),
        af.Message("tool", "3 degrees", tool_call_id="call_1"),
    ]
    assert written(*as_messages).messages == sent


def test_tools_are_functions_schemas_or_specs():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    as_function = {"type": "function", "function": {"name": "b", "description": "B.", "parameters": schema}}
    spec = ToolSpec("c", "C.", {})
    tools = offered(tools=[weather, as_function, spec]).tools
    assert tools[1:] == (ToolSpec("b", "B.", schema, strict=False), spec)
    as_function["function"]["strict"] = True
    assert offered(tools=[as_function]).tools == (ToolSpec("b", "B.", schema),)
    assert (tools[0].name, tools[0].description) == ("weather", "The weather in a city.")
    assert tools[0].parameters["properties"] == {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
    }
    assert tools[0].parameters["required"] == ["city"]


def test_the_types_of_a_tools_parameters_are_defined_in_its_schema():
    class Place(msgspec.Struct):
        city: str

    def at(place: Place) -> str:
        """What is there."""
        return place.city

    at.__annotations__["place"] = Place
    [tool] = offered(tools=[at]).tools
    assert tool.parameters["properties"] == {"place": {"$ref": "#/$defs/Place"}}
    assert tool.parameters["$defs"]["Place"]["required"] == ["city"]


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
def test_the_tool_choice_is_a_mode_or_a_tools_name(choice, expected):
    assert offered(tools=[weather], choice=choice, parallel=False).choice == expected


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (7, None),
        ("\ud83d", None),
        ("hello", None),
        ({"role": "user", "content": "a"}, None),
        ([7], None),
        ([None], None),
        (["\ud83d"], None),
        ([{"\ud83d": 1}], None),
        ([{"content": "x"}], "`role`"),
        ([{"role": "user", "content": ["x"]}], None),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "`url`",
        ),
        ([{"role": "user", "text": "x"}], "`text`"),
        ([{"role": "judge", "content": "x"}], "unknown role 'judge'.*system, user, assi"),
        ([af.Message("judge", "x")], "unknown role 'judge'"),
        ([{"role": "user", "tool_calls": [CALLED]}], "user.* tool calls"),
    ],
)
def test_invalid_messages_are_rejected(messages, shown):
    with pytest.raises(af.errors.BadArgument, match=shown, check=has_param("messages")):
        af.conversation(messages)


def test_f24a_messages_as_clients_of_openai_have_them() -> None:
    """Dumped with all fields, in parts, or with an instruction of the developer."""
    parts = [{"type": "text", "text": "What do "}, {"type": "text", "text": "plants do?"}]
    dumped = {"content": "Grow.", "refusal": None, "role": "assistant", "annotations": [], "audio": None}
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        dumped,
        refused,
    ]
    sent = [read_message(message) for message in messages]
    assert [(message.role, message.content) for message in sent] == [
        ("system", "Be brief."),
        ("user", "What do plants do?"),
        ("assistant", "Grow."),
        ("assistant", "No."),
    ]


# In a program


async def test_a_reply_has_a_text_and_tool_calls():
    prompts = []

    def script(prompt: str) -> af.Reply:
        prompts.append(prompt)
        return af.Reply("I look.", (CALL,))

    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        s += af.conversation(ASKED) + af.reply("answer", tools=[weather])
        reply = await s["answer"]
        [call] = reply.tool_calls
        assert (reply.text, call.text, call.arguments) == ("I look.", CALL.text, {"city": "Oslo", "days": 1})
        assert reply.message() == af.Message("assistant", "I look.", (call,))
    assert prompts == ["<user>Is it cold in Oslo?</user><assistant>"]


class City(BaseModel):
    name: str


async def test_the_calls_of_a_reply_with_functions_can_be_called():
    def population(city: City, year: int = 2024) -> int:
        return len(city.name) + year

    calls = (
        af.ToolCall("population", {"city": {"name": "Oslo"}}),
        af.ToolCall("population", {"city": "Oslo"}),
        af.ToolCall("schema_only", {"x": 1}),
    )
    schema_only = {"name": "schema_only", "parameters": {"type": "object"}}
    async with af.session(backend=af.Scripted({"a": [calls]})) as flow, flow.state() as s:
        s += af.user("?")
        reply = af.reply("a", tools=[population, schema_only])
        s += reply
        typed, invalid, plain = (await s[reply]).tool_calls
    assert (typed.arguments, typed()) == ({"city": City(name="Oslo"), "year": 2024}, 2028)
    assert (invalid.arguments, invalid.function) == ({"city": "Oslo"}, population)
    assert (plain.arguments, plain.function) == ({"x": 1}, None)


async def test_replies_and_results_of_tools_take_turns_on_one_state():
    """Each reply is a separate turn, in the prompts and in the messages."""
    prompts = []
    replies = [af.Reply("I look.", (CALL,)), af.Reply("It is cold.")]

    def script(prompt: str) -> af.Reply:
        prompts.append(prompt)
        return replies[len(prompts) - 1]

    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        s += af.conversation(ASKED) + af.reply("first", tools=[weather])
        s += af.tool_result("3 degrees") + af.reply("second")
        await s
        messages = await s.messages()
    assert prompts[1].startswith(prompts[0])
    assert prompts[1].endswith("</assistant><tool>3 degrees</tool><assistant>")
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == [CALL.id]
    assert messages[3] == {"role": "assistant", "content": "It is cold."}


async def test_f37_values_are_results_of_tools_like_in_act():
    async def look_up() -> int:
        return 3

    async with af.session(backend=af.Scripted([])) as flow, flow.state() as s:
        s += af.user("?")
        for value in ({"on": date(2024, 5, 1)}, [1, None], 3, None, "3 degrees"):
            s += af.tool_result(value)
        shown = [one["content"] for one in (await s.messages())[1:]]
        assert shown == ['{"on": "2024-05-01"}', "[1, null]", "3", "null", "3 degrees"]
        running = look_up()
        for wrong, advice in ((running, "await it first"), (object(), "append a string")):
            with pytest.raises(af.errors.BadArgument, match=advice):
                af.tool_result(wrong)
        running.close()
        s += af.gen("x")
        with pytest.raises(af.errors.BadArgument, match="the result of a tool cannot hold a variable"):
            af.tool_result([f"{s['x']}"])


def test_f37_pictures_are_results_of_tools_like_in_act():
    picture = pytest.importorskip("PIL.Image").new("RGB", (2, 2))
    alone, text, listed = af.tool_result(picture, ["a", picture]).parts
    assert (type(alone), text, type(listed)) == (af.Image, "a", af.Image)

    @dataclass
    class Saved:
        text: str

        def save(self) -> None:
            """A method that pictures have, too."""

    assert af.tool_result(Saved("a")).parts == ('{"text": "a"}',)


async def test_a_reply_ends_no_turn_that_the_program_opened():
    async with af.session(backend=af.Scripted(["A", "B", "C", "D"])) as flow, flow.state() as s:
        s += af.user("x") + af.assistant(af.reply("a"), "!") + af.reply("b")
        async with s.assistant():
            s += af.reply("c")
            s += "?"
        s += af.user("y")
        branch = s.copy()
        branch += af.reply("d")
        assert await branch.text() == (
            "<user>x</user><assistant>A!</assistant><assistant>B</assistant>"
            "<assistant>C?</assistant><user>y</user><assistant>D</assistant>"
        )
        async with s.user():
            with pytest.raises(af.errors.BadArgument):
                s += af.reply("e")


async def test_branches_of_a_conversation_end_their_replies_themselves():
    async with af.session(backend=af.Scripted(["A", "B"])) as flow, flow.state() as s:
        s += af.conversation(ASKED)
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.reply("answer") + af.user("Why?")
        texts = [await branch.text() for branch in branches]
        assert [text.count("</assistant><user>Why?</user>") for text in texts] == [1, 1]


async def test_a_reply_is_streamed_as_text_and_as_partial_replies():
    """Iteration gives its prose, ``partials`` prose and calls; both from the start, for late readers too."""
    call = af.ToolCall("weather", {"city": "Oslo", "days": 1}, "call_1")
    reply = af.Reply("It is cold, so take a coat.", (call,))
    async with af.session(backend=Unbatched(af.Scripted([reply]))) as flow, flow.state() as s:
        s += af.conversation(ASKED) + af.reply("answer", tools=[weather])
        replies = [reply async for reply in s["answer"].partials()]
        assert len(replies) > 2
        assert replies[-1] == reply == await s["answer"]
        for before, after in itertools.pairwise(replies):
            assert after != before
            assert after.text.startswith(before.text)
            assert len(after.tool_calls) >= len(before.tool_calls)
        assert [reply async for reply in s["answer"].partials()] == [reply]
        assert "".join([text async for text in s["answer"]]) == s["answer"].text == reply.text
        assert s["answer"].tool_calls == (call,)


async def test_an_empty_reply_is_a_value():
    async with scripted(af.Reply("")) as flow, flow.state() as s:
        s += af.conversation(ASKED) + af.reply("answer")
        assert [text async for text in s["answer"]] == []
        assert [reply async for reply in s["answer"].partials()] == [af.Reply("")]


@pytest.mark.parametrize("unbatched", [False, True])
async def test_a_reply_stands_for_its_text_wherever_text_is_expected(unbatched):
    """In f-strings, sums, ``set``, transforms, ``join``, events: in the interpreter and in the frontend."""
    reply, prose = af.Reply('I "look"\nit up.', (CALL,)), 'I "look"\nit up.'
    prompts = []

    def script(prompt: str) -> af.Reply | str:
        prompts.append(prompt)
        return reply if prompt.endswith("<assistant>") else "fine"

    @af.program
    async def use(s: af.State) -> None:
        async with s.fork(1) as branches:
            branches[0].add(af.conversation(ASKED)).add(af.reply("answer", tools=[weather]))
        answer = branches[0]["answer"]
        s += f"1 {answer} 2 " + answer + answer.upper() + " 3 " + s.set("copy", answer) + " 4 "
        s.join(branches)
        s += " 5 " + af.gen("x")
        await s
        assert await answer.first_line() == 'I "look"'
        assert (await answer.whole_text(), answer.text) == (prose, prose)

    backend = af.Scripted(script)
    async with af.session(backend=Unbatched(backend) if unbatched else backend) as flow:
        events = [event async for event in flow.stream(use)]
        asked = "Is it cold in Oslo?"
        assert prompts[-1] == f"1 {prose} 2 {prose}{prose.upper()} 3 {prose} 4 {asked}{prose} 5 "
        assert (
            "".join([e.text for e in events if isinstance(e, af.TextDelta) and e.name == "answer"]) == prose
        )
        [done] = [e for e in events if isinstance(e, af.VariableDone) and e.name == "answer"]
        assert (done.value, done.tool_calls) == (prose, (CALL,))
        async with flow.state() as s:
            s += af.conversation(ASKED) + af.reply("answer", tools=[weather])
            await s["answer"]
        async with flow.state() as t:  # the state of the referenced variable has ended
            t += f"[{s['answer']}]"
            assert await t.text() == f"[{prose}]"


async def test_messages_with_tool_calls_begin_another_state():
    messages = [
        {"role": "user", "content": "Is it cold?"},
        af.Message("assistant", "", tool_calls=(CALL,)).as_dict(),
        {"role": "tool", "content": "-3", "tool_call_id": CALL.id, "name": "weather"},
    ]
    other = af.ToolCall("weather", {"city": "Bergen"}, "call_2")
    async with scripted(af.Reply("And there?", (other,)), "x") as flow, flow.state() as s:
        s += af.conversation(messages) + af.reply("answer", tools=[weather])
        s += af.user("So: ", s["answer"])  # a text, not its calls
        found = await s.messages()
        assert found[:3] == messages
        assert found[3:] == [
            {
                "role": "assistant",
                "content": "And there?",
                "tool_calls": [
                    {
                        "id": "call_2",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Bergen"}'},
                    }
                ],
            },
            {"role": "user", "content": "So: And there?"},
        ]
        async with flow.state() as t:
            t += af.conversation(found)
            assert (await t.messages())[:-1] == found
            assert await t.text() == await s.text() + "<assistant>"
        branch = s.copy()
        assert await branch.messages() == found


async def test_an_agent_loop_answers_tool_calls():
    """The loop of an agent: a reply's calls are answered, and the next reply knows of it."""
    prompts = []

    def script(prompt: str) -> af.Reply:
        prompts.append(prompt)
        return af.Reply("", (CALL,)) if len(prompts) == 1 else af.Reply("Yes.")

    messages = [af.Message("user", "Is it cold in Oslo?")]
    async with af.session(backend=af.Scripted(script)) as flow:
        while True:
            async with flow.state() as s:
                s += af.conversation(messages) + af.reply("answer", tools=[weather])
                reply = await s["answer"]
            messages.append(reply.message())
            if not reply.tool_calls:
                break
            for call in reply.tool_calls:
                result = weather(**call.arguments)
                messages.append(af.Message("tool", result, tool_call_id=call.id))
    assert reply.text == "Yes."
    assert prompts[1].endswith(
        f"<assistant><call weather>{CALL.text}</call></assistant><tool>rain in Oslo for 1</tool><assistant>"
    )


async def test_gen_continues_the_open_assistant_turn():
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


async def test_a_fork_generates_several_replies():
    async with scripted("One.", "Two.", "Three.") as flow, flow.state() as s:
        s += af.conversation(ASKED)
        async with s.fork(3) as branches:
            for branch in branches:
                branch += af.reply("answer")
        assert sorted([(await branch["answer"]).text for branch in branches]) == ["One.", "Three.", "Two."]


async def test_a_truncated_reply_is_a_value():
    schema = {"type": "object"}
    async with scripted('{"a": 1} ', "Some more words.") as flow, flow.state() as s:
        async with s.fork(2) as (one, two):
            one += af.conversation(ASKED) + af.reply("a", schema=schema, max_tokens=1)
            await one["a"].settled()
            two += af.conversation(ASKED) + af.reply("b", max_tokens=2)
        assert (await one["a"]).text == '{"a":'
        assert (await two["b"]).text == "Some more"
        assert two["b"].finish_reason == "length"


async def test_a_conversation_must_be_the_first_append():
    async with scripted("x") as flow, flow.state() as s:
        why = "a conversation begins a state: append it first, and nothing before it"
        with pytest.raises(af.errors.BadArgument, match=why):
            s += "Hello." + af.conversation(ASKED)
        with pytest.raises(af.errors.BadArgument, match=why):
            s += af.user("Hello.") + af.conversation(ASKED)
        s += af.conversation(ASKED)
        branch = s.copy()
        with pytest.raises(af.errors.BadArgument, match=why):
            branch += af.conversation(ASKED)
        with pytest.raises(af.errors.BadArgument, match="waits for its answer"):
            s += af.user("More.")


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (
            ops.Converse(1, Conversation((Message("judge", "x"),))),
            "conversation: unknown role 'judge' (known: system, user, assistant, tool)",
        ),
        (
            ops.Converse(1, Conversation((Message("user", "x", tool_calls=(CALL,)),))),
            "conversation: a user message cannot have tool calls, only an assistant's can",
        ),
    ],
)
async def test_an_interpreter_rejects_invalid_conversations(op, why):
    async with anyio.create_task_group() as group:
        interpreter = CheckingInterpreter(ScriptedGenerator("x"), group)
        for one in (ops.Open(1), op, ops.Gen(1, 2, "x", GenParams())):
            interpreter.submit(one)
        variable = interpreter.variable(2)
        await variable.wait()
        group.cancel_scope.cancel()
    interpreter.close()
    assert type(variable.error) is af.errors.RunFailed
    assert type(variable.error.__cause__) is af.errors.BadArgument
    assert str(variable.error.__cause__) == why


async def test_a_reply_records_and_replays(tmp_path):
    path = tmp_path / "run.jsonl"
    backend = af.Scripted([af.Reply("I look.", (CALL,))])

    async def ask(flow: af.Session) -> af.Reply:
        async with flow.state() as s:
            s += af.conversation(ASKED) + af.reply("answer", tools=[weather], choice="required")
            return await s["answer"]

    async with af.session(backend=backend, record=path) as flow:
        reply = await ask(flow)
    async with af.session(backend=af.Replay(path)) as flow:
        assert await ask(flow) == reply


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


async def test_a_conversation_has_the_token_ids_of_its_turns():
    engine = FakeEngine()
    async with af.session(backend=engine, seed=1) as flow, flow.state() as s, flow.state() as plain:
        s += af.conversation([{"role": "system", "content": "Be brief."}, *ASKED])
        s += af.reply("answer", max_tokens=12)
        plain += af.system("Be brief.") + af.user(ASKED[0]["content"])
        async with plain.assistant():
            plain += af.gen("answer", max_tokens=12)
            assert (await s["answer"]).text == await plain["answer"]
        assert await s.token_ids() == await plain.token_ids()


@pytest.mark.parametrize("last", ["user", "assistant", "tool"])
async def test_f37_turns_continue_a_conversation_with_the_token_ids_of_its_turns(last: str):
    """A stored history, and after it turns as in any state: the assistant's fills the open turn, and the
    user's ends the assistant's."""
    messages = [*ASKED, {"role": "assistant", "content": "Yes."}] if last != "user" else ASKED
    if last == "tool":
        messages = LATER
    async with af.session(backend=FakeEngine(), seed=1) as flow, flow.state() as s, flow.state() as plain:
        s += af.conversation(messages)
        plain += af.conversation(messages)
        if last == "assistant":
            s += af.user("And in Rome?") + af.assistant(af.gen("answer", max_tokens=4), "!")
            plain.end()
            plain += af.user("And in Rome?")
            async with plain.assistant():
                plain += af.gen("answer", max_tokens=4) + "!"
        else:
            async with s.assistant():
                s += af.gen("answer", max_tokens=4) + "!"
            plain += af.gen("answer", max_tokens=4) + "!"
            plain.end()
        s += af.user("Thanks.")
        plain += af.user("Thanks.")
        assert await s.token_ids() == await plain.token_ids()
        assert await s.messages() == await plain.messages()
        assert [message["content"] for message in await s.messages()].count("") == (last == "tool")


async def test_f37_a_turn_of_the_user_ends_the_turn_that_a_conversation_opened():
    async with scripted("cold", "Warm.") as flow, flow.state() as s:
        s += af.conversation(ASKED) + "It is " + af.gen("a")
        s += af.user("And Rome?") + af.gen("b")
        assert await s.text() == (
            "<user>Is it cold in Oslo?</user><assistant>It is cold</assistant>"
            "<user>And Rome?</user><assistant>Warm.</assistant>"
        )


@pytest.mark.parametrize(
    "append",
    [af.State.end, lambda s: s.add(af.user("And in Rome?")), lambda s: s.add(af.system("Be brief."))],
)
async def test_f37_an_empty_turn_of_the_assistant_is_refused(append: Callable[[af.State], Any]):
    """A conversation waits for its answer: an empty turn would stand in the prompt."""
    async with scripted("Yes.") as flow, flow.state() as s:
        s += af.conversation(ASKED)
        with pytest.raises(af.errors.BadArgument, match="waits for its answer"):
            append(s)
        s += af.gen("answer")
        assert await s.text() == "<user>Is it cold in Oslo?</user><assistant>Yes."


async def test_f37_a_conversation_without_messages_appends_nothing():
    async with scripted("Yes.") as flow, flow.state() as s:
        s += af.conversation([]) + af.user("Is it cold?") + af.gen("answer")
        assert await s.text() == "<user>Is it cold?</user><assistant>Yes.</assistant>"


async def test_an_engine_without_tag_constraints_rejects_tools():
    async with af.session(backend=FakeEngine()) as flow, flow.state() as s:
        s += af.conversation(ASKED) + af.reply("answer", tools=[weather], choice="required")
        with pytest.raises(af.errors.NotSupported, match="'tags'"):
            await s["answer"]
