"""Python types as schemas: no constraint is lost on the way to the model or back."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import operator
import random
import re
import typing
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, Optional, TypedDict, TypeVar

import annotated_types
import jsonschema
import msgspec
import pydantic
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Discriminator, Field
from pydantic import Tag as PydanticTag
from support.engine.bounded_matchers import bounded_matcher

import agentflow as af
from agentflow.engine.grammar.compiler.compile import compile_constraint
from agentflow.engine.grammar.compiler.messages import Lengths
from agentflow.errors import BadArgument
from agentflow.language.typed.json_types import json_type, parameters_type, shown_type
from agentflow.language.typed.recursion import DEFAULT_DEPTH, with_bounded_depth
from agentflow.language.typed.values import value_type
from agentflow.protocol.constraint import Constraint
from benchmarks.constrained.text_walks import MatcherText, takes, text_under, walk

pytestmark = pytest.mark.anyio

ItemT = TypeVar("ItemT")
ADA = '{"name": "Ada", "age": 36}'


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=5)
    age: int = Field(ge=0, le=120)


class Tree(BaseModel):
    value: int = Field(ge=0, le=9)
    children: list[Tree] = Field(max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    good: bool


class Page(BaseModel, Generic[ItemT]):
    items: list[ItemT] = Field(max_length=2)


class Even(BaseModel):
    number: int = Field(ge=0, le=9)

    @pydantic.field_validator("number")
    @classmethod
    def check(cls, number: int) -> int:
        if number % 2:
            raise ValueError("it is odd")
        return number


@dataclasses.dataclass
class Ticket:
    """A plain dataclass with pydantic's fields in it."""

    holder: Person
    seat: Annotated[int, Field(ge=1, le=10)]
    price: int = Field(3, ge=1, le=99)


@pydantic.dataclasses.dataclass
class Seat:
    row: int = Field(ge=1, le=10)


class Rated(TypedDict):
    score: Annotated[int, Field(ge=1, le=5)]
    note: typing.NotRequired[Annotated[str, Field(max_length=3)]]


class Struct(msgspec.Struct):
    x: Annotated[int, msgspec.Meta(ge=1, le=3)]


class Mixed(msgspec.Struct):
    person: Person


Animal = Annotated[Cat | Dog, Field(discriminator="kind")]
Age = typing_extensions.TypeAliasType("Age", Annotated[int, annotated_types.Interval(ge=0, le=150)])

