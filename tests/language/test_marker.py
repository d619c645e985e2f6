"""Markers: found in any text, rejected when damaged, resolved in results, and never sent or returned."""

import gc
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from support.faults import has_param

import agentflow as af
from agentflow.language.expressions import Expression
from agentflow.language.markers import MOST_KEPT, Markers

pytestmark = pytest.mark.anyio


class Referred(Expression):
    """Something with a number that a marker can stand for."""

    def __init__(self, number: int) -> None:
        self.number = number


def mark(markers: Markers, item: Referred) -> str:
    return markers.mark(item.number, item, f"x_{item.number}")


MARKERS = Markers()
VARIABLES = [Referred(number) for number in (1, 2, 23, 456_789)]
MARKER = mark(MARKERS, VARIABLES[2])

pieces = st.lists(
    st.text(max_size=12) | st.sampled_from(["⟦af:", "⟧", "⟦", ":1⟧"]) | st.sampled_from(VARIABLES)
)


@given(pieces=pieces)
def test_variables_are_found_between_any_texts(pieces):
    pieces = [*pieces, "."]
    text = "".join([p if isinstance(p, str) else mark(MARKERS, p) for p in pieces])
    merged: list[str | Referred] = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        elif not isinstance(piece, str) or piece:
            merged.append(piece)
    assert MARKERS.split(text) == merged


@pytest.mark.parametrize("around", ["", "x", "⟦ ", " ⟧"])
@pytest.mark.parametrize("change", [str, str.upper])
def test_f20a_a_truncated_marker_is_rejected(around, change):
    """For any single cut. If it is cut twice, fifteen digits of a half of the nonce must be left."""
    first, last = MARKER.index(":") + 1, MARKER.rindex(":") - 16
    for start in range(len(MARKER)):
        for end in range(start + 1, len(MARKER) + 1):
            is_cut_once = (start == 0) != (end == len(MARKER))
            has_digits = any(min(end, half + 16) - max(start, half) >= 15 for half in (first, last))
            is_readable = end >= first + 1 and start <= last + 15
            if (start, end) != (0, len(MARKER)) and (has_digits or (is_cut_once and is_readable)):
                with pytest.raises(af.errors.BadArgument, match="damaged"):
                    MARKERS.split(around + change(MARKER[start:end]) + around)


@pytest.mark.parametrize("length", [3, 4])
def test_f20b_a_marker_cut_before_its_digits_is_rejected(length):
    with pytest.raises(af.errors.BadArgument, match="damaged"):
        MARKERS.split("<" + MARKER[:length])


def test_f20c_a_printed_marker_has_the_name_of_its_variable():
    assert "answer, not awaited" in Markers().mark(1, VARIABLES[0], "answer")
    markers = Markers()
    strange = markers.mark(1, VARIABLES[0], '⟧:"\\\n' * 30)
    assert markers.split(f"a{strange}b") == ["a", VARIABLES[0], "b"]


CONTAINED = {
    "variable": lambda s: s["x"],
    "transformed": lambda s: s["x"].strip(),
    "gen": lambda s: af.gen("y"),
    "turn": lambda s: af.user("Hi"),
    "sum": lambda s: af.gen("y") + "!",
    "state": lambda s: s,
}


@pytest.mark.parametrize("contained", CONTAINED)
async def test_f20d_a_repr_in_a_prompt_is_rejected(contained):
    async with af.session(backend=af.Scripted(["8"])) as flow, flow.state() as s:
        s += af.user("?") + af.assistant(af.gen("x"))
        shown = CONTAINED[contained](s)
        for text in (f"{shown!r}", f"{shown!a}", f"{[shown]}", f"{ {'a': (shown,)} }"):
            for item in (text, af.user(text), af.user(text.upper()), af.gen("z", stop=text)):
                with pytest.raises(af.errors.BadArgument):
                    s += item
        assert await s["x"] == "8"


@pytest.mark.parametrize(
    "damage",
    [
        str.upper,
        str.title,
        lambda marker: marker.replace("⟦", "["),
        lambda marker: marker.replace("⟧", "]"),
        lambda marker: marker.replace(":23⟧", ":⟧"),
        lambda marker: marker.replace(":23⟧", ":x⟧"),
        lambda marker: marker.replace("⟦", "⟦ "),
        lambda marker: marker.replace("af", "AF"),
        lambda marker: f"{MARKER[:36]}{marker}{MARKER[36:]}",
        lambda marker: marker[:20] + "\n" + marker[20:],
        lambda marker: marker[:17] + "…",
        lambda marker: "…" + marker[-9:],
        lambda marker: json.dumps(marker).strip('"'),
        lambda marker: marker.encode("utf-8").decode("latin-1"),
    ],
)
def test_a_changed_marker_is_rejected(damage):
    damaged = damage(MARKER)
    assert damaged != MARKER
    with pytest.raises(af.errors.BadArgument, match="damaged"):
        MARKERS.split(f"before {damaged} after")


