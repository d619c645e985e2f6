"""Values are written in the form in which their types read them, or rejected before anything runs."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

import agentflow as af
from agentflow.language.typed.json_form import JsonForm, json_text

pytestmark = pytest.mark.anyio


class Aliased(BaseModel):
    model_config = ConfigDict(extra="forbid")
    user_name: str = Field(alias="userName")

    @pydantic.computed_field
    def shout(self) -> str:
        return self.user_name.upper()


class Folder(BaseModel):
    path: Path
    url: pydantic.HttpUrl
    queue: collections.deque[int] = collections.deque()
    price: decimal.Decimal = decimal.Decimal("1.50")
    payload: pydantic.Json[list[int]] = Field(default_factory=list)


class Revealed(BaseModel):
    """Its secret is written on purpose."""

    password: SecretStr

    @pydantic.field_serializer("password", when_used="json")
    def reveal(self, password: SecretStr) -> str:
        return password.get_secret_value()


class Linked(BaseModel):
    name: str = Field(alias="Name")
    next: Linked | None = None


@pydantic.dataclasses.dataclass
class Seat:
    row: Annotated[int, Field(alias="Row")]


@dataclasses.dataclass
class Plain:
    """A dataclass with a type that msgspec has no form for."""

    where: Path
    when: datetime.date


class Pair(NamedTuple):
    left: Aliased
    right: int


class Renamed(msgspec.Struct, rename="camel"):
    user_name: str


class ByNameToo(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    day: int = Field(default=1, validation_alias=pydantic.AliasPath("date", 0))


class OnlyByName(BaseModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=False)
    day: int = Field(default=1, validation_alias=pydantic.AliasPath("date", 0))


class Grade(enum.IntEnum):
    GOOD = 1


class Color(enum.Enum):
    RED = "red"


ALIASED = Aliased(userName="ada")
VALUES = [
    (Aliased, ALIASED),
    (list[Aliased | None], [ALIASED, None]),
    (dict[str, Aliased], {"a": ALIASED}),
    (Folder, Folder(path=Path("a/b"), url="https://a.b/c", queue=[1, 2], payload="[3]")),
    (Revealed, Revealed(password="secret")),
    (Linked, Linked(Name="a", next=Linked(Name="b"))),
    (Seat, Seat(Row=3)),
    (Plain, Plain(Path("a"), datetime.date(2024, 5, 1))),
    (Pair, Pair(ALIASED, 3)),
    (Renamed, Renamed("ada")),
    (Path, Path("a/b")),
    (collections.deque[int], collections.deque([1, 2])),
    (datetime.datetime | None, datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC)),
    (set[str], {"a"}),
    (dict[int, str], {1: "a"}),
    (dict[Grade, str], {Grade.GOOD: "a"}),
    (ByNameToo, ByNameToo(day=3)),
    (OnlyByName, OnlyByName(day=3)),
    (dict[Color, str], {Color.RED: "a"}),
    (bytes, b"ab"),
]


@pytest.mark.parametrize(("kind", "value"), VALUES)
def test_f16a_a_value_is_read_back_as_it_was(kind: Any, value: Any) -> None:
    form = JsonForm(kind, "here")
    assert form.read(json.dumps(form.plain(value))) == value


@pytest.mark.parametrize(
    ("kind", "value"), [pair for pair in VALUES if isinstance(pair[0], type) and pair[0] is not Pair]
)
def test_f16b_a_value_of_unknown_type_is_written_through_its_class(kind: Any, value: Any) -> None:
    if kind is bytes:
        pytest.skip("which is the same for all types that are not known")
    assert JsonForm(kind, "here").read(json_text(value)) == value
    assert JsonForm(list[kind], "here").read(json_text([value])) == [value]


class Hidden(BaseModel):
    name: str
    token: str = Field(exclude=True)


class HiddenOnce(BaseModel):
    inner: list[Hidden]


class Secretive(BaseModel):
    inner: dict[str, SecretStr]


class SecretNumber(BaseModel):
    pin: pydantic.Secret[int] | None


class OtherName(BaseModel):
    name: str = Field(validation_alias="in", serialization_alias="out")


class Worded(BaseModel):
    day: datetime.date

    @pydantic.field_serializer("day")
    def words(self, day):
        return "a day in May"


class Typed(BaseModel):
    day: datetime.date

    @pydantic.field_serializer("day")
    def words(self, day: datetime.date) -> str:
        return "a day in May"


class Summed(BaseModel):
    marks: list[int]

    @pydantic.model_serializer
    def sum(self) -> dict[str, int]:
        return {"sum": sum(self.marks)}


class Level(enum.Enum):
    LOW = 1


class ByLevel(BaseModel):
    first: Level
    num: dict[Level, int]


class ByPath(BaseModel):
    day: int = Field(default=1, validation_alias=pydantic.AliasPath("date", 0))


REJECTED = [
    (ByPath, "path"),
    (dict[Level, int], "keys"),
    (ByLevel, "keys"),
    (Iterable[int], "Iterable"),
    (Hidden, "token"),
    (HiddenOnce, r"inner\[\].token"),
    (list[Hidden], "token"),
    (Secretive, "inner"),
    (SecretNumber, "pin"),
    (SecretStr, "secret"),
    (OtherName, "in"),
    (Worded, "day"),
    (Typed, "day"),
    (Summed, "marks"),
]


@pytest.mark.parametrize(("kind", "field"), REJECTED)
async def test_f16a_a_type_that_cannot_be_read_back_is_rejected_before_anything_runs(
    kind, field, flow, tmp_path
):
    ran = []

    async def program(s: af.State, item: int):
        ran.append(item)

    program.__annotations__["return"] = kind
    with pytest.raises(
        af.errors.BadArgument, match=f"{getattr(kind, '__name__', 'list')}.*{field}"
    ) as rejected:
        await flow.map(program, [1, 2], resume=tmp_path / "run.jsonl")
    assert rejected.value.param == "resume"
    assert ran == []


class Saved(BaseModel):
    user_name: str = Field(alias="userName")
    home: Path


@pytest.fixture
def saved() -> Saved:
    return Saved(userName="ada", home="home/ada")


async def test_f16b_a_script_answers_with_a_model(saved):
    async with af.session(backend=af.Scripted({"user": saved})) as flow, flow.state() as s:
        user = af.gen("user", schema=Saved)
        s += user
        assert await s[user] == saved


async def test_f37_a_script_answers_with_a_named_tuple_or_a_call(saved):
    script = {"pair": Pair(ALIASED, 3), "reply": af.ToolCall("save", {"user": saved})}
    backend = af.Scripted(script)
    async with af.session(backend=backend) as flow, flow.state() as s:
        s += af.user("?") + af.assistant(af.gen("pair", schema=Pair))
        s += af.user("?") + af.reply("reply", tools=[{"name": "save", "parameters": {"type": "object"}}])
        assert await s["pair"] == Pair(ALIASED, 3)
        assert [call.name for call in (await s["reply"]).tool_calls] == ["save"]
    assert not backend.generator.unused()


@pytest.mark.parametrize("secret", [SecretStr("x"), Secretive(inner={"a": "x"}), Hidden(name="a", token="x")])
async def test_f16b_unreadable_values_are_neither_answers_nor_arguments(secret):
    async with af.session(backend=af.Scripted({"user": secret})) as flow, flow.state() as s:
        s += af.gen("user", schema=dict[str, Any])
        with pytest.raises(af.errors.BadArgument):
            await s["user"]
    with pytest.raises(af.errors.BadArgument):
        af.ToolCall("save", {"user": [secret]})


async def test_f16b_arguments_of_a_call_are_read_by_the_tool(saved):
    got = []

    def save(user: Saved, when: datetime.date) -> str:
        got.append((user, when))
        return "saved"

    day = datetime.date(2024, 5, 1)
    script = [af.ToolCall("save", {"user": saved, "when": day}), "Done."]
    async with af.session(backend=af.Scripted(script)) as flow, flow.state() as s:
        s += af.user("Save it.")
        assert await af.act(s, tools=[save]) == "Done."
    assert got == [(saved, day)]


class Area(BaseModel):
    side_m: float = Field(alias="sideM")

    @pydantic.computed_field
    def square(self) -> float:
        return self.side_m**2


async def test_f16b_the_model_sees_a_tools_result_by_alias_with_computed_fields():
    def measure() -> list[Area | Path]:
        return [Area(sideM=2), Path("a/b")]

    def password() -> Secretive:
        return Secretive(inner={"a": "hush"})

    results = {}
    calls = (af.ToolCall("measure", {}), af.ToolCall("password", {}))
    async with af.session(backend=af.Scripted([calls, "Done."])) as flow, flow.state() as s:
        s += af.user("Measure it.")
        async for event in af.act(s, tools=[measure, password]):
            if isinstance(event, af.ToolDone):
                results[event.call.name] = event
    assert json.loads(results["measure"].text) == [{"sideM": 2.0, "square": 4.0}, "a/b"]
    assert results["password"].failed
    assert "***" not in results["password"].text.removesuffix(".")


async def test_f16a_results_of_a_map_come_back_from_the_file(flow, saved, tmp_path):
    async def program(s: af.State, item: int) -> Saved:
        return saved

    program.__annotations__["return"] = Saved
    for _ in range(2):
        assert await flow.map(program, [1], resume=tmp_path / "run.jsonl") == [saved]


@pytest.mark.parametrize("value", [float("nan"), object(), bytes, "\ud800", [[float("inf")]], Area])
def test_a_type_without_a_json_form_is_rejected(value):
    with pytest.raises(ValueError):  # noqa: PT011  # the libraries choose the words
        json_text(value)


def test_typing_any_is_a_form():
    form = JsonForm(typing.Any, "here")
    assert form.read(json.dumps(form.plain({1: (ALIASED,)}))) == {"1": [{"userName": "ada"}]}
