"""Answers under constraints that servers claim to enforce: valid ones are never refused, and others never
accepted, in any kind of call."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apis import anthropic_answers, responses_answers
from support.apis import openai_answers as answers
from support.apis.api_sessions import ApiSession, anthropic_session, openai_session
from support.apis.api_sessions import compatible_session as compatible
from support.apis.fake_server import Answer, Received, fake_server
from support.apis.grammar_strategies import TEXTS, engine_texts, grammars, patterns
from support.engine.schema_strategies import LITERALS, schemas, valid_value
from support.examples import examples

import agentflow as af
from agentflow.backends.apis.grammars.lark_grammar import gbnf_of_grammar
from agentflow.backends.local import open_backend_generator
from agentflow.errors import BadArgument, InvalidValue, NotSupported, RunFailed
from agentflow.protocol.bounds.json_bounds import MOST_NESTING
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.sampling import GenParams

DIGITS: Any = {"regex": "[0-9]+"}


def plain_stream(text: str, finish_reason: str = "stop") -> Answer:
    """An answer of the API for plain text."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    steps = [answers.event({"choices": [choice]}), answers.DONE]
    return Answer(steps, content_type=answers.EVENT_STREAM)


def streamed(text: str) -> Answer:
    """An answer of chats in pieces of three characters."""
    return answers.text_stream(*[text[at : at + 3] for at in range(0, len(text), 3)])


@dataclass
class Case:
    """A gen, the texts that a server generates for it, and the valid ones among them."""

    flavour: str
    options: dict[str, Any]
    texts: list[str]
    is_valid: Callable[[str], bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["regex", "grammar", "schema", "choices"]))
    flavour = draw(st.sampled_from(["vllm", "sglang", "llamacpp"]))
    some = draw(st.lists(st.sampled_from(TEXTS[1:]), min_size=3, max_size=6))
    if kind == "regex":
        pattern = draw(patterns)
        return Case(flavour, {"regex": pattern}, some, lambda text: bool(re.fullmatch(pattern, text)))
    if kind == "grammar":
        source = draw(grammars)
        try:
            gbnf_of_grammar(source)
            valid = engine_texts(source, TEXTS)
        except (NotSupported, BadArgument):
            source, valid = 'start: ("a" "-"?)+', {text for text in TEXTS if re.fullmatch("(a-?)+", text)}
        texts = [*some, *sorted(valid - {""})[:3]]
        return Case(flavour, {"grammar": source}, texts, valid.__contains__)
    if kind == "choices":
        begin = "a text of several tokens "
        choices = [
            begin + text
            for text in draw(st.lists(st.sampled_from(TEXTS[1:]), min_size=1, max_size=3, unique=True))
        ]
        texts = [*choices, *[begin + text for text in some], begin]
        return Case(flavour, {"choices": choices}, texts, choices.__contains__)
    schema = draw(schemas)
    dice = draw(st.randoms(use_true_random=False))
    values = [valid_value(schema, dice), *draw(st.lists(st.sampled_from(LITERALS), max_size=4))]
    reference = jsonschema.Draft202012Validator(schema)
    texts = [json.dumps(value, ensure_ascii=draw(st.booleans())) for value in values] + ['{"a', "x"]

    def is_valid(text: str) -> bool:
        try:
            return reference.is_valid(json.loads(text))
        except ValueError:
            return False

    flavour = draw(st.sampled_from(["vllm", "sglang", "llamacpp", "ollama"]))
    return Case(flavour, {"schema": schema}, texts, is_valid)


def constrained(name: str, options: dict[str, Any]) -> Any:
    choices = options.get("choices")
    return af.gen(name, **options) if choices is None else af.select(name, choices)


@examples(60)
@given(cases(), st.booleans())
def test_exactly_the_valid_answers_are_accepted(case: Case, is_plain: bool) -> None:
    anyio.run(run_case, case, is_plain and case.flavour != "ollama")


async def run_case(case: Case, is_plain: bool) -> None:
    left = list(case.texts)

    def script(received: Received) -> Answer:
        text = left.pop(0)
        return plain_stream(text) if received.path.endswith("/v1/completions") else streamed(text)

    async with compatible(script, case.flavour) as (flow, _):
        for number, text in enumerate(case.texts):
            async with flow.state() as s:
                gen = constrained("x", case.options)
                s += f"Text {number}: " + gen if is_plain else af.user("Hi") + af.assistant(gen)
                try:
                    await s["x"]
                    is_accepted = True
                except InvalidValue:
                    is_accepted = False
                assert is_accepted == case.is_valid(text), text


anyio_test = pytest.mark.anyio


