"""The scripted backend truncates its answers like a model's, and rejects what it does not support."""

import dataclasses
from typing import TypedDict

import pytest
from pydantic import BaseModel
from support.programs import echo

import agentflow as af
from agentflow.backends.scripted import ScriptedGenerator

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
        # What only steers sampling is of no account.
        ({"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {5: 1}, "seed": 4}, ANSWER, "eos"),
    ],
)
async def test_answers_end_at_stops_and_max_tokens(options, text, reason):
    assert await cut(**options) == (text, reason)


@pytest.mark.parametrize("options", [{"logprobs": True}, {"top_logprobs": 3}])
async def test_log_probabilities_are_refused(options):
    with pytest.raises(af.NotSupported, match="log-probabilities"):
        await cut(**options)


async def test_a_regex_that_matches_nothing_is_refused():
    with pytest.raises(af.BadArgument, match="empty"):
        await cut(stop_regex="a*")


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
        with pytest.raises(af.BadArgument, match="an answer must be a text"):
            await s["r"]


LONG = "|".join(["[0-9]"] * 1000)


@pytest.mark.parametrize(
    ("wanted", "answer", "error"),
    [
        ({"regex": r"\p{Lu}\p{Ll}+"}, "Köln", None),
        ({"regex": LONG}, "7", None),
        ({"regex": "[a-z]+"}, "ab3", af.ScriptMismatch),
        ({"regex": "["}, "a", af.BadArgument),
        ({"regex": "(a|a)*b"}, "a" * 60, af.ScriptMismatch),
        ({"choices": ["a", "b"]}, "c", af.ScriptMismatch),
        ({"schema": {}}, "{", af.ScriptMismatch),
        ({"schema": {}}, "[" * 100_000, af.ScriptMismatch),
        ({"tags": [af.Tag("<n>", regex="[0-9]", end="</n>")]}, "a <n>3</n> b", None),
        ({"tags": [af.Tag("<n>", regex="[0-9]", end="</n>")]}, "a <n>33</n> b", af.ScriptMismatch),
        ({"tags": [af.Tag("<n>", regex="[", end="</n>")]}, "a <n>3</n> b", af.BadArgument),
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
        with pytest.raises(af.RunFailed, match="1 answers"):
            await s["y"]


# Scripts and their answers


async def answers(script, *prompts: str, **options) -> list[str]:
    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        found = []
        for prompt in prompts:
            s += prompt + af.gen("x", **options)
            found.append((await s["x"], "".join([delta async for delta in s["x"]]), s["x"].finish_reason))
        assert all(value == streamed for value, streamed, _ in found)
        return [(value, reason) for value, _, reason in found]


async def test_a_script_may_be_a_list_a_mapping_or_a_function():
    assert await answers(["one", "two"], "a", "b") == [("one", "eos"), ("two", "eos")]
    assert await answers({"b": "short", "ab": "long"}, "cb", "ab") == [("short", "eos"), ("long", "eos")]
    assert await answers(echo, "a", "b") == [("<a>", "eos"), ("<a<a>b>", "eos")]


async def test_a_script_without_an_answer_fails_the_run():
    with pytest.raises(af.RunFailed, match="1 answers"):
        await answers(["one"], "a", "b")
    with pytest.raises(af.RunFailed, match="'ab'"):
        await answers({"c": "x"}, "ab")
    with pytest.raises(af.RunFailed, match=r"'x'.*choices"):
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
    with pytest.raises(af.EngineFailed, match="gen failed: ZeroDivisionError") as failure:
        await answers([ZeroDivisionError("x")], "a")
    assert "ZeroDivisionError" in str(failure.value.__cause__)


def test_a_turn_that_never_began_cannot_end():
    generator = ScriptedGenerator([])
    with pytest.raises(af.BadArgument):
        generator.end_role(generator.open(""))