# A type, a valid text, its value, and invalid texts.
CASES: list[tuple[Any, str, Any, list[str]]] = [
    (Annotated[int, Field(ge=1, le=10)], "10", 10, ["0", "11", "5000"]),
    (Annotated[float, annotated_types.Gt(0.5)], "0.75", 0.75, ["0.5", "-1.0"]),
    (Annotated[str, Field(pattern="^[a-z]{3}$")], '"abc"', "abc", ['"ab"', '"ABC"']),
    (Age, "150", 150, ["151"]),
    (list[Age], "[1]", [1], ["[151]"]),
    (
        list[Person],
        '[{"name": "Ada", "age": 36}]',
        [Person(name="Ada", age=36)],
        ['[{"name": "", "age": 1}]'],
    ),
    (Person | None, "null", None, ['{"name": "Ada", "age": 121}']),
    (Optional[Person], ADA, Person(name="Ada", age=36), ["1"]),  # noqa: UP045
    (Person | int, "3", 3, ['"3a"']),
    (dict[str, Person], '{"a": {"name": "A", "age": 1}}', {"a": Person(name="A", age=1)}, ['{"a": 1}']),
    (dict[Literal["a", "b"], Age], '{"a": 1}', {"a": 1}, ['{"c": 1}', '{"a": 151}']),
    (dict[int, Person], f'{{"-12": {ADA}}}', {-12: Person(name="Ada", age=36)}, [f'{{"x": {ADA}}}']),
    (dict[Annotated[int, Field(ge=1)], int], '{"1": 2}', {1: 2}, ['{"0": 2}']),
    (dict[float, int], '{"0.5": 2}', {0.5: 2}, ['{"x": 2}']),
    (dict[bool, int], '{"true": 2}', {True: 2}, ['{"2": 2}']),
    (dict[datetime.date, int], '{"2026-02-28": 2}', {datetime.date(2026, 2, 28): 2}, ['{"2026-02-30": 2}']),
    (dict[Color, int], '{"red": 2}', {Color.RED: 2}, ['{"green": 2}']),
    (dict[Annotated[str, Field(max_length=2)], int], '{"ab": 2}', {"ab": 2}, ['{"abc": 2}']),
    (dict[Annotated[str, Field(pattern="^a+$")], int], '{"aa": 2}', {"aa": 2}, ['{"b": 2}']),
    (tuple[Age, bool], "[1, true]", (1, True), ["[151, true]", "[1]"]),
    (Annotated[set[int], Field(min_length=2)], "[1, 2]", {1, 2}, ["[1, 1]", "[1]"]),
    (Tree, '{"value": 1, "children": []}', Tree(value=1, children=[]), ['{"value": 10, "children": []}']),
    (Page[Age], '{"items": [7]}', Page[Age](items=[7]), ['{"items": [151]}']),
    (
        Animal,
        '{"kind": "dog", "good": true}',
        Dog(good=True),
        ['{"kind": "cat", "lives": 10}', '{"good": true}'],
    ),
    (Even, '{"number": 4}', Even(number=4), ['{"number": 3}']),
    (
        Ticket,
        '{"holder": {"name": "A", "age": 1}, "seat": 10}',
        Ticket(Person(name="A", age=1), 10, 3),
        [
            '{"holder": {"name": "A", "age": 1}, "seat": 11}',
            '{"holder": {"name": "A", "age": 1}, "seat": 1, "price": 0}',
        ],
    ),
    (Seat, '{"row": 1}', Seat(row=1), ['{"row": 11}']),
    (Rated, '{"score": 5}', {"score": 5}, ['{"score": 6}', '{"score": 1, "note": "abcd"}', "{}"]),
    (list[Rated], '[{"score": 5, "note": "a"}]', [{"score": 5, "note": "a"}], ['[{"score": 6}]']),
    (Struct, '{"x": 3}', Struct(3), ['{"x": 4}']),
    (Color, '"red"', Color.RED, ['"green"']),
    (Literal[1, "a"], "1", 1, ["2"]),
    (datetime.date, '"2026-02-28"', datetime.date(2026, 2, 28), ['"2026-02-30"']),
    (uuid.UUID, f'"{uuid.UUID(int=7)}"', uuid.UUID(int=7), ['"x"']),
    (decimal.Decimal, '"1.50"', decimal.Decimal("1.50"), ['"x"']),
    (
        Annotated[decimal.Decimal, Field(max_digits=4, decimal_places=2)],
        '"12.34"',
        decimal.Decimal("12.34"),
        ['"123.45"', '"1.234"'],
    ),
]


@pytest.mark.parametrize(("kind", "text", "value", "invalid"), CASES, ids=lambda case: shown_type(case)[:30])
def test_constraints_hold_in_every_type(kind: Any, text: str, value: Any, invalid: list[str]) -> None:
    schema, read = json_type(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert read(text) == value
    assert not any(is_valid(read, wrong) for wrong in invalid)


def is_valid(read: Callable[[str], Any], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("kind", "text", "value"), [case[:3] for case in CASES])
async def test_a_program_gets_the_value(kind: Any, text: str, value: Any) -> None:
    async with af.session(backend=af.Scripted([text])) as flow, flow.state() as s:
        x = af.gen("x", schema=kind, on_invalid="retry")
        s += x
        assert await s[x] == value


READ_AFTERWARDS = [Even, Annotated[set[int], Field(min_length=2)]]


@pytest.mark.parametrize("kind", [case[0] for case in CASES], ids=lambda kind: shown_type(kind)[:30])
def test_generated_text_is_valid(kind: Any) -> None:
    """Except where only the reader can decide."""
    schema, read = json_type(kind)
    compiled = compile_constraint(Constraint("schema", msgspec.json.encode(schema).decode()))
    dice, num_finished = random.Random(3), 0
    for _ in range(20):
        text = walk(text_under(compiled), dice)
        if text is not None and kind not in READ_AFTERWARDS:
            read(text)
        num_finished += text is not None
    assert num_finished > 5


integers = st.builds(
    lambda low, width, multiple: Annotated[int, Field(ge=low, le=low + width, multiple_of=multiple)],
    st.integers(-1000, 1000),
    st.integers(10, 10**6),
    st.sampled_from([None, 1, 2]),
)
floats = st.builds(
    lambda low, width: Annotated[float, Field(gt=low, lt=low + width)],
    st.floats(-100, 100).map(lambda number: round(number, 2)),
    st.floats(0.5, 100).map(lambda number: round(number, 2)),
)
strings = st.builds(
    lambda least, more: Annotated[str, Field(min_length=least, max_length=least + more)],
    st.integers(0, 5),
    st.integers(0, 5),
)
scalars = (
    integers
    | floats
    | strings
    | st.sampled_from([str, bool, Color, Literal["x", 3], datetime.date, uuid.UUID, None])
)


def model_of(fields: dict[str, Any]) -> type[BaseModel]:
    members: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    return pydantic.create_model("Model", **members)


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1)
    return st.one_of(
        st.builds(lambda item: Annotated[list[item], Field(max_length=2)], inner),  # type: ignore[valid-type]
        st.builds(lambda item: list[item], inner),  # type: ignore[valid-type]
        st.builds(lambda key, item: dict[key, item], st.sampled_from([str, int, bool, Color]), inner),
        st.builds(lambda one: one | None, st.sampled_from([Person, Seat, Cat])),
        members.map(
            lambda fields: pydantic.create_model("Model", **{n: (kind, ...) for n, kind in fields.items()})
        ),
        members.map(lambda fields: dataclasses.make_dataclass("Data", fields.items())),
        members.map(lambda fields: typing_extensions.TypedDict("Typed", fields)),  # type: ignore[misc]
    )


