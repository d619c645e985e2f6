"""Checks of answers: they equal reference implementations, and their work is bounded."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.apis.grammar_strategies import TEXTS, engine_texts, grammars, patterns
from support.engine.schema_strategies import LITERALS, schemas, valid_value, written
from support.examples import examples

from agentflow.backends.apis.answers import verification
from agentflow.backends.apis.answers.verification import find_fault, found_fault, going_on
from agentflow.backends.apis.grammars.gbnf import read_pattern
from agentflow.backends.apis.grammars.lark_grammar import gbnf_of_grammar
from agentflow.errors import BadArgument, NotSupported
from agentflow.protocol.bounds import schema_check
from agentflow.protocol.bounds.client_pattern import CannotCheck
from agentflow.protocol.constraint import INTEGER_PATTERN, NUMBER_PATTERN, Constraint, TagRule
from agentflow.protocol.grammars.recognition import START, Recognizer
from agentflow.protocol.sampling import GenParams

STEPS = 1_000_000


@given(patterns)
def test_exactly_the_texts_of_a_pattern_are_valid(pattern: str) -> None:
    constraint = Constraint("regex", pattern)
    for text in TEXTS:
        assert (find_fault(constraint, text) is None) == bool(re.fullmatch(pattern, text)), text


@given(patterns)
def test_the_automaton_of_a_pattern_agrees_with_the_search(pattern: str) -> None:
    try:
        recognizer = Recognizer({START: read_pattern(pattern)})
    except NotSupported:
        return
    for text in TEXTS:
        found = recognizer.recognize(text, most_steps=STEPS)
        assert (found == "whole") == bool(re.fullmatch(pattern, text)), text
        if any(re.fullmatch(pattern, longer) for longer in TEXTS if longer.startswith(text)):
            assert found != "none", text


@given(patterns)
def test_a_text_that_a_stop_has_ended_may_be_the_beginning_of_a_valid_one(pattern: str) -> None:
    constraint = Constraint("regex", pattern)
    whole = [text for text in TEXTS if re.fullmatch(pattern, text)]
    for text in TEXTS:
        if any(longer.startswith(text + "-") for longer in whole):
            assert find_fault(constraint, text, cut_by=["-"]) is None, text


def test_a_stopped_text_is_checked_with_its_stop() -> None:
    digits = Constraint("regex", "[0-9]{4};")
    assert find_fault(digits, "1234", cut_by=[";"]) is None
    assert find_fault(digits, "12", cut_by=[";"]) is not None
    assert find_fault(digits, "12", cut_by=["x", ""]) is None
    assert find_fault(digits, "12") is not None
    choices = Constraint("choices", choices=("yes, sir", "no"))
    assert find_fault(choices, "yes", cut_by=[","]) is None
    assert find_fault(choices, "yes", cut_by=["."]) is not None
    schema = Constraint("schema", '{"type": "object", "required": ["a"]}')
    assert find_fault(schema, '{"a": [1', cut_by=["]"]) is None
    assert find_fault(schema, "{}", cut_by=["]"]) is not None
    assert going_on(GenParams(stop=("a", "b"))) == ("a", "b")
    assert going_on(GenParams(stop=("a",), stop_regex="b+")) == ("a", "")


@examples(100)
@given(grammars)
def test_exactly_the_texts_of_a_grammar_are_valid(source: str) -> None:
    try:
        expected = engine_texts(source, TEXTS)
    except BadArgument:
        return
    constraint = Constraint("grammar", source)
    valid = {text for text in TEXTS if find_fault(constraint, text) is None}
    try:
        gbnf_of_grammar(source)
    except NotSupported:  # a terminal may be read on where the next one begins, or a rule begins with itself
        assert valid >= expected
    else:
        assert valid == expected


def test_a_rule_that_begins_with_itself_is_read() -> None:
    constraint = Constraint("grammar", 'start: start "+" start | "1" | "(" start ")"')
    texts = ["1", "1+1", "(1+1)+1", "", "1+", "(1", "+1", "1+1" * 2]
    assert [text for text in texts if find_fault(constraint, text) is None] == ["1", "1+1", "(1+1)+1"]


@given(schemas, st.sampled_from(["compact", "tight", "free"]), st.randoms(use_true_random=False))
def test_exactly_the_values_of_a_schema_are_valid(schema: Any, whitespace: str, dice: Any) -> None:
    constraint = Constraint("schema", json.dumps(schema))
    reference = jsonschema.Draft202012Validator(schema)
    for value in [valid_value(schema, dice), *LITERALS]:
        text = written(value, whitespace, dice)
        assert (find_fault(constraint, text) is None) == reference.is_valid(value), text
        assert find_fault(constraint, text + "x") is not None


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True), st.text())
def test_exactly_the_choices_are_valid(choices: list[str], other: str) -> None:
    constraint = Constraint("choices", choices=tuple(choices))
    for text in [*choices, other]:
        assert (find_fault(constraint, text) is None) == (text in choices)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (INTEGER_PATTERN, ["12", "-7", "12 ", "\n12", "1234567890123456789012"], ["1.5", "x", "", "12x"]),
        (NUMBER_PATTERN, ["12", "-7.5e3", "1.5\n", "0.1234567890123456789"], ["one", "", "NaN", "1,5"]),
    ],
)
def test_numbers_may_be_written_as_json(pattern: str, right: list[str], wrong: list[str]) -> None:
    constraint = Constraint("regex", pattern)
    assert [find_fault(constraint, text) for text in right] == [None] * len(right)
    assert None not in [find_fault(constraint, text) for text in wrong]


def tags(*rules: TagRule) -> Constraint:
    return Constraint(
        "tags",
        json.dumps([{"begin": r.begin, "kind": r.kind, "source": r.source, "end": r.end} for r in rules]),
    )


def test_the_contents_of_tags_are_checked() -> None:
    constraint = tags(
        TagRule("<n>", "schema", '{"type": "integer", "minimum": 3}', "</n>"),
        TagRule("<g>", "grammar", 'start: "a" "b"*', "</g>"),
    )
    assert find_fault(constraint, "so <n>7</n> and <g>abb</g>.") is None
    for text in ("<n>2</n>", "<n>7", "<g>bb</g>"):
        assert find_fault(constraint, text) is not None


def test_an_alternative_is_valid_too() -> None:
    constraint = Constraint("regex", "a+", instead=Constraint("choices", choices=("b",)))
    assert [find_fault(constraint, text) is None for text in ("aa", "b", "c")] == [True, True, False]


# Small enough for a check that begins on the event loop.
DOUBLED = {
    "$ref": "#/$defs/a20",
    "$defs": {
        "a0": {"type": "string"},
        **{f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n - 1}"}] * 2} for n in range(1, 21)},
    },
}
HOSTILE = {
    "an exponential schema": (Constraint("schema", json.dumps(DOUBLED)), '"x"'),
    "an endless schema": (Constraint("schema", '{"$ref": "#"}'), "1"),
    "a schema elsewhere": (Constraint("schema", '{"$ref": "http://127.0.0.1:1/a.json"}'), "1"),
    "an ambiguous grammar": (Constraint("grammar", 'start: start start | "a"'), "a" * 1_900),
    "a search that goes back": (Constraint("regex", r"(?:(a|a)*b|(?=c)c)"), "a" * 1_900),
    "GBNF": (Constraint("grammar", 'root ::= "a"'), "a"),
    "a directive": (Constraint("grammar", 'start: "a"\n%ignore " "'), "a"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_check_that_costs_too_much_or_is_impossible_is_given_up(name: str) -> None:
    with pytest.raises(CannotCheck):
        find_fault(*HOSTILE[name])


def test_a_pattern_without_look_arounds_needs_no_search() -> None:
    constraint = Constraint("regex", "(a|a)*b")
    assert find_fault(constraint, "a" * 5_000 + "b") is None
    assert find_fault(constraint, "a" * 5_000) is not None


def test_an_invalid_pattern_is_refused() -> None:
    with pytest.raises(BadArgument):
        find_fault(Constraint("regex", "("), "a")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "begins_here"),
    [("an exponential schema", True), ("an ambiguous grammar", False), ("a search that goes back", True)],
)
async def test_the_event_loop_makes_the_beginning_of_a_check_alone(
    name: str, begins_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_fault(Constraint("schema", "true"), "1")  # the first one imports a package, in a thread
    made: list[tuple[bool, Any]] = []

    def noted(*args: Any) -> str | None:
        made.append((threading.current_thread() is threading.main_thread(), args[3:]))
        return find_fault(*args)

    monkeypatch.setattr(verification, "find_fault", noted)
    with pytest.raises(CannotCheck):
        await found_fault(*HOSTILE[name])
    assert made == [(True, (verification.INLINE,))] * begins_here + [(False, ())]


@pytest.mark.anyio
async def test_large_texts_are_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noted(*args: Any) -> str | None:
        threads.append(threading.current_thread())
        return find_fault(*args)

    monkeypatch.setattr(verification, "find_fault", noted)
    names = Constraint("schema", '{"type": "array", "items": {"type": "string"}}')
    assert await found_fault(names, json.dumps(["name"] * 20_000)) is None
    assert await found_fault(names, json.dumps(["name"] * 20_000 + [1])) is not None
    assert threading.main_thread() not in threads


def test_a_constraint_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    class Counted(schema_check.SchemaCheck):
        def __init__(self, schema: Any) -> None:
            compiled.append(schema)
            super().__init__(schema)

    monkeypatch.setattr(schema_check, "SchemaCheck", Counted)
    constraint = Constraint("schema", '{"const": "a schema of this test alone"}')
    assert [find_fault(constraint, "1") is None for _ in range(3)] == [False] * 3
    assert len(compiled) == 1
