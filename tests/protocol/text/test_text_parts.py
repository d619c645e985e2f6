"""Transforms that read a part of an answer, against references, on hostile texts, and through a session."""

from __future__ import annotations

import csv
import json
import re
import sys
from datetime import date, datetime
from decimal import Decimal
from io import StringIO

import anyio
import anyio.lowlevel
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.faults import has_param

import agentflow as af
from agentflow.backends.scripted_generator import ScriptedGenerator
from agentflow.protocol import ops
from agentflow.protocol.text import text_parts
from agentflow.protocol.text.transform import Transform, apply_transforms
from agentflow.runtime.interpreter.checking import CheckingInterpreter

pytestmark = pytest.mark.anyio

RESULTS = [
    ("items", "numbered", "Sure:\n1. a\n 2. b c\nand\n10. d", "a\nb c\nd"),
    ("items", "numbered.-1", "1. a\n2. b", "b"),
    ("items", "bulleted", "Sure:\n- a\n  * b\n+ c\n-d\n-\n- e", "a\nb\n- e"),
    ("items", "bulleted.0", "- a\n- b", "a"),
    ("items", "comma", 'a, "b, c",d', "a\nb, c\nd"),
    ("items", "comma.1", "a, b", "b"),
    ("xml", "b", "<a> <b>1 &lt; 2</b> <b>3</b> </a>", "1 &lt; 2"),
    ("xml", "b", '<bc>0</bc><b/><b kind="x">\n1\n</b>', "\n1\n"),
    ("yaml", "a.b.0", "a:\n  b: [one, 2]", "one"),
    ("yaml", "a", "Here:\n```yaml\na: 1\n```\nand ```b: 2```", "1"),
    ("yaml", "", "a: 2026-05-01\n1: [yes, ~, 1.5]", '{"a": "2026-05-01", "1": [true, null, 1.5]}'),
    ("json", "a", 'Here:\n```json\n{"a": "x"}\n```\nDone.', "x"),
    ("json", "0", "```\n[1]", "1"),
    ("number", "", "I give it 8 of 10.", "8"),
    ("number", "", "It is -007.50!", "-7.50"),
    ("number", "", "GPT-4 says .5", "4"),
    ("number", "", "about +1,234,567.8e+3 or 9", "1234567.8e+3"),
    ("number", "", "1,2345", "1"),
    ("number", "", "(-.25)", "-0.25"),
    ("number", "", "\N{MINUS SIGN}3 °C", "-3"),
    ("date", "", " 2026-05-01\n", "2026-05-01"),
    ("date", "", "2026-05-01T10:00:00Z", "2026-05-01T10:00:00+00:00"),
    ("date", "%d %B %Y", "1 May 2026", "2026-05-01"),
    ("date", "%Y-%m-%dT%H:%M:%S.%fZ", "2026-05-01T10:00:00.5Z", "2026-05-01T10:00:00.500000"),
    ("enum", '["yes", "no"]', " no\n", "no"),
]
FAILURES = [
    ("items", "numbered", "nothing"),
    ("items", "comma", ""),
    ("items", "comma.2", "a,b"),
    ("items", "bulleted", "- a\n" * 300_000),
    ("xml", "a", "<a>1</b>"),
    ("xml", "a", "<a" * 100_000),
    ("xml", "a", "<a " * 100_000),
    ("xml", "a", "<a>" * 100_000 + "</b>"),
    ("json", "", "```json\nnothing"),
    ("yaml", "a", "a: [1"),
    ("yaml", "b", "a: 1"),
    ("yaml", "", "a: !!python/object/apply:os.getcwd []"),
    ("yaml", "", "a: !!set {b, c}"),
    ("yaml", "", '!!int ""'),
    ("yaml", "", "!!bool x"),
    ("yaml", "", "a: !!binary aGk="),
    ("yaml", "", "? [1, 2]\n: 3"),
    ("yaml", "", "a: 1\n---\nb: 2"),
    ("yaml", "", "a: &x [1]\nb: *x"),
    ("yaml", "", "a: &x [*x]"),
    (
        "yaml",
        "",
        "a: &a [x]\n"
        + "".join(f"{b}: &{b} [{f'*{a},' * 9}]\n" for a, b in zip("abcdef", "bcdefg", strict=True)),
    ),
    ("yaml", "", "[" * 60_000),
    ("yaml", "", "- " * 30_000),
    ("yaml", "", "{a: " * 51 + "1" + "}" * 51),
    ("yaml", "", "[" + "1," * 20_000 + "]"),
    ("yaml", "", "1:" * 30_000 + "1"),
    ("yaml", "", "1:" * 30_000 + "1.5"),
    ("yaml", "", "a: 0x" + "f" * 60_000),
    ("yaml", "", "a: 2026-99-99"),
    ("yaml", "", "x" * 70_000),
    ("number", "", "no digits"),
    ("number", "", "9" * 1_000_000),
    ("number", "", "x" * 1_000_000),
    ("date", "", "tomorrow"),
    ("date", "%Y", "2026-05"),
    ("date", "%H:%M", "1" * 1_000_000),
    ("date", "%G", "2026"),
    ("enum", '["yes", "no"]', "yes and no"),
]
WRONG = [
    ("items", "lettered"),
    ("items", "comma.x"),
    ("items", "comma.9999999999"),
    ("items", ""),
    ("xml", ""),
    ("xml", "a b"),
    ("xml", "a>"),
    ("xml", "a" * 101),
    ("date", "%Q"),
    ("date", "%c"),
    ("date", "%d %d"),
    ("date", "%"),
    ("date", "x" * 201),
    ("enum", ""),
    ("enum", "[]"),
    ("enum", '"yes"'),
    ("enum", "[1]"),
    ("enum", '[" yes"]'),
    ("enum", '[""]'),
    ("enum", json.dumps(["x" * 70_000])),
]