@anyio_test
async def test_a_stream_shows_the_text_and_ends_with_the_error() -> None:
    async with compatible([streamed("12 or 13")]) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", **DIGITS))
        shown: list[str] = []

        async def read() -> None:
            async for delta in s["x"]:
                shown.append(delta)

        with pytest.raises(InvalidValue) as caught:
            await read()
    assert "".join(shown) == "12 or 13" == caught.value.text
    assert "[0-9]+" in str(caught.value)


@anyio_test
async def test_a_truncated_answer_is_none_of_a_server_that_breaks_its_promise() -> None:
    script = [answers.text_stream("12 or", finish_reason="length")] * 2
    async with compatible(script) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", **DIGITS))
        with pytest.raises(InvalidValue) as caught:
            await s["x"]
        assert "truncated" in str(caught.value)


@anyio_test
async def test_an_answer_that_a_stop_has_ended_is_the_beginning_of_a_valid_one() -> None:
    script = [streamed("12;34"), streamed("12;34"), streamed("ab;12")]
    async with compatible(script) as (flow, _), flow.state() as s:
        for name, pattern in (("x", "[0-9]+;[0-9]+"), ("y", "[0-9]+;")):
            s += af.user("Hi") + af.assistant(af.gen(name, regex=pattern, stop=";"))
            assert await s[name] == "12"
        s += af.user("Hi") + af.assistant(af.gen("z", regex="[0-9]+;[0-9]+", stop=";"))
        with pytest.raises(InvalidValue):
            await s["z"]


class Vendor:
    """A session with one of the vendors, by the name of its API."""

    def __init__(self, api: str) -> None:
        self.api = api

    def words(self, text: str) -> Answer:
        match self.api:
            case "anthropic":
                return anthropic_answers.text_stream(text)
            case "responses":
                return responses_answers.text_stream(text)
            case _:
                return answers.text_stream(text)

    def opened(self, *texts: str) -> ApiSession:
        script = [self.words(text) for text in texts]
        if self.api != "anthropic":
            return openai_session(script, api=self.api)
        return anthropic_session(script, "claude-opus-5-5")


each_vendor = pytest.mark.parametrize(
    "vendor", [Vendor("chat"), Vendor("responses"), Vendor("anthropic")], ids=lambda v: v.api
)
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@anyio_test
@each_vendor
async def test_schemas_of_vendors_are_checked(vendor: Vendor) -> None:
    right, wrong = '{"age": 7}', '{"age": "seven"}'
    async with vendor.opened(right, wrong) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.gen("x", schema=PERSON))
        assert await s["x"] == {"age": 7}
        s += af.user("Hi") + af.assistant(af.gen("y", schema=PERSON))
        with pytest.raises(InvalidValue) as caught:
            await s["y"]
    assert caught.value.text == wrong


@anyio_test
@each_vendor
async def test_values_inside_of_objects_are_checked(vendor: Vendor) -> None:
    choices = ["yes, it is about science", "no, it is about other things"]
    async with vendor.opened(*[f'{{"value": "{text}, it is about science"}}' for text in ("yes", "so")]) as (
        flow,
        _,
    ):
        for is_right in (True, False):
            async with flow.state() as s:
                s += af.user("Hi") + af.assistant(af.select("x", choices))
                if is_right:
                    assert await s["x"] == choices[0]
                else:
                    with pytest.raises(RunFailed):
                        await s["x"]


@anyio_test
async def test_a_written_decision_is_checked() -> None:
    question = {"related": ["yes", "no"]}
    for text, is_right in (("yes", True), ("perhaps", False)):

        def script(received: Received, text: str = text) -> Answer:
            return Answer(status=404) if "decisions" in received.path else streamed(text)

        async with compatible(script, "vllm") as (flow, _), flow.state() as s:
            s += af.user("Is it about science?")
            if is_right:
                assert (await s.decide(question))["related"].value == "yes"
            else:
                with pytest.raises(RunFailed):
                    await s.decide(question)


@anyio_test
@pytest.mark.parametrize("way", ["retry", "reask"])
async def test_a_broken_promise_is_an_invalid_attempt(way: Any) -> None:
    script = [streamed("twelve"), streamed("12 legs"), streamed("12"), streamed("Bye")]
    async with compatible(script) as (flow, server), flow.state() as s:
        s += af.user("How many?") + af.assistant(af.gen("x", **DIGITS, temperature=0.0, on_invalid=way))
        assert [text async for text in s["x"]] == ["12"]
        usage = s["x"].usage
        assert (usage.rejected_answers, usage.prompt_tokens, usage.output_tokens) == (2, 27, 9)
        s += af.user("And?") + af.assistant(af.gen("y"))
        assert await s["y"] == "Bye"
    sent = [
        [(one["role"], one["content"]) for one in request.json["messages"]] for request in server.received
    ]
    assert sent[-1] == [("user", "How many?"), ("assistant", "12"), ("user", "And?")]
    temperatures = [request.json.get("temperature") for request in server.received]
    if way == "retry":
        assert sent[:3] == [[("user", "How many?")]] * 3
        assert temperatures[:3] == [0.0, 0.7, 0.7]
    else:
        assert [role for role, _ in sent[2]] == ["user", "assistant", "user"]
        assert (sent[1][1], sent[2][1]) == (("assistant", "twelve"), ("assistant", "12 legs"))
        assert "[0-9]+" in sent[1][2][1]
        assert temperatures[:3] == [0.0] * 3


