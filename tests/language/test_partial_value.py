"""Partial values: of every beginning of a JSON text, exactly the part that is certain."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Annotated, Any, List  # noqa: UP035

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from support.observed_backends import Stepped, unconstrained

import agentflow as af
from agentflow.language.states.readers import find_elements
from agentflow.language.typed.json_types import NothingYet, partial_value
from agentflow.protocol.growing_text import GrowingText

pytestmark = pytest.mark.anyio

NOTHING = object()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(['"', "\\", '\\"12', 'a"1', "é😀", "1", "e5"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)
STYLES = st.builds(
    dict,
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
    separators=st.sampled_from([None, (",", ":"), (" , ", " : ")]),
)


# The reference: a writer that gives the partial value after each character.


def growth(value: Any, style: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The value's text in pieces, each with the partial value after it. Separators are blanks of
    no meaning, and belong to the pieces before them."""
    if isinstance(value, str):
        yield '"', ""
        for index, char in enumerate(value):
            *first, last = json.dumps(char, ensure_ascii=style["ensure_ascii"])[1:-1]
            yield from [(part, value[:index]) for part in first]
            yield last, value[: index + 1]
        yield '"', value
    elif isinstance(value, list):
        yield "[", []
        for index, item in enumerate(value):
            for text, partial in growth(item, style):
                yield text, value[:index] if partial is NOTHING else [*value[:index], partial]
            yield "," if index < len(value) - 1 else "\n", value[: index + 1]
        yield "]", value
    elif isinstance(value, dict):
        yield "{", {}
        before: dict[str, Any] = {}
        for index, (key, item) in enumerate(value.items()):
            for char in json.dumps(key, ensure_ascii=style["ensure_ascii"]) + ": ":
                yield char, dict(before)
            for text, partial in growth(item, style):
                yield text, dict(before) if partial is NOTHING else {**before, key: partial}
            before[key] = item
            yield "," if index < len(value) - 1 else "\n", dict(before)
        yield "}", value
    else:
        *first, last = json.dumps(value)
        yield from [(char, NOTHING) for char in first]
        is_number = not (value is None or isinstance(value, bool))
        yield last, NOTHING if is_number else value


def shown(text: str) -> Any:
    try:
        return partial_value(text)
    except NothingYet:
        return NOTHING


def is_same(one: Any, other: Any) -> bool:
    """Equal, and not as ``1 == True == 1.0`` is."""
    return one is other or (NOTHING not in (one, other) and repr(one) == repr(other))


@given(VALUES, STYLES)
def test_every_prefix_gives_exactly_the_certain_part(value, style):
    text = ""
    for piece, partial in growth(value, style):
        text += piece
        assert is_same(shown(text), partial), text
    assert json.loads(text) == value


# The definition of a prefix of a value


def is_prefix(part: Any, whole: Any) -> bool:
    """A string begins the other; of a list all members but the last are equal and the last is a prefix; of a
    record the fields too, in their order; anything else is equal."""
    if isinstance(whole, str) and isinstance(part, str):
        return whole.startswith(part)
    if isinstance(whole, list) and isinstance(part, list):
        return are_prefixes(part, whole)
    if isinstance(whole, dict) and isinstance(part, dict):
        keys = list(whole)[: len(part)]
        return list(part) == keys and are_prefixes(list(part.values()), list(whole.values()))
    return is_same(part, whole)


def are_prefixes(part: list[Any], whole: list[Any]) -> bool:
    if len(part) > len(whole):
        return False
    pairs = list(zip(part, whole, strict=False))
    return all(is_same(one, other) for one, other in pairs[:-1]) and all(
        itertools.starmap(is_prefix, pairs[-1:])
    )


@given(VALUES, STYLES)
def test_partial_values_only_grow(value, style):
    text = json.dumps(value, **style)
    seen = [found for end in range(len(text)) if (found := shown(text[:end])) is not NOTHING]
    for earlier, later in itertools.pairwise([*seen, value]):
        assert is_prefix(earlier, later)
        assert is_prefix(earlier, value)


@pytest.mark.parametrize(
    ("text", "partial"),
    [
        ("", NOTHING),
        (" \n", NOTHING),
        ("12", NOTHING),
        ("tru", NOTHING),
        ("[12", []),
        ("[12 ", [12]),
        ("[1, -", [1]),
        ("[1, 2.", [1]),
        ("[1, 2e+", [1]),
        ("[true", [True]),
        ("[fals", []),
        ('{"a": 1', {}),
        ('{"a": "1', {"a": "1"}),
        ('{"a": "x\\"1', {"a": 'x"1'}),
        ('{"a": "x\\\\", "b": 1', {"a": "x\\"}),
        ('["\\ud83d', [""]),
        ('["\\ud83d\\ude0', [""]),
        ('["\\ud83d\\ude00', ["😀"]),
        ("[NaN,", NOTHING),
        ("no JSON", NOTHING),
        ("[\ud800", NOTHING),
        ("[" * 1000, NOTHING),
    ],
)
def test_the_partial_value_of_a_text(text, partial):
    assert is_same(shown(text), partial)