def test_a_doubled_marker_is_two_references():
    assert MARKERS.split(MARKER * 2) == [VARIABLES[2]] * 2


def test_a_truncated_marker_beside_a_whole_one_is_rejected():
    with pytest.raises(af.errors.BadArgument, match="damaged"):
        MARKERS.split(MARKER + MARKER[:30])


def test_a_marker_of_another_process_stays_text():
    foreign = mark(Markers(), VARIABLES[0])
    for text in (foreign, foreign[:20], foreign.upper(), f"⟦af:{'0' * 32}:1⟧", "⟦af::1⟧"):
        assert MARKERS.split(text) == [text]


def test_nonces_are_long_and_differ():
    nonces = {"".join(re.findall("[0-9a-f]{16}", mark(Markers(), VARIABLES[0]))) for _ in range(50)}
    assert len(nonces) == 50
    assert all(int(nonce, 16) < 2**128 for nonce in nonces)


def test_a_marker_does_not_keep_its_variable():
    variable = Referred(5)
    marker = mark(MARKERS, variable)
    del variable
    gc.collect()
    with pytest.raises(af.errors.StateClosed, match="has ended"):
        MARKERS.split(marker)


def test_an_empty_text_has_no_parts():
    assert MARKERS.split("") == []


async def test_an_f_string_holds_expressions():
    """They are appended in place, and the model reads no trace of them."""
    async with af.session(backend=af.Scripted(["8", "yes"])) as flow, flow.state() as s:
        s += af.user(f"How many legs has {'a spider'}?")
        s += af.assistant(f"It has {af.gen('legs')} legs: {af.select('sure', ['yes', 'no'])}.")
        assert (
            await s.text()
            == "<user>How many legs has a spider?</user><assistant>It has 8 legs: yes.</assistant>"
        )


async def test_an_f_string_holds_turns_and_more_f_strings():
    async with af.session(backend=af.Scripted(["A", "B"])) as flow, flow.state() as s:
        inner = f"({af.gen('a')})"
        second = af.gen("b")
        s += f"{af.user('Hi')}{af.assistant(f'{inner} and {second}')}"
        assert await s.text() == "<user>Hi</user><assistant>(A) and B</assistant>"


def test_an_expression_takes_no_format_and_has_no_text():
    with pytest.raises(af.errors.BadArgument):
        f"{af.gen('x'):>10}"
    with pytest.raises(af.errors.BadArgument):
        str(af.gen("x"))


def test_the_oldest_markers_of_expressions_are_dropped():
    markers = Markers()
    texts = [markers.mark_expression(Referred(number)) for number in range(MOST_KEPT + 1)]
    assert markers.split(texts[-1])[0].number == MOST_KEPT
    with pytest.raises(af.errors.StateClosed):
        markers.split(texts[0])


async def test_a_variable_of_another_session_in_an_f_string_is_rejected():
    async with (
        af.session(backend=af.Scripted(["A"])) as one,
        af.session(backend=af.Scripted(["B"])) as other,
        one.state() as s,
        other.state() as foreign,
    ):
        s += af.gen("x")
        await s["x"]
        with pytest.raises(af.errors.ForeignState):
            foreign += f"from elsewhere: {s['x']}"
        with pytest.raises(af.errors.ForeignState):
            foreign.set("y", f"{s['x']}")


QUOTED = 'say "hi"\n\u00e9'


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda text: f"<{text}>", f"<{QUOTED}>"),
        (lambda text: json.dumps({"a": f"{text}"}), json.dumps({"a": QUOTED})),
        (lambda text: [f"{text}", {"k": (f"{text}!", 1)}, None], [QUOTED, {"k": (f"{QUOTED}!", 1)}, None]),
        (lambda text: {f"{text}": {f"{text}"}}, {QUOTED: {QUOTED}}),
        (lambda text: f"{text.upper()}", QUOTED.upper()),
        (lambda text: "plain", "plain"),
        (lambda text: "a: " + text + text.upper() + f"{text}", f"a: {QUOTED}{QUOTED.upper()}{QUOTED}"),
        (lambda text: [{"k": ("a" + text,)}, "b" + text], [{"k": (f"a{QUOTED}",)}, f"b{QUOTED}"]),
        (lambda text: f"{'a' + text}", f"a{QUOTED}"),
    ],
    ids=["text", "json", "nested", "key", "transform", "plain", "f37_sum", "f37_sums", "f37_formatted_sum"],
)
async def test_markers_in_a_result_become_texts(result, expected):
    async def program(s):
        s += af.gen("x")
        return result(s["x"])

    async with af.session(backend=af.Scripted([QUOTED])) as flow:
        assert await flow.run(program) == expected


@dataclass(frozen=True, slots=True)
class Noted:
    text: str
    state: Any = None


class Judged(BaseModel):
    text: str
    notes: dict[str, Noted]
    score: int = 0


class Row(msgspec.Struct, frozen=True):
    texts: frozenset[str]


