"""The memory of runs that a template trimmed, once their states have gone."""

from __future__ import annotations

import pytest
from support.engine.conversations import letters, say, state_of

from agentflow.engine.text.state.laid_out import MAX_REMEMBERED, _remembered_slice


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    _remembered_slice.cache_clear()


def test_texts_that_are_trimmed_are_not_held() -> None:
    state = state_of("headers_and_trim")
    for number in range(20):
        say(state, "user", f" text {number} ")
    state.cut()
    assert _remembered_slice.cache_info().currsize == 0


@pytest.mark.parametrize("is_long", [False, True])
def test_slices_of_short_answers_only_are_held(is_long: bool) -> None:
    text = "the fox " * (MAX_REMEMBERED // 8 if is_long else 3)
    state = state_of("headers_and_trim")
    say(state, "user", "Hi")
    state.begin_role("assistant")
    state.cut()
    opened = state.ids()
    state.generated(letters(text), text)
    state.end_role()
    state.cut()
    assert state.ids()[: len(opened) + 3] == opened + letters("the fox")[:3]
    assert _remembered_slice.cache_info().currsize == (0 if is_long else 1)