@given(st.recursive(scalars, compound, max_leaves=5), st.integers(0, 100))
def test_random_types_are_kept(kind: Any, seed: int) -> None:
    schema, read = json_type(kind)
    compiled = compile_constraint(Constraint("schema", msgspec.json.encode(schema).decode()))
    for _ in range(3):
        text = walk(text_under(compiled), random.Random(seed))
        if text is not None:
            read(text)
        # Where a part reaches its bound, it ends, unless the type requires more.
        bounded = MatcherText(bounded_matcher(compiled, Lengths(string_chars=3, list_items=2)))
        text = walk(bounded, random.Random(seed))
        if text is not None:
            read(text)


async def test_a_value_outside_its_constraint_fails_its_variable() -> None:
    async with af.session(backend=af.Scripted(["5000"])) as flow, flow.state() as s:
        s += af.gen("n", schema=Annotated[int, Field(ge=1, le=10)])
        with pytest.raises(af.InvalidValue):
            await s["n"]


def order(
    count: Annotated[int, Field(ge=1, le=10)],
    who: Person,
    others: list[Person],
    schema: str = "plain",
    price: int = Field(3, ge=1),
) -> None:
    """The function's parameter names are attributes of pydantic's models too."""


def test_parameters_of_a_tool_keep_their_constraints() -> None:
    schema, read = parameters_type("order", order)
    assert schema["required"] == ["count", "who", "others"]
    assert schema["$defs"].keys() == {"Person"}
    arguments = read(f'{{"count": 1, "who": {ADA}, "others": []}}')
    assert arguments == {
        "count": 1,
        "who": Person(name="Ada", age=36),
        "others": [],
        "schema": "plain",
        "price": 3,
    }
    for wrong in (
        f'{{"count": 5000, "who": {ADA}, "others": []}}',
        f'{{"count": 1, "who": {ADA}, "others": [], "price": 0}}',
        f'{{"count": 1, "who": {ADA}, "others": [], "x": 0}}',
        f'{{"count": 1, "who": {ADA}}}',
        "[]",
    ):
        assert not is_valid(read, wrong)


def local_types() -> tuple[Any, Any]:
    class Person(BaseModel):  # another one of the same name
        id: int

    def greet(one: Any, other: Any) -> None: ...

    greet.__annotations__ = {"one": globals()["Person"], "other": Person}
    return greet, Person


def test_two_definitions_of_one_name_stay_apart() -> None:
    greet, other = local_types()
    schema, read = parameters_type("greet", greet)
    jsonschema.Draft202012Validator(schema).validate({"one": {"name": "A", "age": 1}, "other": {"id": 1}})
    assert read('{"one": {"name": "A", "age": 1}, "other": {"id": 1}}')["other"] == other(id=1)


class Branch(pydantic.BaseModel):
    number: int
    branches: list[Branch] = []


