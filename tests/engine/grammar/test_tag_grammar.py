"""Tags in free text: any text outside of them, and inside of them the texts that their kind allows."""

import json
import re
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.llguidance import LlguidanceGrammar, LlguidanceMatcher
from agentflow.errors import BadArgument
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import BYTE_VOCABULARY, text_under, walk

CALL = {"begin": "<call>", "kind": "schema", "source": '{"type": "integer"}', "end": "</call>"}
WORD = {"begin": "[[", "kind": "regex", "source": "[a-z\\]]*", "end": "]]"}
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "of": {"$ref": "#"}}, "required": ["v"]}
NESTED = {"begin": "<tree>", "kind": "schema", "source": json.dumps(TREE), "end": "</tree>"}
BRACKETS = {"begin": "aab", "kind": "grammar", "source": 'start: "(" start ")" | "x"', "end": "!"}


def tags(*some, **more):
    return compile_constraint(Constraint("tags", json.dumps(some), **more).check())


def follow(constraint, text: str) -> tuple[int, bool]:
    """How many bytes of the text are taken, and whether it may end there."""
    growing = text_under(constraint)
    for taken, byte in enumerate(text.encode()):
        if byte not in growing.allowed():
            return taken, growing.may_end()
        growing.accept(byte)
    return len(text.encode()), growing.may_end()


ALL = tags(CALL, WORD, BRACKETS, NESTED)


@pytest.mark.parametrize(
    ("text", "may_end"),
    [
        ("", True),
        ("Free text, <b>and more</b> of it: é😀\n\x00", True),
        ("It is <call", True),
        ("It is <call>", False),
        ("It is <call>1", False),
        ("It is <call>12</call>", True),
        ("It is <call>12</call>, and [[word]] and <call>3</call>.", True),
        ("<<call>-1</call><call>2</call>", True),
        ("aaab((x))!", True),
        ("aab((x)", False),
        ('<tree>{"v": 1, "of": {"v": 2}}</tree> done', True),
        ('<tree>{"v": 1, "of": {"v": 2}}', False),
        ("</call> outside means nothing", True),
        ("[[a]]", True),
        ("[[a]", False),
    ],
)
def test_texts_that_are_allowed(text, may_end):
    assert follow(ALL, text) == (len(text.encode()), may_end)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("so <call>x", "so <call>"),
        ("so <call>1 ", "so <call>1"),
        ("so <call>1</call>[[A", "so <call>1</call>[["),
        ("<call>1<call>", "<call>1<"),
        ("aaab(y", "aaab("),
        ('<tree>{"v": 1}<tree>', '<tree>{"v": 1}<'),
    ],
)
def test_texts_that_are_not(text, allowed):
    assert follow(ALL, text) == (len(allowed), False)


def test_a_regular_body_ends_at_the_first_end():
    assert follow(ALL, "[[a]]]") == (6, True)  # the last one is free text again
    growing = text_under(ALL)
    for byte in b"[[a]]":
        growing.accept(byte)
    assert 0x20 in growing.allowed()


@pytest.mark.parametrize(
    ("kind", "source", "body"),
    [
        ("grammar", "root ::= [a-z<]+", "ab<c<"),
        ("grammar", 'root ::= "x"? word\nword ::= [a-z</>]+', "ab</call<"),
        ("grammar", 'root ::= "a" ("</call>b")*', "a"),
        ("grammar", "root ::= .*", "any</cal>"),
        ("grammar", 'start: W+\nW: /[a-z]/ | "<br>"', "ab<br>"),
        ("regex", "[\\p{L}</>]+", "éa</call"),
    ],
)
def test_f37_a_body_ends_although_it_may_contain_the_beginning_of_the_end(kind, source, body):
    body_of = {"kind": kind, "source": source}
    for text, more in (
        (f"so <call>{body}</call>bc", {}),
        (f"<call>{body}</call>;<call>a</call>", {"between": ";"}),
    ):
        assert follow(tags(CALL | body_of, WORD, **more), text) == (len(text.encode()), True)


@pytest.mark.parametrize(("most", "longest"), [(None, "<baaa"), (2, "<baaa"), (1, "<ba")])
def test_f37_a_tag_in_gbnf_ends_at_the_first_end_after_a_whole_text(most, longest):
    """Also if its body could go on: otherwise, the tags could not be read from the text."""
    constraint = tags(
        {"begin": "<", "kind": "grammar", "source": 'root ::= "b" [^b]*', "end": "a"}, max_tags=most
    )
    assert follow(constraint, "<baaa") == (len(longest), True)
    assert follow(constraint, "<ba<a") == ((3, True) if most == 1 else (4, False))
    assert follow(constraint, "<ba<ba") == ((3, True) if most == 1 else (6, True))


