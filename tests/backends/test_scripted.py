"""The scripted backend truncates its answers like a model, and rejects unsupported options."""

import contextlib
import dataclasses
import json
from typing import Annotated, Any, TypedDict

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from support.faults import has_param
from support.observed_backends import settle
from support.programs import echo

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.runtime.interpreter import state_tree

pytestmark = pytest.mark.anyio

ANSWER = "one two three, four. Five six: seven"


async def cut(**options) -> tuple[str, str]:
    """The answer under these options, and why it ended."""
    async with af.session(backend=af.Scripted([ANSWER])) as flow, flow.state() as s:
        s += "Count." + af.gen("x", **options)
        return await s["x"], s["x"].finish_reason


@pytest.mark.parametrize(
    ("options", "text", "reason"),
    [
        ({}, ANSWER, "eos"),
        ({"max_tokens": 3}, "one two three,", "length"),
        ({"stop": ","}, "one two three", "stop"),
        ({"stop": [".", ","]}, "one two three", "stop"),
        ({"stop_regex": r"[,.]"}, "one two three", "stop"),
        ({"stop_regex": r"[.:] \w"}, "one two three, four", "stop"),
        ({"stop_regex": "(?i)f"}, "one two three, ", "stop"),
        ({"stop_regex": "nine"}, ANSWER, "eos"),
        # A regex and a string: whichever is complete first.
        ({"stop_regex": "two three", "stop": "three"}, "one ", "stop"),
        ({"stop_regex": "two.*six", "stop": "three"}, "one two ", "stop"),
        # No stop begins in the first words.
        ({"stop": ",", "min_tokens": 3}, ANSWER, "eos"),
        ({"stop": [",", "."], "min_tokens": 3}, "one two three, four", "stop"),
        ({"stop_regex": "t\\w+", "min_tokens": 1}, "one ", "stop"),
        ({"stop_regex": "t\\w+", "min_tokens": 3}, ANSWER, "eos"),
        ({"min_tokens": 50}, ANSWER, "eos"),
        ({"max_tokens": 2, "stop": "three"}, "one two", "length"),
        # Parameters of sampling alone have no effect.
        ({"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {5: 1}, "seed": 4}, ANSWER, "eos"),
    ],
)
async def test_answers_end_at_stops_and_max_tokens(options, text, reason):
    assert await cut(**options) == (text, reason)


@pytest.mark.parametrize("options", [{"logprobs": True}, {"top_logprobs": 3}])
async def test_log_probabilities_are_refused(options):
    with pytest.raises(af.errors.NotSupported, check=has_param("logprobs")):
        await cut(**options)


async def test_a_regex_that_matches_nothing_is_refused():
    with pytest.raises(af.errors.BadArgument, check=has_param("stop_regex")):
        await cut(stop_regex="a*")


async def test_a_stop_regex_that_backtracks_without_end_fails_its_gen():
    async with af.session(backend=af.Scripted(["x" * 2000])) as flow, flow.state() as s:
        s += af.gen("answer", stop_regex="(x+x+)+y")
        with pytest.raises(af.errors.RequestRefused):
            await s["answer"]


class Model(BaseModel):
    name: str


@dataclasses.dataclass
class Point:
    x: float


class City(TypedDict):
    name: str


@pytest.mark.parametrize(
    ("schema", "value", "text"),
    [
        (Model, Model(name="Köln"), '{"name": "Köln"}'),
        (Point, Point(1.5), '{"x": 1.5}'),
        (City, {"name": "a"}, '{"name": "a"}'),
        (list[int], [1, 2], "[1, 2]"),
        ({"type": "boolean"}, True, "true"),
        ({"type": "null"}, None, "null"),
    ],
)
async def test_a_value_stands_for_its_json(schema, value, text):
    expression = af.gen("r", schema=schema)
    async with af.session(backend=af.Scripted([value])) as flow, flow.state() as s:
        s += expression
        assert (await s[expression], s[expression].text) == (value, text)


async def test_an_answer_that_is_not_serializable_is_rejected():
    async with af.session(backend=af.Scripted([object()])) as flow, flow.state() as s:
        s += af.gen("r")
        with pytest.raises(af.errors.BadArgument, match="an answer must be a text"):
            await s["r"]


LONG = "|".join(["[0-9]"] * 1000)


@pytest.mark.parametrize(
    ("wanted", "answer", "error"),
    [
        ({"regex": r"\p{Lu}\p{Ll}+"}, "Köln", None),
        ({"regex": LONG}, "7", None),
        ({"regex": "[a-z]+"}, "ab3", af.errors.ScriptMismatch),
        ({"regex": "["}, "a", af.errors.BadArgument),
        ({"regex": "(a|a)*b"}, "a" * 60, af.errors.ScriptMismatch),
        ({"schema": {}}, "{", af.errors.ScriptMismatch),
        ({"schema": {}}, "[" * 100_000, af.errors.ScriptMismatch),
        ({"tags": [af.Tag("<n>", regex="[0-9]", end="</n>")]}, "a <n>3</n> b", None),
        ({"tags": [af.Tag("<n>", regex="[0-9]", end="</n>")]}, "a <n>33</n> b", af.errors.ScriptMismatch),
        ({"tags": [af.Tag("<n>", regex="[", end="</n>")]}, "a <n>3</n> b", af.errors.BadArgument),
    ],
)
async def test_an_answer_must_match_its_constraint(wanted, answer, error):
    async with af.session(backend=af.Scripted([answer])) as flow, flow.state() as s:
        s += af.gen("r", **wanted)
        if error is None:
            assert await s["r"].whole_text() == answer
        else:
            with pytest.raises(error):
                await s["r"]


async def test_a_text_is_one_answer():
    async with af.session(backend=af.Scripted("yes")) as flow, flow.state() as s:
        s += "a" + af.gen("x")
        assert await s["x"] == "yes"
        s += af.gen("y")
        with pytest.raises(af.errors.RunFailed, match="has 1") as failure:
            await s["y"]
        assert "'y'" in str(failure.value)


# Scripts and their answers


async def answers(script, *prompts: str, **options) -> list[str]:
    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        found = []
        for prompt in prompts:
            s += prompt + af.gen("x", **options)
            found.append((await s["x"], "".join([delta async for delta in s["x"]]), s["x"].finish_reason))
        assert all(value == streamed for value, streamed, _ in found)
        return [(value, reason) for value, _, reason in found]


async def test_a_script_may_be_a_list_or_a_function():
    assert await answers(["one", "two"], "a", "b") == [("one", "eos"), ("two", "eos")]
    assert await answers(echo, "a", "b") == [("<a>", "eos"), ("<a<a>b>", "eos")]


async def test_a_script_without_an_answer_fails_the_run():
    with pytest.raises(af.errors.ScriptMismatch, match=r"'x'.*has 1"):
        await answers(["one"], "a", "b")
    with pytest.raises(af.errors.ScriptMismatch, match=r"'x'.*has: 'c'"):
        await answers({"c": "x"}, "ab")
    with pytest.raises(af.errors.ScriptMismatch, match=r"'x'.*'pick'.*choices"):
        await pick_from_script(["x"])


async def pick_from_script(script) -> None:
    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        s += af.select("pick", ["a", "b"])
        await s


@pytest.mark.parametrize(
    "answer", ["", " ", " leading words here", "  two more words", "trailing ", "a  b", "line\nbreak"]
)
async def test_every_space_of_a_scripted_answer_is_delivered(answer):
    assert await answers([answer], "a") == [(answer, "eos")]


async def test_an_exception_as_an_answer_is_raised():
    with pytest.raises(af.PromptTooLong, match="too long"):
        await answers([af.PromptTooLong("too long")], "a")
    with pytest.raises(af.errors.EngineFailed, match="gen failed: ZeroDivisionError") as failure:
        await answers([ZeroDivisionError("x")], "a")
    assert "ZeroDivisionError" in str(failure.value.__cause__)


async def test_f37_a_script_that_raises_is_a_mismatch():
    """No failure of the backend: a map would try again."""

    def checked(call: af.ScriptedCall) -> str:
        assert "Oslo" in call, f"{call.name} is not about Oslo"
        return "yes"

    with pytest.raises(
        af.errors.ScriptMismatch, match=r"x is not about Oslo.* for 'x', at test_scripted\.py:\d"
    ):
        await answers(checked, "a")
    texts = iter(["yes"])
    with pytest.raises(af.errors.ScriptMismatch, match="StopIteration"):
        await answers(lambda call: next(texts), "a", "b")
    with pytest.raises(
        af.errors.ScriptMismatch, match=r"JSONDecodeError.*, at test_scripted\.py:\d+, in <lambda>"
    ) as failure:  # the line of the script, not of the library that it calls
        await answers(lambda call: json.loads("{"), "a")
    assert "JSONDecodeError" in str(failure.value.__cause__)
    with pytest.raises(af.errors.ScriptMismatch, match=r"1 was given\W+ for 'x'\n"):
        await answers(lambda: "yes", "a")


@pytest.mark.parametrize("script", [None, {"yes"}, 3])
def test_f37_a_script_of_another_type_is_rejected(script):
    with pytest.raises(af.errors.BadArgument, check=has_param("script")):
        af.Scripted(script)


def test_f37_a_class_is_no_backend():
    with pytest.raises(af.errors.BadArgument, check=has_param("backend")):
        af.session(backend=af.Scripted)


def test_a_turn_that_never_began_cannot_end():
    generator = ScriptedGenerator([])
    with pytest.raises(af.errors.BadArgument):
        generator.end_role(generator.open(""))


# Answers by variable


@af.program
async def judge(s: af.State, essay: str) -> list[str]:
    s += af.user(f"Is it about science? {essay}") + af.assistant(af.select("related", ["yes", "no"]))
    async with s.fork(2) as branches:
        for dimension, branch in zip(["clarity", "evidence"], branches, strict=True):
            branch += af.user(f"Judge its {dimension}.")
            branch += af.assistant("It is ", af.gen("judgment", max_tokens=5), ": ", af.gen("why", stop="."))
    return [await s["related"], *[await branch[x] for branch in branches for x in ("judgment", "why")]]


async def result_of(backend: af.Scripted, program=judge, *args) -> Any:
    async with af.session(backend=backend) as flow:
        result = await flow.run(program, *(args or ("Leaves.",)))
    assert backend.generator.num_open == 0
    return result


async def test_answers_belong_to_variables_in_the_order_of_the_program():
    """On trio the branches run in any order."""
    script = {"related": "yes", "judgment": ["clear", "weak"], "why": lambda call: call.split()[-2]}
    for _ in range(5):
        backend = af.Scripted(script, strict=True)
        assert await result_of(backend) == ["yes", "clear", "is", "weak", "is"]
    assert [call.name for call in backend.calls] == ["related", "judgment", "why", "judgment", "why"]
    assert [call.answer for call in backend.calls] == ["yes", "clear", "is", "weak", "is"]


async def test_a_list_has_the_answers_in_the_order_of_the_program():
    for _ in range(5):
        assert await result_of(af.Scripted(["yes", *"abcd"])) == ["yes", *"abcd"]


async def test_a_call_has_what_the_program_sent():
    backend = af.Scripted({"related": "no", "judgment": "bad", "why": "so. And so on"})
    await result_of(backend)
    related, first, why, *_ = backend.calls
    assert (related.kind, related.choices, related.answer) == ("select", ("yes", "no"), "no")
    assert (first.kind, first.params.max_tokens, first.choices) == ("gen", 5, ())
    assert (why.params.stop, why.answer) == ((".",), "so. And so on")
    user = "Is it about science? Leaves."
    assert first.messages == [
        {"role": "user", "content": user},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "Judge its clarity."},
        {"role": "assistant", "content": "It is "},
    ]
    assert why.messages[-1] == {"role": "assistant", "content": "It is bad: "}
    assert backend.prompts[0] == f"<user>{user}</user><assistant>" == related
    assert "'judgment'" in repr(first)
    assert "'bad'" in repr(first)


async def test_graphs_have_names_too():
    backend = af.Scripted({"related": "yes", "judgment": [*"ab"], "why": [*"cd"]})

    @af.program
    async def both(s: af.State, essay: str) -> str:
        s += essay + af.select("related", ["yes", "no"])
        async with s.fork(2) as branches:
            for branch in branches:
                branch += af.gen("judgment") + " " + af.gen("why")
        s += branches[0]["judgment"] + branches[1]["why"] + af.gen("related")
        return await s["related"]

    async with af.session(backend=backend) as flow:
        assert await flow.submit(both.trace(), {"essay": "Leaves."}) == "yes"
    assert [call.name for call in backend.calls] == [
        "related",
        "judgment",
        "why",
        "judgment",
        "why",
        "related",
    ]
    assert backend.prompts[-1] == "Leaves.yesad"


async def test_an_answer_of_a_cancelled_gen_stays_its_own():
    backend = af.Scripted({"x": ["never", "second"]})
    async with af.session(backend=backend) as flow, flow.state() as s:
        branches = s.fork(2)
        branches[0] += af.gen("x")
        branches[0].cancel()
        branches[1] += af.gen("x")
        assert await branches[1]["x"] == "second"


async def test_f37_answers_stay_in_order_after_a_state_was_refused(monkeypatch):
    monkeypatch.setattr(state_tree, "MAX_STATES", 2)
    async with af.session(backend=af.Scripted({"x": "X", "y": "Y"})) as flow:
        async with flow.state() as s, flow.state() as other:
            with pytest.raises(af.errors.RunFailed, match="2 open states"):
                await flow.run(lambda s: s.add("refused" + af.gen("y"))["y"].whole_text())
            for state in (s, other):
                state += "a" + af.gen("x")
                assert await state["x"] == "X"
        for name in ("x", "y"):
            await settle()  # the states before it are closed
            assert (
                await flow.run(lambda s, name: s.add("b" + af.gen(name))[name].whole_text(), name)
                == name.upper()
            )


async def test_several_sessions_share_one_script():
    backend = af.Scripted({"x": ["one", "two"]})
    async with (
        af.session(backend=backend) as first,
        af.session(backend=backend) as second,
        first.state() as s,
        second.state() as t,
    ):
        s += af.gen("x")
        t += af.gen("x")
        assert (await t["x"], await s["x"]) == ("two", "one")


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ({"related": "yes", "judgment": ["a"]}, r"'judgment'.*has 1.*generation 2"),
        ({"related": "yes", "why": "b"}, r"'judgment'.*'related', 'why'"),
        ({"related": "perhaps"}, r"'perhaps'.*'related'.*choices"),
    ],
)
async def test_an_error_of_the_script_names_the_variable_and_the_line(script, error):
    @af.program
    async def ask(s: af.State, question: str) -> None:
        s += question + af.select("related", ["yes", "no"])
        for _ in range(2):
            s += af.gen("judgment")
        await s

    with pytest.raises(af.errors.ScriptMismatch, match=error) as failure:
        await result_of(af.Scripted(script), ask)
    assert any("test_scripted.py:" in note for note in failure.value.__notes__)


