"""Prose and tool calls separated in a text that arrives in any pieces."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from agentflow.engine.text.tool_format import FALLBACK, ToolFormat
from agentflow.engine.text.tool_output import JsonExtent, ToolOutput
from agentflow.protocol.chat import Arguments, CallBegun, ReplyPiece

HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>")
LIST = ToolFormat("[TOOL_CALLS] ", "", is_list=True, before="", between=None)
BARE = ToolFormat("", "", arguments_key="parameters", before="", between=None)
BARE_LIST = ToolFormat("", "", is_list=True, before="", between=None)
LAST_NAME = ToolFormat("<call>", "</call>", name_first=False, before="", between="")
TYPED = ToolFormat("<call>", "</call>", constants=(("type", "function"),))
FORMS = {
    "hermes": HERMES,
    "fallback": FALLBACK,
    "list": LIST,
    "bare": BARE,
    "bare_list": BARE_LIST,
    "last_name": LAST_NAME,
    "typed": TYPED,
}
NAMES = ("weather", "get_time", 'odd "näme"')

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab{}[]"\\<>é/ \n'), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("ab{", max_size=2), inner, max_size=2)
    ),
    max_leaves=5,
)
arguments = st.dictionaries(st.sampled_from(["city", "a}", '"']), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments.map(json.dumps)), min_size=1, max_size=3)


def written(form: ToolFormat, some: list[tuple[str, str]]) -> str:
    objects = []
    for name, text in some:
        members = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in form.constants]
        own = [
            f"{json.dumps(form.name_key)}: {json.dumps(name, ensure_ascii=False)}",
            f"{json.dumps(form.arguments_key)}: {text}",
        ]
        objects.append("{" + ", ".join(members + (own if form.name_first else own[::-1])) + "}")
    if form.is_list:
        return f"{form.begin}[{', '.join(objects)}]{form.end}"
    return (form.between or "").join([f"{form.begin}{one}{form.end}" for one in objects])


def summary_of(pieces: list[ReplyPiece]) -> list[tuple[str, ...]]:
    """Neighbouring pieces of a kind put together, and the ids of calls left out."""
    found: list[tuple[str, ...]] = []
    for piece in pieces:
        if isinstance(piece, CallBegun):
            assert re.fullmatch("call_[0-9a-f]{24}", piece.id)
            found.append(("call", piece.name, ""))
        elif isinstance(piece, Arguments):
            assert piece.text
            kind, name, text = found[-1]
            assert kind == "call"
            found[-1] = (kind, name, text + piece.text)
        else:
            assert piece.text
            if found and found[-1][0] == "prose":
                found[-1] = ("prose", found[-1][1] + piece.text)
            else:
                found.append(("prose", piece.text))
    return found


def read(
    form: ToolFormat,
    parts: list[str],
    *,
    constrained: bool,
    names: tuple[str, ...] = NAMES,
    begins: tuple[str, ...] = (),
    truncated: bool = False,
) -> list[ReplyPiece]:
    output = ToolOutput(form, names, is_constrained=constrained, begins=begins)
    pieces = [piece for part in parts for piece in output.push(part)]
    pieces += output.finish(is_truncated=truncated)
    assert output.num_calls == sum(isinstance(piece, CallBegun) for piece in pieces)
    return pieces


def cut(text: str, data: st.DataObject) -> list[str]:
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("constrained", [True, False])
@examples(50)
@given(some=calls, before=st.sampled_from(["", "I look.", "a <b> {c} [d]", "x\n\n"]), data=st.data())
def test_calls_are_read_as_they_were_written(name, constrained, some, before, data):
    form = FORMS[name]
    some = some if form.allows_several else some[:1]
    before = before if form.mark else ""
    text = (before + form.before if before else "") + written(form, some)
    pieces = read(form, cut(text, data), constrained=constrained)
    expected = [("call", *call) for call in some]
    assert summary_of(pieces) == ([("prose", before)] if before else []) + expected


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].mark])
@pytest.mark.parametrize("constrained", [True, False])
@given(some=calls, before=st.sampled_from(["", "I look.", "a <b> {c}"]), data=st.data())
def test_a_truncated_answer_has_no_markup_in_its_prose(name, constrained, some, before, data):
    form = FORMS[name]
    some = some if form.allows_several else some[:1]
    text = (before + form.before if before else "") + written(form, some)
    text = text[: data.draw(st.integers(0, len(text)))]
    found = summary_of(read(form, cut(text, data), constrained=constrained, truncated=True))
    prose = found.pop(0)[1] if found and found[0][0] == "prose" else ""
    assert before.startswith(prose)
    whole, last = found[:-1], found[-1:]
    assert whole == [("call", *call) for call in some[: len(whole)]]
    for kind, name, text in last:
        assert (kind, name) == ("call", some[len(whole)][0])
        assert some[len(whole)][1].startswith(text)
        assert form.name_first or text == some[len(whole)][1]


WORDS = [
    *("<tool_call>", "</tool_call>", "<tool", "<call>", "</call>", "[TOOL_CALLS]", "text", "\n", " "),
    *("[", "]", "{", "}", "{}", ", ", '"', "\\", "1e", "-", "tru", '"\\ud83d', '{"a": "}"}'),
    *('{"name": "weather"', '"arguments": ', '"parameters": '),
    '<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>',
]

BEGINS = [(), ("<tool_call>",), ('{"name": "weather"', "["), ("[TOOL_CALLS]",)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("constrained", [True, False])
@given(
    text=st.lists(st.sampled_from(WORDS), max_size=12).map("".join),
    begins=st.sampled_from(BEGINS),
    data=st.data(),
)
def test_the_result_does_not_depend_on_the_pieces(name, constrained, text, begins, data):
    form, how = FORMS[name], {"constrained": constrained, "begins": begins}
    whole = summary_of(read(form, [text], **how))
    assert summary_of(read(form, cut(text, data), **how)) == whole
    assert summary_of(read(form, list(text), **how)) == whole


@pytest.mark.parametrize("name", FORMS)
@given(text=st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_nothing_is_lost(name, text):
    """All characters outside of calls come as prose, in their order, except white space next to calls and
    the ends of calls."""
    found = summary_of(read(FORMS[name], [text], constrained=False))
    if all(kind == "prose" for kind, *_ in found):
        assert "".join(piece[1] for piece in found) == text
    at = 0
    for piece in found:
        shown = piece[-1]
        assert text.find(shown, at) >= 0
        at = text.find(shown, at) + len(shown)


@pytest.mark.parametrize("name", FORMS)
@given(text=st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_without_tools_all_is_prose(name, text):
    found = summary_of(read(FORMS[name], list(text), constrained=False, names=()))
    assert found == ([("prose", text)] if text else [])


@given(text=st.text(st.sampled_from("ab\n <tool_cal{"), max_size=30))
def test_prose_comes_immediately(text):
    """Only text that could begin a mark is held back."""
    output = ToolOutput(HERMES, NAMES, is_constrained=True)
    pushed = ""
    for number, char in enumerate(text):
        pushed += "".join(piece.text for piece in output.push(char))
        so_far = text[: number + 1]
        could_begin = [
            m for m in ("<tool_call>", "\n<tool_call>") for n in range(len(m)) if so_far.endswith(m[:n])
        ]
        longest = max(
            [n for m in could_begin for n in range(len(m)) if so_far.endswith(m[:n])],
            default=0,
        )
        assert pushed == so_far[: len(so_far) - longest]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{oops",
        "<tool_call>\nno JSON</tool_call>",
        "<tool_call>",
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather"}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"a": ',
        '<tool_call>\n{"name": "weather", "arguments": {"a": nope}}\n</tool_call>',
        "<tool_call>\n" + "[" * 10_000,
        "<tool_call>\n" + "[" * 5000 + "]" * 5000,
        '<tool_call>\n{"name": "weather", "arguments": {"a": "\ud800"}}',
    ],
)
def test_text_that_is_no_call_is_prose(text):
    assert summary_of(read(HERMES, [text], constrained=False)) == [("prose", text)]
    assert summary_of(read(HERMES, [*text[:200], text[200:]], constrained=False)) == [("prose", text)]


def test_prose_goes_on_after_what_is_no_call():
    output = ToolOutput(HERMES, NAMES, is_constrained=False)
    pieces = output.push("<tool_call>{oops, and a long text after it")
    assert summary_of(pieces) == [("prose", "<tool_call>{oops, and a long text after it")]
    good = written(HERMES, [("weather", "{}")])
    assert summary_of(output.push("\n" + good + " So.")) == [("call", "weather", "{}"), ("prose", " So.")]


def test_a_call_is_emitted_with_its_first_character():
    output = ToolOutput(HERMES, NAMES, is_constrained=True)
    output.push('<tool_call>\n{"name": "weather", "arguments": ')
    begun, first = output.push('{"c')
    assert (begun.name, first) == ("weather", Arguments('{"c'))
    assert output.push('ity": "O}') == [Arguments('ity": "O}')]
    assert output.push('"}}') == [Arguments('"}')]
    assert output.push("\n</tool_call>") == []
    assert output.finish() == []


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("before", ["", "I look.\n"])
def test_f42i_the_first_character_of_a_truncated_mark_is_no_content(before, constrained):
    found = summary_of(read(HERMES, [before, "<"], constrained=constrained, truncated=True))
    assert found == ([("prose", "I look.")] if before else [])
    # An answer that ends by itself has all of its text.
    assert summary_of(read(HERMES, [before, "<"], constrained=constrained)) == [("prose", before + "<")]


@pytest.mark.parametrize("end", range(1, len(HERMES.mark)))
def test_f37_a_truncated_mark_before_which_no_text_may_be_is_no_content(end):
    """The rule for answers that have another form if they consist of no calls."""
    cut_off, begins = HERMES.mark[:end], (HERMES.mark,)
    assert read(HERMES, [cut_off], constrained=True, begins=begins, truncated=True) == []
    whole = read(HERMES, [cut_off], constrained=True, begins=begins)
    assert summary_of(whole) == [("prose", cut_off)]


GOOD = written(HERMES, [("weather", "{}")])
CALL = ("call", "weather", "{}")
CUT_OFF = '<tool_call>\n{"name": "weather", "arguments": {"city": "Os'
READINGS = {
    # White space before text that only begins like a call is kept.
    **{text: [("prose", text)] for text in ("x\n<tool_call>no", "\n<tool_call>\n{oops", "x\n<tool_call>")},
    f"{GOOD}\n \n<tool_call>no": [CALL, ("prose", "\n \n<tool_call>no")],
    # A text may end within the mark of another call.
    **{GOOD + begun: [CALL] for begun in ("\n", "\n<", "\n<tool_call")},
    # White space around calls is dropped.
    f"Look:\n{GOOD} \n\n{GOOD}\n": [("prose", "Look:"), CALL, CALL],
    f"{GOOD}\n\nSo.": [CALL, ("prose", "\n\nSo.")],
}


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("text", READINGS)
def test_white_space_and_marks_next_to_calls(text, constrained):
    for parts in ([text], list(text)):
        assert summary_of(read(HERMES, parts, constrained=constrained)) == READINGS[text]


@pytest.mark.parametrize(
    ("constrained", "truncated", "whole", "begun"),
    [
        (True, False, [("call", "weather", '{"city": "Os')], [("prose", CUT_OFF[:20])]),
        (False, False, [("prose", CUT_OFF)], [("prose", CUT_OFF[:20])]),
        (True, True, [("call", "weather", '{"city": "Os')], []),
        (False, True, [("call", "weather", '{"city": "Os')], []),
    ],
)
def test_calls_that_are_cut_off(constrained, truncated, whole, begun):
    """In their arguments, and in their name (``begun``)."""
    how = {"constrained": constrained, "truncated": truncated}
    assert summary_of(read(HERMES, [CUT_OFF], **how)) == whole
    assert summary_of(read(HERMES, [CUT_OFF[:20]], **how)) == begun


@given(
    value=values.filter(lambda value: isinstance(value, dict | list)),
    after=st.text('a{}[]"', max_size=3),
    data=st.data(),
)
def test_the_extent_of_a_value(value, after, data):
    text = json.dumps(value)
    extent, at = JsonExtent(), 0
    for part in cut(text + after, data):
        end = extent.read(part)
        if end is not None:
            assert at + end == len(text)
            return
        at += len(part)
    raise AssertionError("the value did not end")
