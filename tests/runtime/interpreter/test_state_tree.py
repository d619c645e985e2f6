"""The states of a session without an interpreter: what a tree counts and drops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from agentflow.errors import (
    BudgetExceeded,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    PromptTooLong,
    RunFailed,
)
from agentflow.runtime.interpreter import state_tree
from agentflow.runtime.interpreter.state_tree import StateRecord, StateTree, derived_error
from agentflow.runtime.interpreter.variables import EventCursor
from agentflow.runtime.limits import (
    OWN_CHAR_BYTES,
    Budget,
    MemoryBudget,
    MemoryReservation,
    text_bytes,
)

pytestmark = pytest.mark.anyio


class Contexts:
    """A tree whose contexts are texts. ``freed``, ``kicked``, ``later``: what it asked for."""

    def __init__(self) -> None:
        self.cursor = EventCursor()
        self.memory = MemoryBudget()
        self.freed: list[str] = []
        self.generator: Any = SimpleNamespace(free=self.freed.append)
        self.kicked: list[int] = []
        self.later: list[Callable[[], object]] = []
        self.tree: StateTree[str] = StateTree(
            self.cursor,
            self.memory,
            kick=lambda state: self.kicked.append(state.id),
            later=self.later.append,
        )

    def root(self, number: int) -> StateRecord[str]:
        """A state that has begun."""
        state = self.tree.add_root(number)
        self.begin(state, f"context {number}")
        return state

    def begin(self, state: StateRecord[str], context: str, num_chars: int = 0) -> None:
        """Gives the state a context of a generator that notes which ones are freed."""
        state.begin(self.generator, context, MemoryReservation(self.memory, 0), num_chars)

    def fork(self, parent: StateRecord[str], *numbers: int) -> list[StateRecord[str]]:
        """States that have not begun."""
        adding = self.tree.adding_children(parent, numbers)
        while True:
            try:
                next(adding)
            except StopIteration as end:
                return [*end.value]


async def test_the_limits_of_a_state_that_is_gone_do_not_count(monkeypatch):
    monkeypatch.setattr(state_tree, "MAX_LIMITS", 3)
    at = Contexts()
    kept = at.root(1)
    at.tree.restrict(kept, Budget())
    for number in range(2, 9):
        state = at.root(number)
        at.tree.restrict(state, Budget())
        at.tree.restrict(state, Budget())
        with pytest.raises(Overloaded):
            at.tree.restrict(state, Budget())
        at.tree.forget(state)


async def test_a_limit_of_the_session_is_one_of_each_state():
    at = Contexts()
    first = at.root(1)
    [branch] = at.fork(first, 2)
    session, own = Budget(), Budget()
    at.tree.restrict(None, session)
    at.tree.restrict(first, own)
    [late] = at.fork(branch, 3)
    budgets = [state.budgets for state in (first, branch, late, at.root(4))]
    assert budgets == [(session, own), (session, own), (session, own), (session,)]


def test_the_text_of_a_context_takes_memory_until_it_is_freed():
    at = Contexts()
    state = at.root(1)
    assert state.num_chars == 0
    at.begin(state, "context 1", 10)
    num_bytes = at.memory.num_bytes
    state.reserve_text("text", num_chars=3)
    assert at.memory.num_bytes - num_bytes == text_bytes("text", 3) > 0
    assert state.num_chars == 17
    at.tree.free(state)
    assert at.memory.num_bytes == num_bytes
    state.reserve_text("more")
    assert (at.memory.num_bytes, state.num_chars) == (num_bytes, 17)
    assert at.freed == ["context 1"]


def test_forks_are_added_a_hundred_at_a_time():
    at = Contexts()
    parent = at.root(1)
    adding = at.tree.adding_children(parent, tuple(range(2, 602)))
    nums_open = []
    while True:
        nums_open.append(len([*at.tree]))
        try:
            next(adding)
        except StopIteration as end:
            children = end.value
            break
    assert [child.id for child in children] == [*range(2, 602)]
    assert [child.parent for child in children] == [parent] * 600
    assert all(later - now <= 100 for now, later in pairwise([*nums_open, 601]))
    assert len(nums_open) <= 14


def test_a_state_waits_for_its_fork_until_it_begins_fails_or_is_gone():
    at = Contexts()
    begun, failed, gone, waits = [at.tree.add_root(number) for number in range(1, 5)]
    assert all(map(at.tree.waits_for_fork, (begun, failed, gone, waits)))
    at.begin(begun, "context")
    at.tree.stop(failed, EngineFailed("broken"))
    at.tree.forget(gone)
    assert [*map(at.tree.waits_for_fork, (begun, failed, gone, waits))] == [False, False, False, True]
    at.tree.add_root(3)  # the number is used again
    assert not at.tree.waits_for_fork(gone)


def test_a_group_fails_with_a_branch_that_failed_before_it_was_one():
    at = Contexts()
    parent = at.root(1)
    branches = at.fork(parent, 2, 3, 4)
    at.tree.end(branches[1], EngineFailed("broken"))
    assert parent.error is None
    at.tree.couple(parent, (2, 3, 4))
    errors = [type(state.error) for state in (parent, *branches)]
    assert errors == [RunFailed, Cancelled, EngineFailed, Cancelled]


def test_the_oldest_sealed_contexts_are_dropped(monkeypatch):
    monkeypatch.setattr(state_tree, "MAX_SEALED_BYTES", 2 * OWN_CHAR_BYTES)
    at = Contexts()
    for number in range(30):
        at.tree.forget(at.root(number))  # without a sealed context
    at.freed.clear()
    states = [at.root(number) for number in range(1, 5)]
    num_bytes = at.memory.num_bytes
    for state in states:
        state.reserve_text("x")
        for _ in range(2):  # it may be repeated
            at.tree.seal(state)
    assert [state.sealed for state in states] == [None, None, "context 3", "context 4"]
    assert at.memory.num_bytes == num_bytes + 2 * text_bytes("x")
    assert at.freed == ["context 1", "context 2", "context 3", "context 4"]
    at.tree.forget(states[2])
    fifth = at.root(5)
    fifth.reserve_text("x")
    at.tree.seal(fifth)
    assert states[3].sealed == "context 4"


@pytest.mark.parametrize(
    ("cause", "own", "of_other"),
    [
        (EngineFailed("broken"), RunFailed, RunFailed),
        (Cancelled("left"), Cancelled, Cancelled),
        (PromptTooLong("long"), PromptTooLong, RunFailed),
        (BudgetExceeded("spent"), BudgetExceeded, BudgetExceeded),
        (DeadlineExceeded("late"), RunFailed, RunFailed),  # which this state has not exceeded
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_derived_error_has_the_kind_and_the_root_of_its_cause(cause, own, of_other):
    state = Contexts().root(1)
    state.restrict(Budget(deadline_s=60.0, output_tokens=0))
    errors = [derived_error("no value", cause, state), derived_error("no value", cause, state, of_other=True)]
    assert [type(error) for error in errors] == [own, of_other]
    for error in errors:
        assert error.__cause__ is cause
        again = derived_error("and none here", error, state)
        assert again.__cause__ is cause