@pytest.mark.parametrize("value", ["five", 11])
async def test_an_invalid_value_names_the_variable_and_the_line(value):
    @af.program
    async def rate(s: af.State, essay: str) -> int:
        s += essay + af.gen("rating", schema=Annotated[int, Field(ge=1, le=10)])
        return await s["rating"]

    with pytest.raises(af.errors.RunFailed, match="'rating'") as failure:
        await result_of(af.Scripted({"rating": value}), rate)
    assert any("test_scripted.py:" in note for note in failure.value.__notes__)


@pytest.mark.parametrize(
    ("script", "unused"),
    [
        ({"related": "yes", "judgment": [*"abc"], "why": "b", "other": 1}, "1 for 'judgment', 1 for 'other'"),
        (["yes", *"abcdef"], "2"),
    ],
)
async def test_unused_answers_are_an_error_at_the_end_of_a_strict_session(script, unused):
    with pytest.raises(af.errors.ScriptMismatch, match=f"unused answers: {unused}$"):
        await result_of(af.Scripted(script, strict=True))
    lenient = af.Scripted(script)
    await result_of(lenient)
    with pytest.raises(af.errors.ScriptMismatch, match=f"unused answers: {unused}$"):
        lenient.check_used()


async def test_a_strict_session_that_fails_raises_its_own_error():
    with pytest.raises(ZeroDivisionError):
        async with af.session(backend=af.Scripted(["unused"], strict=True)):
            raise ZeroDivisionError


