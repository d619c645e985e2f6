"""A gen whose language is finite: all its texts are listed, and one is selected."""

from __future__ import annotations

import enum
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

import agentflow as af
from agentflow.language.typed.finite import MAX_TEXT_CHARS, finite_texts
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.ops import MAX_CHOICES

pytestmark = pytest.mark.anyio

ALPHABET = "ab-"
MOST_CHARS = 6
EVERY_TEXT = [
    "".join(chars) for length in range(MOST_CHARS + 1) for chars in itertools.product(ALPHABET, repeat=length)
]


class Tone(enum.Enum):
    CALM = "calm"
    ANGRY = "angry"


class Verdict(msgspec.Struct, forbid_unknown_fields=True):
    tone: Tone
    score: Literal[1, 2]
    sure: bool | None = None


# Each with the length of its longest text.
_leaves = st.sampled_from(
    [("a", 1), ("b", 1), ("-", 1), ("[ab]", 1), ("[a-b]", 1), (r"\-", 1), ("(?:)", 0), ("ab", 2)]
)


def _larger(inner: st.SearchStrategy[tuple[str, int]]) -> st.SearchStrategy[tuple[str, int]]:
    return st.one_of(
        st.tuples(inner, inner).map(lambda two: (two[0][0] + two[1][0], two[0][1] + two[1][1])),
        st.tuples(inner, inner).map(lambda two: (f"({two[0][0]}|{two[1][0]})", max(two[0][1], two[1][1]))),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda one: (f"(?:{one[0][0]}){{{one[1]},{one[1] + one[2]}}}", one[0][1] * (one[1] + one[2]))
        ),
        inner.map(lambda one: (f"(?:{one[0]})?", one[1])),
        inner.map(lambda one: (f"^(?:{one[0]})$", one[1])),
    )


patterns = st.recursive(_leaves, _larger, max_leaves=6).filter(lambda one: one[1] <= MOST_CHARS)


@given(patterns)
def test_the_texts_of_a_pattern_are_all_that_match(pattern: tuple[str, int]) -> None:
    source, _ = pattern
    matching = {text for text in EVERY_TEXT if re.fullmatch(source, text)}
    try:
        found = finite_texts(Constraint("regex", source))
    except af.errors.BadArgument:
        assert "" in matching or not matching or "^" in source  # anchors are supported at the ends only
    else:
        assert set(found) == matching
        assert len(found) == len(matching)


def _values(schema: dict[str, Any]) -> Iterator[Any]:
    """The reference: the values of a schema of ``schemas``, objects in the order of their properties."""
    if "enum" in schema:
        yield from schema["enum"]
    elif "const" in schema:
        yield schema["const"]
    elif "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _values(option)
    elif schema["type"] == "boolean":
        yield from (True, False)
    elif schema["type"] == "null":
        yield None
    elif schema["type"] == "integer":
        yield from range(schema["minimum"], schema["exclusiveMaximum"])
    else:
        absent = object()
        names = list(schema["properties"])
        options = [
            [*_values(schema["properties"][name]), *([] if name in schema["required"] else [absent])]
            for name in names
        ]
        for chosen in itertools.product(*options):
            yield {name: value for name, value in zip(names, chosen, strict=True) if value is not absent}


def _object(members: dict[str, dict[str, Any]], num_required: int) -> dict[str, Any]:
    required = list(members)[:num_required]
    return {"type": "object", "properties": members, "required": required, "additionalProperties": False}


schemas: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.one_of(
        st.lists(
            st.sampled_from(["é", 'a"b', 1, 2.5, None, True, [1, 2], {"k": 0}]), min_size=1, max_size=4
        ).map(lambda values: {"enum": values, "title": "T"}),
        st.just({"const": "x"}),
        st.just({"type": "boolean"}),
        st.just({"type": "null", "description": "none"}),
        st.tuples(st.integers(-3, 3), st.integers(1, 4)).map(
            lambda pair: {"type": "integer", "minimum": pair[0], "exclusiveMaximum": pair[0] + pair[1]}
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.builds(
            _object, st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3), st.integers(0, 3)
        ),
    ),
    max_leaves=4,
)


