"""Whole numbers that a client writes as floats, in the integer fields of every API, and unknown members that
are null."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.server.errors import ApiError
from agentflow.server.http.json_body import decoded


class Called(msgspec.Struct, tag_field="kind", tag="called", forbid_unknown_fields=True):
    given: msgspec.Raw
    index: int | None = None


class Said(msgspec.Struct, tag_field="kind", tag="said", forbid_unknown_fields=True):
    text: str
    ids: list[int] = []


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    """Every shape in which the requests of the APIs hold integers."""

    limit: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)] | None = None
    off: Literal[0] | None = None
    share: float | None = None
    either: int | float | None = None
    prompt: str | list[str | int | list[int]] = ""
    counts: dict[str, int] = {}
    turns: list[Called | Said] = []
    last: list[Said] = []
    raw: msgspec.Raw = msgspec.Raw(b"null")


NUMBERS = st.integers(-(2**53), 2**53)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=5) | st.sampled_from(["1.0", 'say "2.0"', "3e0"])
UNREAD = st.sampled_from([b'{"x":1.0}', b"[2.0,3]", b'"4.0"', b"5.0"])
CALLED = st.fixed_dictionaries({"kind": st.just("called"), "given": UNREAD}, optional={"index": NUMBERS})
SAID = st.fixed_dictionaries({"kind": st.just("said"), "text": TEXTS}, optional={"ids": st.lists(NUMBERS)})


def without_tag(said: dict[str, Any]) -> dict[str, Any]:
    """The decoder needs a tag only where several structs are possible."""
    return {name: value for name, value in said.items() if name != "kind"}


BODIES = st.fixed_dictionaries(
    {},
    optional={
        "limit": st.none() | NUMBERS,
        "off": st.just(0),
        "share": st.floats(-1, 1),
        "either": NUMBERS,
        "prompt": TEXTS | st.lists(TEXTS) | st.lists(NUMBERS) | st.lists(st.lists(NUMBERS)),
        "counts": st.dictionaries(TEXTS, NUMBERS),
        "turns": st.lists(CALLED | SAID, max_size=3),
        "raw": UNREAD,
        "last": st.lists(SAID | SAID.map(without_tag), max_size=3),
    },
)


def written(value: Any, write: Any) -> str:
    """The value as JSON, its integers by ``write``."""
    match value:
        case dict():
            members = [f" {written(name, write)} : {written(inner, write)}" for name, inner in value.items()]
            return "{" + ",".join(members) + " }"
        case list():
            return "[" + " , ".join(written(inner, write) for inner in value) + "]"
        case bytes():
            return value.decode()
        case int():
            return str(write(value))
        case _:
            return msgspec.json.encode(value).decode()


FORMS = ("{}", "{}.0", "{}.000", "{}e0", "{}.0E+0")


@given(BODIES, st.data())
def test_f34a_a_whole_number_is_an_integer_in_every_spelling(body, data):
    def spelled(number: int) -> str:
        return data.draw(st.sampled_from(FORMS)).format(number)

    plain = decoded(written(body, str).encode(), Asked)
    read = decoded(written(body, spelled).encode(), Asked)
    assert shown(read) == shown(plain)


@pytest.mark.parametrize("num_chars", [32_000, 1_200_000])
def test_f37_a_large_body_may_have_whole_numbers_written_as_floats(num_chars: int) -> None:
    """The options of a chat with a photo are such a body."""
    read = decoded(b'{"limit": 8192.0, "prompt": ["%b", 3.0]}' % (b"x" * num_chars), Asked)
    assert (read.limit, read.prompt) == (8192, ["x" * num_chars, 3])


def shown(value: Any) -> Any:
    """All fields; fields that are read later have their text, which stays unchanged."""
    match value:
        case msgspec.Raw():
            return bytes(value)
        case msgspec.Struct():
            return type(value), [shown(getattr(value, name)) for name in value.__struct_fields__]
        case list():
            return [shown(inner) for inner in value]
        case _:
            return value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"limit": 8192.5}', "limit"),
        ('{"limit": 1e400}', "limit"),
        ('{"off": 1.0}', "off"),
        ('{"limit": 1.0, "prompt": [1.5]}', "prompt[0]"),
        ('{"limit": 1.0, "counts": {"a": "1.0"}}', "counts[...]"),
        ('{"limit": 1.0, "nothing": 2.0}', "nothing"),
        ('{"limit": 9007199254740994.0}', "limit"),
    ],
)
def test_f34a_other_numbers_are_rejected_with_their_field(body, param):
    with pytest.raises(ApiError) as caught:
        decoded(body.encode(), Asked)
    assert (caught.value.status, caught.value.param) == (400, param)


UNKNOWN = st.dictionaries(st.sampled_from(["new", "$", "a.b", "`", "ü"]), st.just(b"null"))


@given(BODIES, st.data())
def test_f37_unknown_members_that_are_null_are_left_out(body, data):
    """Serializers write null for each unset option, including other servers' options."""
    turns = [turn | data.draw(UNKNOWN) for turn in body.get("turns", [])]
    last = [turn | data.draw(UNKNOWN) for turn in body.get("last", [])]
    with_nulls = body | data.draw(UNKNOWN) | ({"turns": turns} if turns else {}) | {"last": last}
    expected = decoded(written(body, str).encode(), Asked)
    space = data.draw(st.sampled_from(["", "\n", " \r\n\t"]))
    text = space + written(with_nulls, lambda number: f"{number}.0")
    assert decoded(text.encode(), Asked) == expected
    if turns:
        turns[-1] |= {"new": 0}
        with pytest.raises(ApiError, check=lambda error: error.param == f"turns[{len(turns) - 1}].new"):
            decoded(written(with_nulls | {"turns": turns}, str).encode(), Asked)