async def test_exceptions_stand_among_the_answers_of_a_variable():
    @af.program
    async def patient(s: af.State, question: str) -> str:
        try:
            branch = s.copy()
            branch += question + af.gen("answer")
            return await branch["answer"]
        except af.Overloaded:
            s += question + af.gen("answer")
            return await s["answer"]

    backend = af.Scripted({"answer": [af.Overloaded("later"), "Light."]}, strict=True)
    assert await result_of(backend, patient) == "Light."
    assert isinstance(backend.calls[0].answer, af.Overloaded)


def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


OSLO, ROME = af.ToolCall("weather", {"city": "Oslo"}), af.ToolCall("weather", {"city": "Rome"})


@pytest.mark.parametrize("answer", [OSLO, (OSLO, ROME), [OSLO]])
async def test_tool_calls_are_answers_of_a_reply(answer):
    script = {"answer": [answer, "It rains."]}
    backend = af.Scripted(script, strict=True)
    num_calls = 1 if answer is OSLO else len(answer)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.conversation([{"role": "user", "content": "Umbrella?"}]) + af.reply("answer", tools=[weather])
        reply = await s["answer"]
        calls = reply.tool_calls
        assert [call.name for call in calls] == ["weather"] * num_calls
        assert len({call.id for call in calls}) == num_calls
        for _ in calls:
            s += af.tool_result("rain")
        turns = await s.messages()
        s += af.reply("answer")
        assert (await s["answer"]).text == "It rains."
    first, second = backend.calls
    assert (first.kind, [tool.name for tool in first.tools]) == ("reply", ["weather"])
    assert [turn["role"] for turn in turns] == ["user", "assistant", *["tool"] * num_calls]
    assert second.messages == turns