async def test_f37_a_generated_marker_in_a_returned_sum_stays_text():
    """The text of a variable is never a marker."""
    marker = ""

    async def program(s):
        nonlocal marker
        s += af.gen("x") + af.gen("y")
        marker = f"{s['y']}"
        return "<" + s["x"]

    async with af.session(backend=af.Scripted({"x": lambda call: marker, "y": "other"})) as flow:
        assert await flow.run(program) == f"<{marker}"
        assert marker


class LoadedRows(list[str]):
    """Rows that a database would load when they are read."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError


class LoadedFields(dict[str, str]):
    def __iter__(self) -> Iterator[str]:
        raise AssertionError

    def values(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize("loaded", [LoadedRows(["a"]), LoadedFields(a="b")])
async def test_f37_the_search_for_markers_runs_no_code_of_the_result(loaded: Any):
    async def program(s: af.State) -> Any:
        s += af.gen("x")
        return {"loaded": loaded, "text": "a" + s["x"]}

    async with af.session(backend=af.Scripted({"x": "y"})) as flow:
        result = await flow.run(program)
        assert result["loaded"] is loaded
        assert result["text"] == "ay"


async def test_f37_markers_in_records_become_texts():
    async def program(s):
        s += af.gen("x")
        text = f"<{s['x']}>"
        counted = defaultdict(list, {text: [text]})
        return Judged(text=text, notes={"a": Noted(text, s)}), Row(frozenset([text])), counted

    async with af.session(backend=af.Scripted(["a"])) as flow:
        judged, row, counted = await flow.run(program)
        assert judged.text == judged.notes["a"].text == "<a>"
        assert judged.model_fields_set == {"text", "notes"}
        assert isinstance(judged.notes["a"].state, af.State)
        assert row == Row(frozenset(["<a>"]))
        assert counted["<a>"] == ["<a>"]
        assert counted["new"] == []


@dataclass(eq=False)
class Item:
    text: str
    owners: tuple[Any, ...] = ()
    items: list["Item"] = field(default_factory=list)


async def test_f37_a_record_with_a_marker_may_refer_to_its_owner():
    async def program(s):
        s += af.gen("x")
        plain, owner = Item("plain"), Item("owner")
        owner.items += [plain, Item(f"<{s['x']}>", (owner, owner.items)), plain]
        return owner, plain

    async with af.session(backend=af.Scripted(["a"])) as flow:
        owner, plain = await flow.run(program)
        assert [item.text for item in owner.items] == ["plain", "<a>", "plain"]
        assert owner.items[1].owners == (owner, owner.items)
        assert owner.items[1].owners[1] is owner.items
        assert owner.items[0] is owner.items[2] is plain


async def test_f37_names_and_tools_hold_no_markers():
    async def tool() -> dict[str, str]:
        return {"found": f"<{s['x']}>"}

    async with (
        af.session(backend=af.Scripted(["a", af.ToolCall("tool", {}), "b"])) as flow,
        flow.state() as s,
    ):
        s += af.user("?") + af.gen("x")
        text = f"{s['x']}"
        with pytest.raises(af.errors.BadArgument, check=has_param("name")):
            af.gen(text)
        with pytest.raises(af.errors.BadArgument, check=has_param("questions")):
            await s.decide({text: bool})
        schema = {"type": "object", "properties": {"a": {"type": "string", "description": text}}}
        for fixed in (af.tool(tool, description=text), af.tool(tool, parameters=schema)):
            with pytest.raises(af.errors.BadArgument, check=has_param("tools")):
                af.reply("y", tools=[fixed])
        with pytest.raises(af.errors.BadArgument, check=has_param("name")):
            s.set(text, "a")
        s += af.user("?")
        assert await af.act(s, tools=[tool]) == "b"
        (result,) = [one["content"] for one in await s.messages() if one["role"] == "tool"]
        assert "the result of a tool cannot hold a variable" in result


async def test_a_result_without_markers_is_returned_itself():
    shared = {"texts": ["plain"], "numbers": (1, {2})}
    shared["itself"] = shared

    async def program(s):
        s += af.gen("x")
        assert f"{s['x']}"  # a marker exists
        return shared

    async with af.session(backend=af.Scripted(["a"])) as flow:
        assert await flow.run(program) is shared


async def test_a_marker_that_has_no_text_is_not_returned():
    async def never_appended(s):
        return f"{af.gen('x')}"

    async def damaged(s):
        s += af.gen("x")
        return f"{s['x']}"[:20]

    async with af.session(backend=af.Scripted(["a", "b"])) as flow:
        for program in (never_appended, damaged):
            with pytest.raises(af.errors.BadArgument):
                await flow.run(program)


async def test_a_variable_that_failed_fails_the_result_that_holds_it():
    async def program(s):
        branch = s.fork(1)[0]
        branch += af.gen("x", type=int)
        with pytest.raises(af.errors.RunFailed):
            await branch["x"]
        return f"{branch['x']}"

    async with af.session(backend=af.Scripted(["no number"])) as flow:
        with pytest.raises(af.errors.RunFailed):
            await flow.run(program)