@anyio_test
@pytest.mark.parametrize(
    ("script", "output_tokens", "error", "num_requests"),
    [
        ([streamed("one"), streamed("two"), streamed("three")], None, InvalidValue, 3),
        ([streamed("one")] * 3, 4, af.errors.BudgetExceeded, 2),  # an answer has 3
        ([streamed("one"), answers.error(500, "broken"), streamed("12")], None, af.errors.EngineFailed, 2),
    ],
)
async def test_attempts_end(
    script: list[Answer], output_tokens: int | None, error: type[af.AgentflowError], num_requests: int
) -> None:
    async with compatible(script) as (flow, server), flow.state() as s:
        if output_tokens is not None:
            s.limit(output_tokens=output_tokens)
        s += af.user("How many?") + af.assistant(af.gen("x", **DIGITS, on_invalid="retry"))
        with pytest.raises(error) as caught:
            await s["x"]
    if isinstance(caught.value, InvalidValue):
        assert caught.value.text == "three"
    assert len(server.received) == num_requests


@anyio_test
async def test_a_constraint_that_cannot_be_checked_is_left_to_the_server(caplog: Any) -> None:
    grammar = 'start: "a" "b"\n%ignore " "'
    with caplog.at_level(logging.WARNING):
        async with compatible([streamed("a b"), streamed("ab")]) as (flow, _), flow.state() as s:
            for name, text in (("x", "a b"), ("y", "ab")):
                s += af.user("Hi") + af.assistant(af.gen(name, grammar=grammar))
                assert await s[name] == text
    assert len([one for one in caplog.records if one.name.endswith("calls")]) == 1


@anyio_test
async def test_replies_with_calls_have_no_text_to_check() -> None:
    look = af.tool(lambda **_: "", name="look", description="Looks.", parameters={"type": "object"})
    script = [answers.call_stream(("c1", "look", ["{}"]), text=["Let me see."])]
    async with compatible(script) as (flow, _), flow.state() as s:
        s += af.user("Hi") + af.assistant(af.reply("x", tools=[look]))
        assert [call.name for call in (await s["x"]).tool_calls] == ["look"]


@anyio_test
async def test_a_fallback_does_not_hide_a_broken_promise() -> None:
    async with fake_server([streamed("twelve")]) as first, fake_server([streamed("12")]) as second:
        backends = [af.OpenAICompatible(f"{one.url}/v1", "m", flavour="vllm") for one in (first, second)]
        async with af.session(backend=af.Fallback(*backends)) as flow, flow.state() as s:
            s += af.user("How many?") + af.assistant(af.gen("x", **DIGITS))
            with pytest.raises(InvalidValue):
                await s["x"]
        assert not second.received


def nested(levels: int) -> str:
    """A schema of lists in lists."""
    inner = levels - 1
    return '{"type":"array","items":' * inner + '{"type":"integer"}' + "}" * inner


@anyio_test
@pytest.mark.parametrize("flavour", ["", "vllm"])
@pytest.mark.parametrize("role", ["", "user"])
@pytest.mark.parametrize(
    ("source", "is_valid"),
    [(nested(MOST_NESTING), True), (nested(MOST_NESTING + 1), False), (nested(3_000), False), ("{", False)],
)
async def test_a_schema_that_nests_too_deeply_or_is_no_json_is_refused(
    flavour: Any, role: Any, source: str, is_valid: bool
) -> None:
    """A session sends constraints unchanged: no frontend has read the schema."""
    constraint = Constraint("schema", source).check()
    async with fake_server(lambda request: streamed("[]") if role else plain_stream("[]")) as server:
        url = f"{server.url}/v1"
        backend = af.OpenAICompatible(
            url, "m", max_retries=0, on_unsupported="retry", flavour=flavour or None
        )
        async with open_backend_generator(backend) as generator:
            context = generator.open("")
            if role:
                generator.begin_role(context, role)
            generator.fill(context, "x")
            if role:
                generator.end_role(context)
            run = generator.generate(context, GenParams(max_tokens=3), lambda text: None, constraint)
            if is_valid:
                assert (await run).text == "[]"
            else:
                with pytest.raises(BadArgument):
                    await run
