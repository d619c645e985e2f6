"""Values are counted as a decoder would find them, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.protocol.bounds.json_bounds import JsonBounds, JsonScan, TooMuchJson, split_pieces

values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\,[]{}\n\u00e9', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def parts_of(value: Any) -> int:
    """Objects, lists and strings in a value."""
    if isinstance(value, str):
        return 1
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts_of, value.values()))
    return 1 + sum(map(parts_of, value)) if isinstance(value, list) else 0


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def passes(text: bytes, cuts: list[int], **bounds: int) -> bool:
    """Whether the text, cut at these places, keeps within the bounds."""
    scan = JsonScan(JsonBounds(**{"values": 10**6, "parts": 10**6, **bounds}))
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    try:
        for start, end in itertools.pairwise(places):
            scan.push(text[start:end])
    except TooMuchJson:
        return False
    return True


@given(values, st.lists(st.integers(0, 200)), st.booleans())
def test_a_text_passes_exactly_the_bounds_that_it_keeps(value: Any, cuts: list[int], is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    parts, depth = parts_of(value), depth_of(value)
    assert passes(text, cuts, parts=parts)
    assert parts == 0 or not passes(text, cuts, parts=parts - 1)
    assert passes(text, cuts, depth=depth)
    assert depth == 0 or not passes(text, cuts, depth=depth - 1)


@given(st.lists(st.integers(-5, 10**12), min_size=1), st.lists(st.integers(0, 200)))
def test_numbers_count_as_values(numbers: list[int], cuts: list[int]) -> None:
    text = json.dumps(numbers).encode()
    assert passes(text, cuts, values=len(numbers))
    assert not passes(text, cuts, values=len(numbers) - 1)


@given(st.text(alphabet='a"\\\n/\u00e9', max_size=30), st.lists(st.integers(0, 200)), st.booleans())
def test_escapes_of_strings_are_counted(value: str, cuts: list[int], is_ascii: bool) -> None:
    escapes = sum(char in '"\\\n' or (is_ascii and char == "\u00e9") for char in value)
    text = json.dumps([value], ensure_ascii=is_ascii).encode()
    assert passes(text, cuts, escapes=escapes)
    assert escapes == 0 or not passes(text, cuts, escapes=escapes - 1)


@given(st.text(alphabet='a"\\\u00e9\u20ac\U0001f600', max_size=30), st.lists(st.integers(0, 200)))
def test_bytes_beyond_ascii_are_counted(value: str, cuts: list[int]) -> None:
    text = json.dumps([value], ensure_ascii=False).encode()
    wide_bytes = sum(len(char.encode()) for char in value if not char.isascii())
    assert passes(text, cuts, wide_bytes=wide_bytes)
    assert wide_bytes == 0 or not passes(text, cuts, wide_bytes=wide_bytes - 1)


def test_several_texts_share_a_bound() -> None:
    scan = JsonScan(JsonBounds(values=100, parts=3, depth=1))
    scan.push(b'["a"]')
    with pytest.raises(TooMuchJson, match="3"):
        scan.push(b'["a"]')


@given(st.binary(max_size=300_000))
def test_pieces_are_the_whole_text(data: bytes) -> None:
    assert b"".join(split_pieces(data)) == data