@given(st.randoms(use_true_random=False), st.text(st.sampled_from("<cal>a[b] "), max_size=20))
def test_wherever_a_tag_begins_what_follows_is_of_its_kind(dice, prefix):
    text = walk(text_under(ALL), dice, prefix.encode())
    if text is None:
        return
    outside, place = text.decode(errors="replace"), 0
    inside = {
        "<call>": r"(0|-?[1-9][0-9]{0,17})</call>",
        "[[": r"[a-z\]]*?\]\]",
        "aab": r"\(*x\)*!",
        "<tree>": r"\{\"v\": .*?\}</tree>",
    }
    begins = "|".join(map(re.escape, inside))
    while found := re.compile(begins).search(outside, place):
        body = re.compile(inside[found[0]]).match(outside, found.end())
        assert body is not None, outside
        place = body.end()


def test_a_string_in_a_regular_body_does_not_hold_the_end():
    said = tags(CALL | {"source": '{"type": "string"}'})
    assert follow(said, '<call>"a</call') == (len('<call>"a</call'), False)
    assert follow(said, '<call>"a</call>') == (len('<call>"a</call'), False)
    assert follow(said, '<call>"a</cal"</call>') == (len('<call>"a</cal"</call>'), True)


def test_a_hundred_tags():
    many = tags(*[CALL | {"begin": f"<fn_{n}>", "source": json.dumps({"const": n})} for n in range(100)])
    for n in (0, 9, 57, 99):
        text = f"Free <fn_ text <fn_{n}>{n}</call> and <fn_1>1</call>."
        assert follow(many, text) == (len(text), True)
        wrong = f"Free <fn_ text <fn_{n}>{n + 100}"
        assert follow(many, wrong)[0] < len(wrong)


def test_free_text_is_not_forced_and_marks_are():
    grammar = LlguidanceGrammar(tags(CALL).payload.decode(), BYTE_VOCABULARY)
    text = grammar.matcher()
    assert text.forced() == b""
    for byte in b"so <call>1":
        text.accept(byte)
    assert not text.may_end()
    text.accept(ord("<"))
    assert text.forced() == b"/call>"


def test_the_whitespace_of_schemas_is_the_constraints():
    for whitespace, body in (("compact", '{"v": 1}'), ("tight", '{"v":1}')):
        text = f"<tree>{body}</tree>"
        assert follow(tags(NESTED, whitespace=whitespace), text) == (len(text), True)
        other = "tight" if whitespace == "compact" else "compact"
        assert follow(tags(NESTED, whitespace=other), text)[1] is False


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        (CALL | {"source": '{"not": {}}'}, "tags: '<call>': schema: not is not supported"),
        (CALL | {"source": "false"}, "tags: '<call>': schema: must be an object that"),
        (CALL | {"kind": "regex", "source": "(a)\\1"}, "tags: '<call>': regex: back-references"),
        (CALL | {"kind": "grammar", "source": "start: nothing"}, 'unknown name: "nothing"'),
        (CALL | {"kind": "regex", "source": "(?=a)b"}, "look-arounds"),
        (
            CALL | {"kind": "regex", "source": "a b", "end": " "},
            "no text of its regex can precede the first ' '",
        ),
        (CALL | {"kind": "grammar", "source": "start: W\nW: /[a-z<]+/"}, "would not end"),
        (
            CALL | {"kind": "grammar", "source": "start: W WS?\nW: /[a-z]/\nWS: /\\n+/", "end": "\n<"},
            "would not end",
        ),
        (CALL | {"kind": "grammar", "source": "start: /(?s:.*)/"}, "would not end"),
        (
            CALL | {"source": '{"type": "integer", "minimum": 5, "maximum": 3}'},
            "'<call>': schema: Unsatisfiable",
        ),
    ],
)
def test_a_tag_that_cannot_be_kept_is_refused_by_name(tag, words):
    with pytest.raises(BadArgument) as caught:
        tags(WORD, tag)
    assert words in str(caught.value)


LED = {**CALL, "lead": "\n", "end": "\n</call>"}
BARE = {
    "begin": "CALLS",
    "lead": " ",
    "kind": "schema",
    "source": '{"type": "array", "items": {"type": "null"}}',
}
BARE["end"] = ""


@pytest.mark.parametrize(
    ("tag", "text", "taken", "may_end"),
    [
        (LED, "so <call>\n1\n</call> and", None, True),
        (LED, "so <call>1", "so <call>", False),
        (LED, "so <call>\n1</call>", "so <call>\n1", False),
        (BARE, "so CALLS [null, null]", None, True),
        (BARE, "so CALLS [null] and", None, True),
        (BARE, "so CALLS[null]", "so CALLS", False),
        ({**NESTED, "end": ""}, 'a <tree>{"v": 1, "of": {"v": 2}} done', None, True),
    ],
)
def test_a_lead_and_an_empty_end(tag, text, taken, may_end):
    assert follow(tags(tag), text) == (len(text if taken is None else taken), may_end)


