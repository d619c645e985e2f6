"""Free text with tags: its constraint, and the value of a text with tags."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

import agentflow as af
from agentflow.language.typed import tags
from agentflow.language.typed.tags import InTag, split_at_tags
from agentflow.protocol.constraint import TagRule
from agentflow.protocol.grammars.gbnf import read_gbnf
from agentflow.protocol.grammars.recognition import Recognizer

pytestmark = pytest.mark.anyio


@dataclasses.dataclass
class Point:
    x: float


POINT = af.Tag("<point>", schema=Point, end="</point>")
AGE = af.Tag("<age>", regex="[0-9]+", end="</age>")
WORD = af.Tag("<word>", grammar="start: /[a-z]+/", end="</word>")
CALL = af.Tag("<call>\n", schema=dict[str, str], end="\n</call>")
ALL = [POINT, AGE, WORD, CALL]


async def reply_of(text: str, tags: list[af.Tag], **options: Any) -> list[str | af.Tagged]:
    reply = af.gen("reply", tags=tags, **options)
    async with af.session(backend=af.Scripted([text])) as flow, flow.state() as s:
        s += "Say: " + reply
        assert [delta async for delta in s[reply]] != [] or not text
        return await s[reply]


async def test_text_and_tags_are_in_order():
    call = '{"city": "Oslo"}'
    text = f'See <point>{{"x": 1}}</point><age>12</age>, or <call>\n{call}\n</call>'
    found = await reply_of(text, ALL)
    assert found == [
        "See ",
        af.Tagged(POINT, '{"x": 1}', Point(1.0)),
        af.Tagged(AGE, "12", "12"),
        ", or ",
        af.Tagged(CALL, call, {"city": "Oslo"}),
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("only prose, 1 < 2 <ag", ["only prose, 1 < 2 <ag"]),
        ("</age>", ["</age>"]),
        ("<age>1</age>", [InTag(1, "1")]),
        ("<word>b</word>a</word>", [InTag(2, "b"), "a</word>"]),
        # A tag's content contains the end of the tag.
        ('<point>{"x": "</point>"}</point>!', [InTag(0, '{"x": "</point>"}'), "!"]),
        ("<point> [1,\n2] </point>", [InTag(0, " [1,\n2] ")]),
    ],
)
def test_where_a_tag_ends(text, pieces):
    assert split_at_tags(text, tuple(tag._rule for tag in ALL)) == pieces


def test_a_tag_ends_where_its_pattern_is_complete_first():
    rules = (TagRule("(", "regex", r"\(*[a-z]\)*", ")"),)
    assert split_at_tags("f((x)))", rules) == ["f", InTag(0, "(x"), "))"]
    rules = (TagRule("(", "regex", r"\([a-z]\)", "))"),)
    assert split_at_tags("f((x)))", rules) == ["f", InTag(0, "(x)")]


@pytest.mark.parametrize(
    ("grammar", "text", "pieces"),
    [
        ('root ::= "a)b"', "(a)b)c", [InTag(0, "a)b"), "c"]),
        ('root ::= "a" | "a)b"', "(a)b)", [InTag(0, "a"), "b)"]),
        ('root ::= "(" root ")" | "x"', "((x))!", [InTag(0, "(x)"), "!"]),
        ('root ::= "\\"" [^"]* "\\""', '(")"))', [InTag(0, '")"'), ")"]),
        ("start: /a|b/", "(a)b)", [InTag(0, "a"), "b)"]),
    ],
)
def test_f37_a_tag_ends_where_its_grammar_is_complete_first(grammar, text, pieces):
    assert split_at_tags(text, (TagRule("(", "grammar", grammar, ")"),)) == pieces


GRAMMARS = [
    'root ::= "a)b"',
    'root ::= "(" root ")" | "a"',
    'root ::= [^x]* "x"?',
    'root ::= ("a" | "a)")+ "b"',
    'root ::= ""',
]


@given(st.sampled_from(GRAMMARS), st.text("()abx", max_size=12))
def test_f37_a_tag_ends_at_the_first_end_after_a_whole_text(grammar, content):
    recognizer = Recognizer(read_gbnf(grammar), "root")
    ends = [at for at, char in enumerate(content) if char == ")"]
    whole = [at for at in ends if recognizer.recognize(content[:at], most_steps=10_000) == "whole"]
    rules = (TagRule("[", "grammar", grammar, ")"),)
    if whole:
        assert split_at_tags(f"[{content}", rules)[0] == InTag(0, content[: whole[0]])
    else:
        with pytest.raises(ValueError, match="not followed by"):
            split_at_tags(f"[{content}", rules)


def test_f37_the_content_of_a_tag_is_read_once(monkeypatch):
    num_read = 0
    beginnings = Recognizer.beginnings

    def counted(self, text, *, most_steps):
        nonlocal num_read
        for is_whole in beginnings(self, text, most_steps=most_steps):
            num_read += 1
            yield is_whole

    monkeypatch.setattr(Recognizer, "beginnings", counted)
    content = "a)" * 1_000 + "x"
    rules = (TagRule("(", "grammar", 'root ::= [^x]* "x"', ")"),)
    assert split_at_tags(f"({content})", rules) == [InTag(0, content)]
    assert num_read == len(content) + 1


def test_f37_a_tag_whose_grammar_is_too_slow_ends_where_reading_was_given_up(monkeypatch):
    monkeypatch.setattr(tags, "MOST_STEPS", 50)
    rules = (TagRule("(", "grammar", 'root ::= [^x]* "x"', ")"),)
    [piece, rest] = split_at_tags("(" + "a)" * 100, rules)
    assert piece.text.count("a") > 1
    assert rest


def test_f37_a_tag_whose_grammar_is_not_complete_is_not_closed():
    with pytest.raises(ValueError, match="not followed by"):
        split_at_tags("(ab)", (TagRule("(", "grammar", 'root ::= "a"', ")"),))


@pytest.mark.parametrize(
    "text",
    [
        "<age>",
        "<age>12",
        "<age>12</ag",
        "<age>x</age>",
        "<point>{</point>",
        '<point>{"x": 1} y</point>',
        "<word>",
    ],
)
def test_an_incomplete_or_invalid_tag_raises(text):
    with pytest.raises(ValueError, match="is not followed by a valid"):
        split_at_tags("prose " + text, tuple(tag._rule for tag in ALL))


WIRED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    st.lists(
        st.one_of(st.text(st.characters(exclude_characters="<")), st.tuples(WIRED), st.integers(0, 999))
    ),
    st.booleans(),
)
def test_a_text_is_split_into_the_parts_that_it_was_made_of(pieces, escapes):
    text, wanted = "", []
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            if wanted and isinstance(wanted[-1], str):
                wanted[-1] += piece
            elif piece:
                wanted.append(piece)
        else:
            index = int(isinstance(piece, int))
            inner = str(piece) if index else json.dumps(piece[0], ensure_ascii=escapes)
            text += f"{ALL[index].begin}{inner}{ALL[index].end}"
            wanted.append(InTag(index, inner))
    assert split_at_tags(text, tuple(tag._rule for tag in ALL)) == wanted


async def test_a_text_truncated_within_a_tag_has_no_value():
    with pytest.raises(af.InvalidValue, match="2 tokens"):
        await reply_of('a <point>{"x": 1.5}</point> b', ALL, max_tokens=2)
    assert await reply_of("one <age>1</age> two three", ALL, max_tokens=3) == [
        "one ",
        af.Tagged(AGE, "1", "1"),
        " two",
    ]


async def test_a_tag_that_does_not_match_its_schema_raises():
    with pytest.raises(af.InvalidValue, match=r"\(eos\)"):
        await reply_of('<point>{"x": "far"}</point>', ALL)


def test_the_constraint_of_tags():
    constraint = af.gen("r", tags=[POINT, AGE], whitespace="tight", jump_forward=False).value_type.constraint
    assert (constraint.kind, constraint.whitespace, constraint.jump_forward) == ("tags", "tight", False)
    point, age = constraint.tags()
    assert json.loads(point.source) == msgspec.json.schema(Point)
    assert (point.begin, point.kind, point.end) == ("<point>", "schema", "</point>")
    assert age == TagRule("<age>", "regex", "[0-9]+", "</age>")


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"begin": "<a>", "end": "</a>"}, "schema"),
        ({"begin": "", "end": "</a>", "regex": "a"}, "begin"),
        ({"begin": "<a>", "end": 3, "regex": "a"}, "end"),
        ({"begin": "<a>", "end": "</a>", "regex": "a", "schema": Point}, "regex"),
    ],
)
def test_an_invalid_tag_is_rejected(arguments, param):
    with pytest.raises(af.errors.BadArgument, check=has_param(param)):
        af.Tag(**arguments)


@pytest.mark.parametrize(
    ("arguments", "param", "shown"),
    [
        ({"tags": []}, "tags", None),
        ({"tags": AGE}, "tags", None),
        ({"tags": ["<age>"]}, "tags", None),
        ({"tags": [AGE, AGE]}, "tags", "'<age>'.*'<age>'"),
        ({"tags": [AGE], "regex": "a"}, "tags", None),
        ({"tags": [AGE], "whitespace": "free"}, "whitespace", None),
        ({"regex": "a", "whitespace": "tight"}, "whitespace", None),
        ({"schema": Point, "whitespace": "none"}, "whitespace", "'compact', 'tight', 'free'"),
        ({"schema": Point, "jump_forward": 0}, "jump_forward", None),
        ({"whitespace": "tight"}, "whitespace", None),
        ({"jump_forward": False}, "jump_forward", None),
        ({"type": str, "jump_forward": False}, "jump_forward", None),
    ],
)
def test_an_invalid_gen_is_rejected(arguments, param, shown):
    with pytest.raises(af.errors.BadArgument, match=shown, check=has_param(param)):
        af.gen("r", **arguments)


def test_a_tag_needs_an_end():
    with pytest.raises(af.errors.BadArgument, check=has_param("end")):
        af.Tag("<n>", schema={"type": "integer"}, end="")