def applied(text: str, name: str, argument: str = "") -> str:
    return apply_transforms(text, (Transform(name, argument),))


@pytest.mark.parametrize(("name", "argument", "text", "expected"), RESULTS)
def test_a_part_of_a_text(name, argument, text, expected):
    assert applied(text, name, argument) == expected


@pytest.mark.parametrize(("name", "argument", "text"), FAILURES)
def test_a_part_that_is_not_there_or_too_large(name, argument, text):
    with pytest.raises(af.errors.RunFailed, match=rf"^{name}\b"):
        applied(text, name, argument)


@pytest.mark.parametrize(("name", "argument"), WRONG)
async def test_a_wrong_argument_fails_its_state(name, argument):
    text = ops.Text(3, (ops.Ref(2, (Transform(name, argument),)),))
    async with anyio.create_task_group() as group:
        interpreter = CheckingInterpreter(ScriptedGenerator([]), group)
        known = ops.Set(1, 2, "x", ("text",))
        interpreter.submit_all([ops.Open(1), known, ops.Open(3), text, ops.Set(3, 4, "y", ("more",))])
        variable, later = interpreter.variable(2), interpreter.variable(4)
        for one in (variable, later):
            await one.wait()
        assert type(later.error.__cause__) is af.errors.BadArgument
        assert (variable.text, variable.error) == ("text", None)
        group.cancel_scope.cancel()
    interpreter.close()


async def test_transforms_of_a_variable():
    async with af.session(backend=af.Scripted([])) as flow, flow.state() as s, flow.state() as other:
        plan = s.set("plan", "1. <when>May 1, 2026</when>\n2. yes")
        assert await plan.items("numbered", 1).enum(("no", "yes")) == "yes"
        when = plan.xml("when")
        other += f"{when.date('%B %d, %Y')}, {when.number()}, {plan.items(index=-1)}"
        assert await other.text() == "2026-05-01, 1, yes"
        assert await s.set("y", "a: {b: 3}").yaml("a.b") == "3"
        assert await s.set("z", "a,b").items("comma") == "a\nb"


async def test_wrong_arguments_of_the_methods():
    async with af.session(backend=af.Scripted([])) as flow, flow.state() as s:
        x = s.set("x", "text")
        for values in ("yes", 3, [1], [], [" "]):
            with pytest.raises(af.errors.BadArgument, check=has_param("values")):
                x.enum(values)
        for kind, index in ((3, None), ("letters", None), ("comma", "0"), ("comma", 10**9)):
            with pytest.raises(af.errors.BadArgument):
                x.items(kind, index)
        with pytest.raises(af.errors.BadArgument, check=has_param("tag")):
            x.xml("<b>")
        with pytest.raises(af.errors.BadArgument, check=has_param("format")):
            x.date("%Q")
        with pytest.raises(af.errors.BadArgument):
            x.xml(3)


async def test_yaml_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    text_parts._yaml.cache_clear()
    async with af.session(backend=af.Scripted([])) as flow, flow.state() as s, flow.state() as other:
        value = s.set("x", "a: 1").yaml("a")
        with pytest.raises(af.errors.NotSupported, match="'yaml'"):
            await value
        other += value
        with pytest.raises(af.errors.AgentflowError, match="'yaml'"):
            await other
        assert await s.set("y", "1").number() == "1"
    text_parts._yaml.cache_clear()