# A variable's readers


@dataclasses.dataclass
class Report:
    title: str
    scores: list[int]


def look_up(city: str) -> str:
    return city


REPORT = '{"title": "On leaves", "scores": [8, 12]}'


async def parts_of(text: str, **wanted: Any) -> list[Any]:
    expression = af.gen("r", **wanted)
    async with af.session(backend=af.Scripted([text])) as flow, flow.state() as s:
        s += expression
        return [part async for part in s[expression]]


async def elements_of(text: str, seen: list[Any] | None = None, **wanted: Any) -> list[Any]:
    expression, found = af.gen("r", **wanted), [] if seen is None else seen
    async with af.session(backend=unconstrained([text])) as flow, flow.state() as s:
        s += expression
        async for element in s[expression].elements():
            found.append(element)
    return found


@pytest.mark.parametrize("schema", [Report, {"type": "object"}])
async def test_a_reader_receives_growing_values(schema):
    backend = Stepped([REPORT])
    report = af.gen("report", schema=schema)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += report
        reader = aiter(s[report])
        seen = []
        for _ in range(3):
            await backend.allow(2)
            seen.append(await anext(reader))
        assert seen == [
            {"title": "On"},
            {"title": "On leaves"},
            {"title": "On leaves", "scores": [8, 12]},
        ]
        with pytest.raises(StopAsyncIteration):
            await anext(reader)
        with pytest.raises(StopAsyncIteration):
            await anext(reader)
        assert [part async for part in s[report]] == [
            json.loads(REPORT)
        ]  # a late reader starts at the latest value
        assert s[report].text == REPORT


@given(VALUES, STYLES)
async def test_partial_values_differ_and_the_last_is_the_value(value, style):
    parts = await parts_of(json.dumps(value, **style), schema={}, max_tokens=10_000)
    assert is_same(parts[-1], json.loads(json.dumps(value)))
    for earlier, later in itertools.pairwise(parts):
        assert not is_same(earlier, later)
        assert is_prefix(earlier, later)


@given(st.lists(VALUES, max_size=5), STYLES)
async def test_the_elements_are_those_of_the_list(values, style):
    text = json.dumps(values, **style)
    assert is_same(await elements_of(text, schema=list[Any], max_tokens=10_000), json.loads(text))
    assert is_same(await elements_of(text, schema={"type": "array"}, max_tokens=10_000), json.loads(text))


@given(st.lists(VALUES, max_size=4), st.sampled_from([", ", " , ", ",\n "]))
async def test_an_element_is_read_as_soon_as_the_text_after_it_begins(values, separator):
    pieces = [json.dumps(value) for value in values]
    text = f"[ {separator.join(pieces)} ]"
    ends = [len("[ " + separator.join(pieces[: index + 1])) for index in range(len(pieces))]
    after = [end + len(text[end:]) - len(text[end:].lstrip()) for end in ends]  # of the next character
    backend, found, seen = Stepped([text]), af.gen("r", schema=list[Any]), list[Any]()

    async def read(s: af.State) -> None:
        async for element in s[found].elements():
            seen.append(element)

    async with af.session(backend=backend) as flow, flow.state() as s, anyio.create_task_group() as group:
        s += found
        group.start_soon(read, s)
        words = text.split(" ")
        for count in range(1, len(words) + 1):
            await backend.allow(1)
            length = len(" ".join(words[:count]))
            assert is_same(seen, json.loads(text)[: sum(at < length for at in after)])


async def test_f37_numbers_that_arrive_in_parts_are_whole_elements():
    text = "[1.5, 2e3,-0.25E+1 , 10,{}]"
    backend, found, seen = Stepped([text], by_character=True), af.gen("r", schema=list[Any]), list[Any]()

    async def read(s: af.State) -> None:
        async for element in s[found].elements():
            seen.append(element)

    async with af.session(backend=backend) as flow, flow.state() as s, anyio.create_task_group() as group:
        s += found
        group.start_soon(read, s)
        for _ in text:
            await backend.allow(1)
    assert seen == json.loads(text)


def whole_elements(text: str) -> list[tuple[int, int]]:
    """The reference for ``find_elements``: reads all of the text, and checks the elements."""
    found, end, before = list[tuple[int, int]](), 0, "["
    while True:
        rest = text[end:].lstrip(" \t\r\n")
        if not rest.startswith(before):
            return found
        start = len(text) - len(rest[1:].lstrip(" \t\r\n"))
        try:
            end = json.JSONDecoder(strict=False).raw_decode(text, start)[1]
        except ValueError:
            return found
        if not text[end:].lstrip(" \t\r\n").startswith((",", "]")):
            return found
        found.append((start, end))
        before = ","