class Tree(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(json_schema_extra={"$id": "https://example.org/tree"})
    branch: Branch


def plant(one: Tree, other: Tree, branch: Branch) -> None: ...


def test_f37_parameters_whose_schemas_have_an_id() -> None:
    schema, read = parameters_type("plant", plant)
    branch = {"number": 1, "branches": [{"number": 2, "branches": []}]}
    value = {"one": {"branch": branch}, "other": {"branch": branch}, "branch": branch}
    jsonschema.Draft202012Validator(schema).validate(value)
    compiled = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert takes(compiled, json.dumps(value))
    assert not takes(compiled, json.dumps({**value, "one": {"branch": {"number": "x"}}}))
    assert read(json.dumps(value))["one"] == Tree.model_validate({"branch": branch})


@pytest.mark.parametrize(
    "kind",
    [
        Person(name="A", age=1),
        Struct(1),
        Seat(row=1),
        Mixed,
        list[Mixed],
        "Person",
        Callable[[], int],
        dict[tuple[int, int], int],
        dict[Literal[1, 2], int],
    ],
    ids=str,
)
def test_an_invalid_value_type_is_rejected(kind: Any) -> None:
    with pytest.raises(af.errors.BadArgument) as failure:
        af.gen("x", schema=kind)
    assert failure.value.param == "schema"


@dataclasses.dataclass
class Meeting:
    begins: datetime.datetime
    daily: datetime.time | None = None
    others: list[datetime.datetime] = dataclasses.field(default_factory=list)


class Alarm(msgspec.Struct, rename="camel"):
    wakes_at: datetime.time
    meetings: list[Meeting] = []


class Slot(TypedDict):
    at: datetime.datetime


MOMENT = "2024-05-01T09:30:00+02:00"
CLOCK = "09:30:00Z"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (datetime.datetime, MOMENT),
        (datetime.time, CLOCK),
        (datetime.date, "2024-05-01"),
        (datetime.datetime | None, MOMENT),
        (dict[str, list[datetime.time]], {"a": [CLOCK]}),
        (Annotated[datetime.datetime, msgspec.Meta(description="when")], MOMENT),
        (Meeting, {"begins": MOMENT, "daily": CLOCK, "others": [MOMENT]}),
        (list[Alarm], [{"wakesAt": CLOCK, "meetings": [{"begins": MOMENT}]}]),
        (Slot, {"at": MOMENT}),
    ],
)
def test_f19a_times_are_constrained_wherever_they_are(kind, value):
    schema, read = json_type(kind)
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    text = json.dumps(value)
    assert takes(constraint, text)
    read(text)
    for moment in (MOMENT, CLOCK, "2024-05-01"):
        assert not takes(constraint, text.replace(moment, "tomorrow")) or moment not in text


Naive = Annotated[datetime.datetime, msgspec.Meta(tz=False, description="local")]


@dataclasses.dataclass
class Local:
    at: Naive
    opens: Annotated[datetime.time, msgspec.Meta(tz=False)] | None = None


class LocalModel(pydantic.BaseModel):
    at: pydantic.NaiveDatetime
    others: list[pydantic.NaiveDatetime | None] = []


class AwareModel(pydantic.BaseModel):
    at: pydantic.AwareDatetime


WITHOUT = "2024-05-01T09:30:00"


@pytest.mark.parametrize(
    ("kind", "value", "time", "invalid"),
    [
        *[
            (kind, value, "09:30:00", ["09:30:00Z", "09:30:00+02:00", "noon"])
            for kind, value in (
                (pydantic.NaiveDatetime, WITHOUT),
                (LocalModel, {"at": WITHOUT, "others": [WITHOUT, None]}),
                (Naive, WITHOUT),
                (Naive | None, WITHOUT),
                (Local, {"at": WITHOUT, "opens": None}),
                (Annotated[datetime.time, msgspec.Meta(tz=False)], "09:30:00"),
            )
        ],
        *[
            (kind, value, "09:30:00+02:00", ["09:30:00"])
            for kind, value in (
                (pydantic.AwareDatetime, MOMENT),
                (AwareModel, {"at": MOMENT}),
                (Annotated[datetime.datetime, msgspec.Meta(tz=True)], MOMENT),
            )
        ],
    ],
)
def test_f19l_naive_times_forbid_an_offset_and_aware_times_require_it(kind, value, time, invalid):
    schema, read = json_type(kind)
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    text = json.dumps(value)
    assert takes(constraint, text)
    read(text)
    for wrong in invalid:
        assert not takes(constraint, text.replace(time, wrong))


LIMITS = st.decimals(-1000, 1000, places=3) | st.integers(-12, 12).map(Decimal)