@pytest.mark.parametrize("prompt", ["", "x" * 1_200_000], ids=["small", "large"])
@pytest.mark.parametrize("num_unknown", [1, 40])
def test_f37_any_body_may_have_any_number_of_unknown_nulls(prompt: str, num_unknown: int) -> None:
    unknown = {f"new{number}": None for number in range(num_unknown)}
    turns = [{"kind": "said", "text": "a"} | unknown, {"kind": "called", "given": 1, "text": None} | unknown]
    body = {"prompt": prompt, "turns": turns} | unknown
    read = decoded(msgspec.json.encode(body), Asked)
    assert (read.prompt, read.turns) == (prompt, [Said("a"), Called(msgspec.Raw(b"1"))])
    turns[1]["new0"] = 0
    with pytest.raises(ApiError) as caught:
        decoded(msgspec.json.encode(body), Asked)
    assert (caught.value.status, caught.value.param) == (400, "turns[1].new0")


@pytest.mark.parametrize("num_chars", [0, 1_200_000])
def test_f37_half_a_surrogate_pair_is_found_in_any_body(num_chars: int) -> None:
    with pytest.raises(ApiError) as caught:
        decoded(b'{"prompt": ["%b", "\\ud800"]}' % (b"x" * num_chars), Asked)
    assert (caught.value.code, caught.value.param) == ("invalid_json", "prompt[1]")


def test_f37_a_long_name_is_not_copied_for_each_value_in_it() -> None:
    body = b'{"%b": [%b "\\ud800"]}' % (b"n" * 50_000, b"1," * 2_000)
    tracemalloc.start()
    with pytest.raises(ApiError) as caught:
        decoded(body, Asked)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.param == f"{'n' * 50_000}[2000]"
    assert peak < 5_000_000


TREES = st.recursive(
    st.integers(0, 1) | st.sampled_from(["a", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b.", "", "\udc00"]), inner, max_size=3)
    ),
)


def half_pair_places(value: Any, at: str = "") -> Iterator[str]:
    match value:
        case "\ud800":
            yield at
        case list():
            for i, inner in enumerate(value):
                yield from half_pair_places(inner, f"{at}[{i}]")
        case dict():
            if "\udc00" in value:
                yield at
            for name, inner in value.items():
                yield from half_pair_places(inner, f"{at}.{name}".lstrip("."))


@given(st.dictionaries(st.sampled_from(["a", "b"]), TREES))
def test_f37_the_field_of_half_a_surrogate_pair_is_the_first(tree: dict[str, Any]) -> None:
    places = list(half_pair_places(tree))
    found = None
    try:
        decoded(json.dumps(tree).encode(), dict[str, Any])
    except ApiError as error:
        found = error.param or ""
    assert found == (places[0] if places else None)
