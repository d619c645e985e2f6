"""The text up to the first stop is visible, however it is split, and nothing visible is taken back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.apis.answers.visible_text import StopFilter


def visible(pieces: list[str], stops: list[str], stop_regex: str | None = None) -> tuple[str, bool]:
    found = StopFilter(stops, stop_regex)
    text = "".join([found.push(piece) for piece in pieces])
    return text + found.finish(), found.is_stopped


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop that is complete first."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


@given(
    st.text("ab<", max_size=30),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
    st.booleans(),
)
def test_any_split_gives_the_same_text(
    text: str, stops: list[str], splits: list[int], has_regex: bool
) -> None:
    places = [0, *sorted({place for place in splits if place < len(text)}), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert visible(pieces, stops, "c" if has_regex else None) == expected(text, stops)


@pytest.mark.parametrize(
    ("pieces", "pattern", "text"),
    [
        (["one ", "12", " two"], "[0-9]+", "one "),
        (["one x", "y", "z two"], "x.z", "one "),
        (["one x", "y", "y two"], "x.z", "one xyy two"),
        (["Answer", "\nQuestion: more"], r"\nQuestion:", "Answer"),
    ],
)
def test_a_pattern_ends_the_text(pieces: list[str], pattern: str, text: str) -> None:
    assert visible(pieces, [], pattern)[0] == text


def test_text_that_may_begin_a_stop_is_held_back() -> None:
    found = StopFilter(["END", "E!"])
    assert [found.push(piece) for piece in ("a", "E", "N", "x", "E")] == ["a", "", "", "ENx", ""]
    assert found.finish() == "E"
