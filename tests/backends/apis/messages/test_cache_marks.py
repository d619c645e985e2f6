"""The places of a prompt that Anthropic's API is asked to cache."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentflow.backends.apis.messages.cache_marks import MARK, MAX_MARKS, MIN_BYTES, PromptPart, marked_parts


def head(size: int) -> PromptPart:
    """A tool or a block of the system prompt."""
    return PromptPart(msgspec.json.encode({"type": "text", "text": "x" * size}), b"}", is_head=True)


def message(size: int, *, constant: bool = True, kind: str = "text", shared: bool = False) -> PromptPart:
    """A message with one block."""
    content = {"role": "user", "content": [{"type": kind, "text": "x" * size}]}
    return PromptPart(msgspec.json.encode(content), b"}]}", is_constant=constant, is_shared=shared)


def marked(*parts: PromptPart) -> list[int]:
    """The numbers of the marked parts."""
    return [number for number, part in enumerate(marked_parts(parts)) if MARK in part]


SHORT, LONG = 10, MIN_BYTES


def test_the_end_of_a_long_head_is_marked() -> None:
    assert marked(head(SHORT), head(LONG), message(SHORT)) == [1]
    assert marked(head(LONG), head(SHORT), message(SHORT)) == [1]
    assert marked(head(SHORT), message(SHORT)) == []


def test_a_single_question_is_not_marked() -> None:
    assert marked(message(LONG)) == []
    assert marked(head(SHORT), message(LONG)) == []


def test_long_constant_messages_before_others_are_marked() -> None:
    assert marked(message(LONG), message(SHORT)) == [0]
    assert marked(message(LONG, constant=False), message(SHORT)) == [1]  # the conversation goes on


def test_a_conversation_that_goes_on_is_marked_at_its_end() -> None:
    assert marked(message(LONG), message(SHORT, constant=False), message(SHORT)) == [0, 2]
    assert marked(message(SHORT), message(SHORT, constant=False), message(SHORT)) == []


def test_forks_are_marked() -> None:
    assert marked(message(LONG), message(SHORT, shared=True), message(SHORT)) == [0, 1]
    assert marked(message(SHORT, shared=True), message(SHORT)) == []


def test_a_message_that_is_continued_is_not_marked() -> None:
    parts = message(LONG), message(SHORT, constant=False), message(SHORT), message(SHORT, constant=False)
    assert marked(*parts[:3], parts[3]._replace(is_open=True)) == [0, 2]


@pytest.mark.parametrize("kind", ["thinking", "redacted_thinking"])
def test_reasoning_is_not_marked(kind: str) -> None:
    assert marked(message(LONG), message(SHORT, kind=kind, shared=True, constant=False), message(SHORT)) == [
        0,
        2,
    ]


PARTS = (
    st.lists(st.builds(head, st.sampled_from([SHORT, LONG])), max_size=4),
    st.lists(
        st.builds(
            message,
            st.sampled_from([SHORT, LONG]),
            constant=st.booleans(),
            kind=st.sampled_from(["text", "thinking"]),
            shared=st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
)


@given(*PARTS)
def test_marks_change_nothing_else_and_are_few(heads: list[PromptPart], messages: list[PromptPart]) -> None:
    parts = [*heads, *messages]
    found = marked_parts(parts)
    assert [part.replace(MARK, b"") for part in found] == [part.encoded for part in parts]
    assert sum(part.count(MARK) for part in found) <= MAX_MARKS
    for part in found:
        decoded = msgspec.json.decode(part)
        block = decoded["content"][-1] if "content" in decoded else decoded
        assert ("cache_control" in block) == (MARK in part)


@given(*PARTS)
def test_the_longest_prefixes_are_marked(heads: list[PromptPart], messages: list[PromptPart]) -> None:
    """One more shared message at the end keeps the later marks."""
    parts = [*heads, *messages, message(LONG, shared=True), message(SHORT)]
    assert marked(*parts)[-1] == len(parts) - 2 or marked(*parts)[-1] == len(parts) - 1
    before, after = set(marked(*parts[:-2])), set(marked(*parts))
    kept = {number for number in before if number in after}
    assert not kept or min(kept) >= min(after)