LONG = {"type": "string", "maxLength": 70}
LARGE = {"type": "object", "properties": {"a": LONG, "b": LONG, "c": LONG}, "required": ["a", "b", "c"]}
ROWS = {
    "machine": tags(LED, between="\n"),
    "parser": tags({**LED, "source": json.dumps(TREE)}, between="\n"),
    "large": tags(*[{**LED, "begin": f"<{n}>", "source": json.dumps(LARGE)} for n in range(4)], between="\n"),
}
VALUES = {
    "machine": ["1", "-20"],
    "parser": ['{"v": 1}', '{"v": 1, "of": {"v": 2}}'],
    "large": ['{"a": "x", "b": "", "c": "y"}'],
}


@pytest.mark.parametrize("name", ROWS)
def test_tags_in_a_row(name):
    row, values = ROWS[name], VALUES[name]
    assert row.form == ("dfa" if name == "machine" else "llguidance")
    begin = "<2>" if name == "large" else "<call>"
    one, other = f"{begin}\n{values[0]}\n</call>", f"{begin}\n{values[-1]}\n</call>"
    for text, taken, may_end in (
        (one, None, True),
        (f"{one}\n{other}", None, True),
        (f"{one}\n{other}\n{one}", None, True),
        (f"{one}\n", None, False),
        ("", None, False),
        (f" {one}", "", False),
        (f"{one} {one}", one, True),
        (f"{one}{one}", one, True),
    ):
        assert follow(row, text) == (len(text if taken is None else taken), may_end)


def test_f37_the_end_of_a_tag_is_tried_at_few_places(monkeypatch):
    masks = Mock(side_effect=LlguidanceMatcher.mask)
    monkeypatch.setattr(LlguidanceMatcher, "mask", lambda matcher: masks(matcher))
    tags({"begin": "<a>", "kind": "grammar", "source": "start: /[^<]*/", "end": "</a>"})
    num_written = 8 * 200  # bytes of the texts that try the whole tag
    assert masks.call_count < num_written + 8 * 33


@pytest.mark.parametrize("source", [CALL["source"], json.dumps(TREE)])
@pytest.mark.parametrize(("between", "most"), [("", 1), ("", 2), ("; ", 3), ("", None)])
def test_how_many_tags(source, between, most):
    value = "7" if source == CALL["source"] else '{"v": 7}'
    row = tags({**CALL, "source": source}, between=between, max_tags=most)
    one = f"<call>{value}</call>"
    for count in range(1, 6):
        text = between.join([one] * count)
        allowed = count if most is None else min(count, most)
        assert follow(row, text) == (len(between.join([one] * allowed)), True)


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        (Constraint("regex", "a", between=""), "between"),
        (Constraint("tags", json.dumps([CALL]), between="x" * 300), "between"),
        (Constraint("tags", json.dumps([CALL]), max_tags=101), "max_tags"),
        (Constraint("tags", json.dumps([CALL]), between="", max_tags=0), "max_tags"),
        (Constraint("tags", json.dumps([{**WORD, "end": ""}])), "end"),
        (Constraint("tags", json.dumps([{**CALL, "lead": "x" * 300}])), "lead"),
    ],
)
def test_fields_that_make_no_sense_are_rejected(constraint, param):
    with pytest.raises(BadArgument, check=has_param(param)):
        constraint.check()


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("num_calls", [0, 1, 2, 3, 4])
def test_f33a_a_text_ends_after_the_last_tag_allowed(most, num_calls):
    text = "".join(f"a <call>{n}</call>" for n in range(num_calls)) + " and prose"
    allowed = "".join(f"a <call>{n}</call>" for n in range(most)) if num_calls >= most else text
    assert follow(tags(CALL, max_tags=most), text) == (len(allowed), True)


@pytest.mark.parametrize(
    ("begin", "body", "value"),
    [
        ("<", {"kind": "schema", "source": '{"type": "integer"}', "end": ""}, "1"),
        ("[", {"kind": "schema", "source": json.dumps({"type": "number"}), "end": ""}, "12"),
        ("<", {"kind": "regex", "source": "(?:bb)?", "end": "b"}, "b"),
        ("<", {"kind": "grammar", "source": "root ::= [0-9]*", "end": "b"}, "12b"),
        ("<", CALL, "1</call>"),
    ],
)
def test_f37_a_begin_of_one_byte_begins_a_tag_after_any_other(begin, body, value):
    """A body that could go on ends at the byte of the next begin, which then passed as free text."""
    constraint = tags({**body, "begin": begin}, {**WORD, "begin": "aab"})
    one = f"{begin}{value}"
    for before in ("", "so ", one, f"{one} or {one}", "aab]]", f"aab]]{one}"):
        if not body["end"] and before.endswith(one):
            assert follow(constraint, f"{before}{begin}zz") == (len(f"{before}{begin}"), False)
        assert follow(constraint, before + begin) == (len(before + begin), False)
        assert follow(constraint, f"{before}{begin}x")[0] == len(before + begin)
        assert follow(constraint, before + one) == (len(before + one), True)