@given(st.lists(VALUES, max_size=5), STYLES, st.sampled_from(["", " ", "\n\t"]), st.data())
def test_f37_elements_are_found_in_each_beginning(values, style, blanks, data):
    text = blanks + json.dumps(values, **style) + blanks
    lengths = data.draw(st.lists(st.integers(0, len(text))).map(sorted))
    is_damaged = data.draw(st.booleans())
    if is_damaged:  # one character is missing, or another one
        at = data.draw(st.integers(0, len(text) - 1))
        text = text[:at] + data.draw(st.sampled_from(["", *'"\\[]{},: 1'])) + text[at + 1 :]
    grown, found = GrowingText(), list[tuple[int, int]]()
    places = find_elements(grown)
    for length in [*lengths, len(text)]:
        grown.put(len(grown), text[len(grown) : length])
        while (place := next(places, None)) is not None:
            found.append(place)
        expected = whole_elements(text[:length])
        assert found[: len(expected)] == expected
        if not is_damaged:
            assert found == expected
        elif len(found) > len(expected):
            with pytest.raises(json.JSONDecodeError):
                json.loads(text[slice(*found[len(expected)])], strict=False)


async def test_f37_no_element_follows_an_invalid_one():
    found = af.gen("r", schema=list[Evens])
    backend = unconstrained(['[{"even": 2}, {"even": 3}, {"even": 4}]'])
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += found
        elements = s[found].elements()
        assert await anext(elements) == Evens(even=2)
        for _ in range(2):
            with pytest.raises(af.InvalidValue):
                await anext(elements)


class Evens(BaseModel):
    even: Annotated[int, Field(multiple_of=2)]


@pytest.mark.parametrize(
    "schema",
    [list[Evens], Sequence[Evens], Annotated[list[Evens], Field(max_length=3)]],
)
async def test_elements_have_their_type_and_are_valid(schema):
    assert await elements_of('[{"even": 2}, {"even": 4}]', schema=schema) == [Evens(even=2), Evens(even=4)]
    assert await elements_of("[1, 3]", schema=List) == [1, 3]  # noqa: UP006
    exact = await elements_of("[1.10, 3]", schema=list[Decimal])
    assert [str(number) for number in exact] == ["1.10", "3"]
    seen = list[Any]()
    with pytest.raises(af.InvalidValue) as failure:
        await elements_of('[{"even": 2}, {"even": 3}]', seen, schema=schema)
    assert seen == [Evens(even=2)]
    assert failure.value.text == '[{"even": 2}, {"even": 3}]'
    assert [error["loc"] for error in failure.value.errors] == [("even",)]


async def test_elements_of_a_truncated_list_and_of_other_types():
    seen = list[int]()
    with pytest.raises(af.InvalidValue, match="was truncated after 2 tokens"):
        await elements_of("[1, 2, 3]", seen, schema=list[int], max_tokens=2)
    assert seen == [1, 2]
    for wanted in ({}, {"type": int}, {"schema": Report}, {"schema": {"type": "object"}}):
        with pytest.raises(af.errors.BadArgument, match="elements: variable 'r'"):
            await elements_of("1", **wanted)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1 2", {}),
        ("12", {"type": int}),
        ("[1, 2]", {"regex": ".*"}),
        ("3", {"schema": int}),
        ('"a b"', {"schema": str}),
        ("a <n>1</n> b", {"tags": [af.Tag("<n>", regex="[0-9]", end="</n>")]}),
    ],
)
async def test_all_other_variables_are_streamed_as_text(text, wanted):
    deltas = await parts_of(text, **wanted)
    assert "".join(deltas) == text


@pytest.mark.parametrize(
    ("text", "max_tokens", "last", "message"),
    [
        (REPORT, 4, {"title": "On leaves"}, "'r' was truncated after 4 tokens and is not a complete Report"),
        (REPORT, 5, {"title": "On leaves", "scores": [8]}, "'r' was truncated after 5 tokens"),
        ('{"title": "a" }', 9, {"title": "a"}, r"'r' ended \(eos\) with a text that is not a valid Report"),
        ('{"title": "a" x', 9, {"title": "a"}, r"'r' ended \(eos\) with a text that is not a valid Report"),
    ],
)
async def test_an_incomplete_value_raises_after_its_last_part(text, max_tokens, last, message):
    report = af.gen("r", schema=Report, max_tokens=max_tokens)
    async with af.session(backend=unconstrained([text])) as flow, flow.state() as s:
        s += report
        reader = aiter(s[report])
        await s
        assert await anext(reader) == last
        with pytest.raises(af.InvalidValue, match=message):
            await anext(reader)
        with pytest.raises(StopAsyncIteration):
            await anext(reader)


async def test_a_failure_is_raised_to_readers_of_partial_values():
    report = af.gen("r", schema=Report)
    async with af.session(backend=af.Scripted([af.Overloaded("later")])) as flow, flow.state() as s:
        s += report
        with pytest.raises(af.Overloaded, match="later"):
            await anext(aiter(s[report]))


async def test_program_streams_have_the_text_of_typed_variables():
    @af.program
    async def write(s: af.State) -> Report:
        report = af.gen("report", schema=Report)
        s += report
        return await s[report]

    async with af.session(backend=af.Scripted([REPORT])) as flow:
        events = [event async for event in flow.stream(write)]
    assert "".join(event.text for event in events if isinstance(event, af.TextDelta)) == REPORT
    assert events[-1] == af.RunDone(Report("On leaves", [8, 12]))