# Names, in random programs

KINDS = ["gen", "gen", "select", "fork", "copy", "wire", "set", "cancel"]
STEPS = st.lists(st.tuples(st.integers(0, 30), st.sampled_from(KINDS)), max_size=25)


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@given(steps=STEPS, is_strict=st.booleans())
def test_each_generation_gets_the_answers_of_its_own_name(loop, steps, is_strict):
    """The name of a generation comes from a queue of its state, which must not shift when states fork, wait
    for another, or are cancelled. The script answers with the name of the call."""

    async def play() -> None:
        backend = af.Scripted(lambda call: call.name, strict=is_strict)
        variables: list[af.Variable[str]] = []
        has_cancelled = False
        async with af.session(backend=backend) as flow, flow.state() as root:
            states = [root]
            for choice, kind in steps:
                number = choice % len(states)
                s, name = states[number], f"v{len(variables)}"
                with contextlib.suppress(af.errors.StateClosed):  # a state that was cancelled
                    match kind:
                        case "gen":
                            s += "a" + af.gen(name)
                            variables.append(s[name])
                        case "select":
                            s += af.select(name, [name, "other"])
                            variables.append(s[name])
                        case "fork":
                            states += s.fork(2)
                        case "copy":
                            states.append(s.copy())
                        case "set":
                            s.set("set", "text")
                        case "cancel" if number:
                            s.cancel()
                            has_cancelled = True
                        case "wire" if variables:
                            s += variables[choice % len(variables)]
            for variable in variables:
                with contextlib.suppress(af.Cancelled, af.errors.RunFailed):
                    assert await variable == variable.name
        called, appended = [call.name for call in backend.calls], [variable.name for variable in variables]
        assert called == [name for name in appended if name in called]
        assert has_cancelled or called == appended

    anyio.run(play, backend=loop)