@given(
    st.dictionaries(st.sampled_from(["ge", "gt", "le", "lt"]), LIMITS),
    st.lists(LIMITS | st.decimals(-1000, 1000, places=5), min_size=1, max_size=20),
)
def test_f19b_decimals_keep_their_limits(limits, values):
    kind = Annotated[Decimal, Field(**limits)]
    try:
        schema, read = json_type(kind)
    except BadArgument:
        schema = None
    for value in [*values, *limits.values()]:
        is_valid = all(getattr(operator, name)(value, limit) for name, limit in limits.items())
        if schema is None:
            assert not is_valid
            continue
        text = f"{value:f}"
        assert (re.search(schema["pattern"], text) is not None) == is_valid or text.startswith("-0")
        if is_valid:
            assert read(json.dumps(text)) == value


@pytest.mark.parametrize(
    "limits",
    [
        {"ge": -1000, "max_digits": 5, "decimal_places": 2},
        {"gt": -1000, "lt": 1000, "max_digits": 5, "decimal_places": 2},
        {"ge": -(10**16)},
        {"le": 10**15},
    ],
    ids=str,
)
def test_f19b_zero_has_a_sign_only_without_limits(limits):
    """Also if the number of digits is the stricter limit."""
    for kind, has_sign in ((Annotated[Decimal, Field(**limits)], False), (Decimal, True)):
        schema, _ = json_type(kind)
        assert re.search(schema["pattern"], "-1")
        assert bool(re.search(schema["pattern"], "-0")) == has_sign


class Circle(BaseModel):
    form: str = "circle"
    radius: int


class Box(BaseModel):
    form: str = "box"
    width: int


def form_of(value: Any) -> str:
    return "box" if "width" in value else "circle"


def test_f19c_a_function_may_discriminate_a_union():
    kind = Annotated[
        Annotated[Circle, PydanticTag("circle")] | Annotated[Box, PydanticTag("box")],
        Discriminator(form_of),
    ]
    schema, read = json_type(kind)
    constraint = compile_constraint(Constraint("schema", json.dumps(schema)))
    assert takes(constraint, '{"form": "x", "width": 3}')
    assert read('{"form": "x", "width": 3}') == Box(form="x", width=3)


class Folder(BaseModel):
    name: str
    folders: list[Folder] = []


class Link(BaseModel):
    value: int
    after: Link | None = None


class Group(BaseModel):
    members: dict[str, Group | Folder]


def nested(depth: int) -> dict[str, Any]:
    inner = [nested(depth - 1)] if depth > 1 else []
    return {"name": "a", "folders": inner} if inner else {"name": "a"}


def chained(depth: int) -> dict[str, Any]:
    return {"value": 1, "after": chained(depth - 1) if depth > 1 else None}


@pytest.mark.parametrize(("kind", "make"), [(Folder, nested), (Link, chained)])
def test_f19d_recursive_types_have_a_bounded_depth(kind, make):
    constraint = compile_constraint(value_type(schema=kind).constraint)
    for depth in (1, 2, DEFAULT_DEPTH):
        assert takes(constraint, json.dumps(make(depth)))
    assert not takes(constraint, json.dumps(make(DEFAULT_DEPTH + 1)))
    written = compile_constraint(value_type(schema=kind.model_json_schema()).constraint)
    assert takes(written, json.dumps(make(DEFAULT_DEPTH + 1)))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", [Folder, Link, Group])
def test_f19e_texts_of_recursive_types_are_valid(kind, seed):
    wanted = value_type(schema=kind)
    text = walk(text_under(compile_constraint(wanted.constraint)), random.Random(seed))
    assert text is None or isinstance(wanted.read(text.decode()), kind)


def test_f37_the_definitions_of_a_recursive_type_are_in_the_order_of_the_type():
    """Recordings and caches compare the schema's text, in other processes too."""
    rings = [f"ring {number}" for number in range(8)]
    leaves = [f"leaf {number}" for number in range(8)]
    definitions: dict[str, Any] = {
        ring: {"type": "object", "properties": {"next": {"$ref": f"#/$defs/{after}"}}}
        for ring, after in zip(rings, [*rings[1:], rings[0]], strict=True)
    }
    definitions |= {leaf: {"type": "integer", "title": leaf} for leaf in leaves}
    bounded = with_bounded_depth({"$ref": "#/$defs/ring 0", "$defs": definitions}, 2)
    assert [*bounded["$defs"]] == [f"{ring}.{level}" for level in (2, 1) for ring in rings] + leaves