@given(schema=schemas, tight=st.booleans())
def test_the_texts_of_a_schema_are_all_its_values(schema: dict[str, Any], tight: bool) -> None:
    separators = (",", ":") if tight else (", ", ": ")
    written = {json.dumps(value, ensure_ascii=False, separators=separators) for value in _values(schema)}
    constraint = Constraint("schema", json.dumps(schema), whitespace="tight" if tight else "compact")
    if len(written) > MAX_CHOICES:
        with pytest.raises(af.errors.BadArgument, check=has_param("scored")):
            finite_texts(constraint)
    else:
        found = finite_texts(constraint)
        assert set(found) == written
        assert len(found) == len(written)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ({"type": bool}, {"true", "false"}),
        ({"schema": Literal["yes", "no"]}, {'"yes"', '"no"'}),
        ({"schema": Tone}, {'"calm"', '"angry"'}),
        ({"schema": Tone | None}, {'"calm"', '"angry"', "null"}),
        ({"regex": "[1-5]"}, {"1", "2", "3", "4", "5"}),
        ({"regex": "[0-9]{3}"}, {f"{number:03}" for number in range(1000)}),
    ],
)
def test_the_texts_of_types(kind: dict[str, Any], texts: set[str]) -> None:
    assert set(af.gen("x", **kind, scored=True).texts) == texts


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"type": int},
        {"schema": str},
        {"schema": list[int]},
        {"schema": {"type": "integer", "minimum": 1}},
        {"schema": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES + 1}},
        {"schema": {"type": "integer", "minimum": 1, "maximum": 9, "multipleOf": 2}},
        {"schema": {"type": "object"}},
        {"schema": {"$ref": "#"}},
        {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}},
        {"schema": {"$ref": "#/$defs/b", "$defs": {"a": {}}}},
        {"schema": bool, "whitespace": "free"},
        {"grammar": 'start: "a"'},
        {"tags": [af.Tag("<a>", regex="b", end="</a>")]},
        {"regex": "a*"},
        {"regex": "a+"},
        {"regex": "."},
        {"regex": "[^a]"},
        {"regex": r"\d"},
        {"regex": "a?"},
        {"regex": "(?i)yes"},
        {"regex": "(?i:yes)|no"},
        {"regex": r"(a)\1"},
        {"regex": "a(?=b)b"},
        {"regex": r"a\b"},
        {"regex": "[0-9]{3}|x"},
        {"regex": "[ab]{40}"},
        {"regex": "[ab]{1000000}"},
        {"regex": f"a{{{MAX_TEXT_CHARS + 1}}}"},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
    ],
)
def test_other_languages_are_rejected_before_anything_runs(kind: dict[str, Any]) -> None:
    with pytest.raises(af.errors.BadArgument):
        af.gen("x", **kind, scored=True)


@pytest.mark.parametrize(
    "option",
    [{"temperature": 0.5}, {"max_tokens": 4}, {"seed": 1}, {"stop": "x"}, {"on_invalid": "retry"}, {"n": 1}],
)
def test_options_of_sampling_are_rejected(option: dict[str, Any]) -> None:
    error = TypeError if "n" in option else af.errors.BadArgument
    with pytest.raises(error):
        af.gen("x", type=bool, scored=True, **option)


def test_a_reply_is_not_scored() -> None:
    with pytest.raises(af.errors.BadArgument, check=has_param("scored")):
        af.reply("x", regex="a|b", scored=True)  # type: ignore[call-arg]


async def test_the_value_has_its_type() -> None:
    verdict = af.gen("verdict", schema=Verdict, scored=True)
    sure = af.gen("sure", type=bool, scored=True)
    answers = {"verdict": '{"tone": "angry", "score": 2, "sure": true}', "sure": "false"}
    async with af.session(backend=af.Scripted(answers)) as flow, flow.state() as s:
        s += af.user("How is it?") + af.assistant(verdict) + af.user("Sure?") + sure
        assert await s[verdict] == Verdict(Tone.ANGRY, 2, True)
        assert await s[sure] is False
        choices = s[verdict].choices
        assert choices is not None
        assert len(choices) == 2 * 2 * 4
        assert max(choices, key=choices.__getitem__) == answers["verdict"]


async def test_a_traced_program_scores_too() -> None:
    @af.program
    async def judge(s: af.State) -> int:
        score = af.gen("score", schema=Literal[1, 2], scored=True)
        s += af.user("Which?") + score
        return await s[score]

    async with af.session(backend=af.Scripted({"score": "2"})) as flow:
        assert await flow.submit(judge.trace()) == 2