async def test_yaml_is_read_beside_the_event_loop():
    async with af.session(backend=af.Scripted([])) as flow, flow.state() as s:
        value = s.set("x", "[" + "1, " * 9_000 + "1]")
        read = anyio.Event()

        async def wait():
            assert await value.yaml("9000") == "1"
            read.set()

        flow._link.start_soon(wait)
        num_turns = 0
        while not read.is_set():
            await anyio.lowlevel.checkpoint()
            num_turns += 1
        assert num_turns > 10


# References. The patterns are LangChain's.

lines = st.lists(
    st.sampled_from(
        ["1. ", "12.", "- ", "* ", "-", " ", "\n", "\n\n", "\t", "\r", "a", "b c", "3.\n", "\x0b", ",", '"']
    )
).map("".join)


def outcome(text: str, name: str, argument: str = "") -> str | None:
    try:
        return applied(text, name, argument)
    except af.errors.RunFailed:
        return None


@given(lines)
def test_items_are_those_of_the_plain_patterns(text):
    for kind, found in {
        "numbered": re.findall(r"\d+\.\s([^\n]+)", text),
        "bulleted": re.findall(r"^\s*[-*]\s([^\n]+)$", text, re.MULTILINE),
        "comma": comma_separated(text),
    }.items():
        assert outcome(text, "items", kind) == ("\n".join(found) if found else None)
        for index in (0, -1, 2):
            expected = found[index] if found and index < len(found) else None
            assert outcome(text, "items", f"{kind}.{index}") == expected


def comma_separated(text: str) -> list[str]:
    try:
        rows = csv.reader(StringIO(text), quotechar='"', delimiter=",", skipinitialspace=True)
        return [item for row in rows for item in row]
    except csv.Error:
        return [part.strip() for part in text.split(",")]


@given(
    st.lists(st.sampled_from(["<a>", "</a>", "<a x='1'>", "<ab>", "<a", ">", " ", "x", "\n", "<a/>"])).map(
        "".join
    )
)
def test_xml_is_a_search(text):
    found = re.search(r"<a(?:\s[^>]*)?>(.*?)</a>", text, re.DOTALL)
    assert outcome(text, "xml", "a") == (found and found[1])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(values, st.booleans())
def test_yaml_is_what_the_safe_loader_reads(value, is_flow):
    text = yaml.safe_dump(value, default_flow_style=is_flow, allow_unicode=True)
    if "`" in text or "&" in text:
        return
    expected = json.loads(json.dumps(yaml.safe_load(text), default=date.isoformat))
    found = applied(text, "yaml")
    if isinstance(expected, str):
        assert found == expected.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    else:
        assert json.loads(found) == expected


@given(
    st.decimals(allow_nan=False, allow_infinity=False, places=3),
    st.booleans(),
    st.sampled_from(["", "+", "so "]),
)
def test_a_number_keeps_its_value(value, has_commas, before):
    text = f"{before}{value:,}" if has_commas else f"{before}{value}"
    if before == "+":
        text = text.replace("+-", "-")
    found = applied(f"It is {text} in all, or 7.", "number")
    assert Decimal(found) == value
    assert Decimal(str(json.loads(found, parse_float=Decimal))) == value


@given(
    st.datetimes(min_value=datetime(1900, 1, 1)),
    st.sampled_from(["%Y-%m-%dT%H:%M:%S.%fZ", "%d/%m/%Y", "%B %d, %Y %H:%M", "%Y%j", "%y-%m-%d", ""]),
)
def test_a_date_is_the_one_that_strptime_reads(when, form):
    text = when.strftime(form) if form else when.isoformat()
    expected = datetime.strptime(text, form) if form else when
    assert datetime.fromisoformat(applied(f" {text}\n", "date", form)) == expected


@given(
    st.text(max_size=6),
    st.lists(st.text(min_size=1, max_size=3).map(str.strip).filter(bool), min_size=1, max_size=4),
)
def test_an_enum_is_one_of_its_values(text, words):
    argument = json.dumps(words)
    assert outcome(f" {words[-1]}\n", "enum", argument) == words[-1].strip()
    assert outcome(text, "enum", argument) == (text.strip() if text.strip() in words else None)


@given(st.text(), st.sampled_from(["items", "xml", "json", "yaml", "number", "date", "enum"]))
def test_any_text_has_a_part_or_fails(text, name):
    argument = {"items": "comma", "xml": "a", "enum": '["a"]'}.get(name, "")
    found = outcome(text, name, argument)
    assert found is None or found.encode() is not None
