"""The states of a session without an interpreter: the counts of a tree, and the states that it drops."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from agentflow.errors import (
    BudgetExceeded,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    PromptTooLong,
    ProtocolError,
    RunFailed,
    drop_tracebacks,
)
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo, Reached, StateFailed
from agentflow.protocol.op_table import GRAPH_TICKET
from agentflow.runtime.generator import StateHint
from agentflow.runtime.interpreter import state_tree
from agentflow.runtime.interpreter.state_tree import (
    GraphExecution,
    StateRecord,
    StateTree,
    derived_error,
    with_place,
)
from agentflow.runtime.interpreter.variables import EventCursor, VariableRecord
from agentflow.runtime.limits import (
    FORKED_CHAR_BYTES,
    OWN_CHAR_BYTES,
    Budget,
    MemoryBudget,
    MemoryReservation,
    error_bytes,
    text_bytes,
)

pytestmark = pytest.mark.anyio


class Contexts:
    """A tree whose contexts are texts. ``freed``, ``dropped``, ``kicked``, ``later``: recorded calls."""

    def __init__(self) -> None:
        self.cursor = EventCursor()
        self.memory = MemoryBudget()
        self.freed: list[str] = []
        self.dropped: list[str] = []
        self.generator: Any = SimpleNamespace(free=self.freed.append, hint=self.hint)
        self.kicked: list[int] = []
        self.later: list[Callable[[], object]] = []
        self.tree: StateTree[str] = StateTree(
            self.cursor,
            self.memory,
            kick=lambda state: self.kicked.append(state.id),
            later=self.later.append,
        )

    def hint(self, context: str, hint: StateHint) -> None:
        assert context not in self.freed
        assert hint == StateHint(is_dropped=True)
        self.dropped.append(context)

    def root(self, number: int) -> StateRecord[str]:
        """A state that has begun."""
        state = self.tree.add_root(number)
        self.begin(state, f"context {number}")
        return state

    def begin(self, state: StateRecord[str], context: str, *num_chars: int) -> None:
        """Gives the state a context of a generator that notes which ones are freed."""
        state.begin(self.generator, context, MemoryReservation(self.memory, 0), *num_chars)

    def fork(self, parent: StateRecord[str], *numbers: int) -> list[StateRecord[str]]:
        """States that have not begun."""
        adding = self.tree.adding_children(parent, numbers)
        while True:
            try:
                next(adding)
            except StopIteration as end:
                return [*end.value]


@pytest.fixture
def at() -> Contexts:
    return Contexts()


async def test_the_limits_of_a_state_that_is_gone_do_not_count(monkeypatch, at):
    monkeypatch.setattr(state_tree, "MAX_LIMITS", 3)
    kept = at.root(1)
    at.tree.restrict(kept, Budget())
    for number in range(2, 9, 2):
        state = at.root(number)
        [branch] = at.fork(state, number + 1)
        at.tree.restrict(state, Budget())
        with pytest.raises(Overloaded):
            at.tree.restrict(branch, Budget())
        at.tree.forget(branch)
        at.tree.forget(state)


async def test_f37_limits_count_for_each_state_and_for_its_later_forks(monkeypatch, at):
    monkeypatch.setattr(state_tree, "MAX_LIMITS", 9)
    parent = at.root(1)
    at.fork(parent, 2)
    at.tree.restrict(None, Budget())
    at.tree.restrict(parent, Budget())
    branches = at.fork(parent, 3, 4)
    with pytest.raises(Overloaded):
        at.fork(parent, 5)
    at.root(5)
    for refused in (lambda: at.root(6), lambda: at.tree.restrict(branches[0], Budget())):
        with pytest.raises(Overloaded):
            refused()
    at.tree.forget(branches[1])
    at.fork(branches[0], 6)


@pytest.mark.parametrize("is_of_session", [True, False])
async def test_f37_further_limits_of_the_same_states_tighten_the_first(is_of_session, at):
    state = at.root(1)
    [branch] = at.fork(state, 2)
    root = None if is_of_session else state
    for tokens, deadline_s in ((9, None), (4, 50.0), (7, 20.0), (5, None)):
        at.tree.restrict(root, Budget(output_tokens=tokens, deadline_s=deadline_s))
    [late] = at.fork(branch, 3)
    [budget] = state.budgets
    assert state.budgets == branch.budgets == late.budgets
    assert budget.tokens_left == 4
    assert budget.deadline == pytest.approx(anyio.current_time() + 20, abs=5)


async def test_the_first_deadline_ends_an_op_that_runs(at):
    state = at.root(1)
    now = anyio.current_time()
    state.scope = anyio.CancelScope(deadline=now + 50)
    for deadline_s, first_s in ((90.0, 50), (10.0, 10), (20.0, 10)):
        at.tree.restrict(state, Budget(deadline_s=deadline_s))
        assert state.scope.deadline == pytest.approx(now + first_s, abs=5)


async def test_a_limit_of_the_session_is_one_of_each_state(at):
    first = at.root(1)
    [branch] = at.fork(first, 2)
    session, own = Budget(), Budget()
    at.tree.restrict(None, session)
    at.tree.restrict(first, own)
    [late] = at.fork(branch, 3)
    budgets = [state.budgets for state in (first, branch, late, at.root(4))]
    assert budgets == [(session, own), (session, own), (session, own), (session,)]


def test_the_text_of_a_context_takes_memory_until_it_is_freed(at):
    state = at.root(1)
    assert state.num_chars == 0
    at.begin(state, "context 1", 10)
    num_bytes = at.memory.num_bytes
    state.reserve_text("text", num_chars=3)
    assert at.memory.num_bytes - num_bytes == text_bytes("text", 3) > 0
    assert state.num_chars == 17
    assert state.context_bytes == 10 * FORKED_CHAR_BYTES + 7 * OWN_CHAR_BYTES
    at.tree.free(state)
    assert at.memory.num_bytes == num_bytes
    state.reserve_text("more")
    assert (at.memory.num_bytes, state.num_chars) == (num_bytes, 17)
    assert at.freed == ["context 1"]


def test_forks_are_added_a_hundred_at_a_time(at):
    parent = at.root(1)
    parent.opened = ops.Open(1)
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
    assert {(child.parent, child.opened) for child in children} == {(parent, parent.opened)}
    assert all(later - now <= 100 for now, later in pairwise([*nums_open, 601]))
    assert 13 <= len(nums_open) <= 14  # memory for all of them is reserved before, in as many steps


def test_the_number_of_states_is_limited(at):
    tree = StateTree(at.cursor, at.memory, kick=at.kicked.append, later=at.later.append, max_states=5)
    parent = tree.add_root(1)
    for children in ((2, 3, 1), ()):
        with pytest.raises(ProtocolError):
            [*tree.adding_children(parent, children)]
    [*tree.adding_children(parent, (2, 3, 4))]
    with pytest.raises(Overloaded):
        [*tree.adding_children(parent, (5, 6))]
    tree.add_root(5)
    with pytest.raises(Overloaded):
        tree.add_root(6)
    assert [state.id for state in tree] == [1, 2, 3, 4, 5]


def test_a_failure_stops_a_few_states_in_each_turn(monkeypatch, at):
    monkeypatch.setattr(state_tree, "MAX_STOPPED", 4)
    parent, other = at.root(1), at.root(1000)
    branches = at.fork(parent, *range(2, 12))
    for branch in branches:
        at.fork(branch, 10 * branch.id)
    at.tree.couple(parent, tuple(range(2, 12)))
    at.tree.end(branches[4], EngineFailed("broken"))
    nums_stopped = [len(at.kicked)]
    while at.later:
        at.later.pop(0)()
        nums_stopped.append(len(at.kicked))
    assert all(later - now <= 4 for now, later in pairwise([0, *nums_stopped]))
    assert nums_stopped[0] >= 3
    assert nums_stopped[-1] == len(set(at.kicked)) == 21
    assert type(parent.error) is RunFailed
    assert [type(branch.error) for branch in branches] == [Cancelled] * 4 + [EngineFailed] + [Cancelled] * 5
    assert other.error is None
    assert len(nums_stopped) <= 8


def test_the_forks_of_a_cancelled_state_are_dropped(at):
    parent = at.root(1)
    branches = at.fork(parent, 2, 3)
    for branch in branches:
        at.begin(branch, f"context {branch.id}")
    at.tree.forget(branches[0])  # closed, not cancelled
    at.tree.cancel(parent, Cancelled("left"))
    assert at.freed == ["context 2", "context 1", "context 3"]
    assert at.dropped == ["context 3"]


async def test_an_error_takes_memory_and_ends_the_op_that_runs(at):
    state = at.root(1)
    state.scope, state.is_running = anyio.CancelScope(), True
    num_bytes = at.memory.num_bytes
    for error in (EngineFailed("broken"), EngineFailed("once more")):
        at.tree.stop(state, error)
        assert str(state.error) == "broken"
    assert state.scope.cancel_called
    assert at.memory.num_bytes - num_bytes == error_bytes(state.error)
    assert at.kicked == [1]
    assert at.freed == []  # the op still uses the context
    at.tree.remove_one()
    assert at.freed == ["context 1"]
    assert not at.tree.remove_one()


@pytest.mark.parametrize("is_closed", [False, True])
def test_texts_that_the_client_did_not_provide_fail_with_their_state(is_closed, at):
    state = at.root(1)
    variable = VariableRecord(2, "text", at.cursor, None, at.later.append, is_expected=True)
    state.expected.append(variable)
    error = EngineFailed("broken")
    at.tree.forget(state) if is_closed else at.tree.stop(state, error)
    assert type(variable.error) is (Cancelled if is_closed else RunFailed)
    assert is_closed or variable.error.__cause__ is error
    assert not state.expected


def test_each_event_is_sent_once_and_again_if_it_was_lost(at):
    state = at.root(1)
    events = [Reached(1, 3), StateFailed(1, ErrorInfo.of(EngineFailed("broken")))]
    state.reach(3)
    assert at.cursor.drain() == events[:1]
    at.tree.stop(state, EngineFailed("broken"))
    assert at.cursor.drain() == events[1:]
    for ticket, again in ((3, events[1:]), (0, events)):
        state.mark()
        assert at.cursor.drain() == []
        state.rewind(ticket)
        assert at.cursor.drain() == again


@pytest.mark.parametrize(
    ("errors", "event"),
    [
        ({}, Reached(1, GRAPH_TICKET)),
        ({2: Cancelled("left")}, Reached(1, GRAPH_TICKET)),
        ({2: Cancelled("left"), 3: EngineFailed("broken")}, "broken"),
        ({2: EngineFailed("first"), 3: EngineFailed("second")}, "first"),
        ({1: EngineFailed("root"), 2: EngineFailed("first")}, "root"),
    ],
)
def test_a_graph_ends_with_its_last_state(errors, event, at):
    root = at.root(1)
    graph = GraphExecution(root)
    states = [root, *at.fork(root, 2, 3)]
    for state in states:
        graph.add(state)
    for state in states:
        if 1 not in errors:
            assert at.cursor.drain() == []
        if state.id in errors:
            at.tree.stop(state, errors[state.id])
        graph.state_ended(state)
    [sent] = at.cursor.drain()
    assert (sent.error.message if isinstance(sent, StateFailed) else sent) == event
    assert sent.state == 1


def test_a_number_that_is_used_again_is_another_state(at):
    parent = at.root(1)
    [old] = at.fork(parent, 2)
    at.tree.forget(old)
    [new] = at.fork(parent, 2)
    at.tree.forget(old)
    assert at.tree.get(2) is new
    assert parent.children == {2: new}
    gone = weakref.ref(new)
    at.tree.couple(parent, (2,))
    at.tree.forget(new)
    del new, old
    assert gone() is None  # without a garbage collection


def test_a_state_waits_for_its_fork_until_it_begins_fails_or_is_gone(at):
    begun, failed, gone, waits = [at.tree.add_root(number) for number in range(1, 5)]
    assert all(map(at.tree.waits_for_fork, (begun, failed, gone, waits)))
    at.begin(begun, "context")
    at.tree.stop(failed, EngineFailed("broken"))
    at.tree.forget(gone)
    assert [*map(at.tree.waits_for_fork, (begun, failed, gone, waits))] == [False, False, False, True]
    at.tree.add_root(3)  # the number is used again
    assert not at.tree.waits_for_fork(gone)


def test_an_error_that_fails_several_ops_has_the_place_of_each(at):
    state = at.root(7)
    error = EngineFailed("broken")
    assert with_place(error, state, None) is error
    assert error.place is None
    first, second = with_place(error, state, 1), with_place(error, state, 2)
    assert first is error
    assert (first.place, second.place) == ((7, 1), (7, 2))
    assert (type(second), str(second)) == (EngineFailed, "broken")


def test_a_stored_error_keeps_no_frames():
    def raised(number: int) -> BaseException:
        try:
            try:
                raise ValueError(number)
            except ValueError as cause:
                if number % 2:
                    raise RuntimeError(number) from cause
                raise RuntimeError(number)  # noqa: B904
        except RuntimeError as error:
            return error

    for number in range(2):
        error = raised(number)
        cause = error.__context__
        assert cause is not None
        assert error.__traceback__ is not None
        drop_tracebacks(error)
        assert error.__traceback__ is cause.__traceback__ is None


@pytest.mark.parametrize("error", [EngineFailed("broken"), PromptTooLong("long")])
def test_a_group_fails_with_a_branch_that_failed_before_it_was_one(error, at):
    parent = at.root(1)
    branches = at.fork(parent, 2, 3, 4, 5)
    at.tree.cancel(branches[0], Cancelled("left"))
    at.tree.end(branches[2], error)
    assert parent.error is None
    at.kicked.clear()
    at.tree.couple(parent, (2, 3, 4, 5))
    assert type(parent.error) is RunFailed
    assert branches[2].error is error
    assert [str(branch.error) for branch in branches if branch.error.__cause__ is None] == [
        "left",
        str(error),
    ]
    assert [type(branch.error) for branch in branches[1::2]] == [Cancelled] * 2
    assert {branch.error.__cause__ for branch in (parent, *branches[1::2])} == {error}
    assert at.kicked == [4, 3, 5, 1]


def test_a_branch_that_fails_after_it_was_cancelled_fails_no_group(at):
    parent = at.root(1)
    first, second = at.fork(parent, 2, 3)
    at.tree.couple(parent, (2, 3))
    at.tree.cancel(first, Cancelled("left"))
    at.tree.end(first, EngineFailed("broken"))
    assert type(first.error) is Cancelled
    assert parent.error is second.error is None


def test_the_oldest_sealed_contexts_are_dropped(monkeypatch, at):
    monkeypatch.setattr(state_tree, "MAX_SEALED_BYTES", 2 * OWN_CHAR_BYTES)
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


def caused(error: BaseException) -> BaseException:
    error.__cause__ = ValueError("inner")
    return error


@pytest.mark.parametrize(
    ("cause", "own", "of_other"),
    [
        (caused(EngineFailed("broken")), RunFailed, RunFailed),  # the root is an error of agentflow
        (EngineFailed("broken"), RunFailed, RunFailed),
        (Cancelled("left"), Cancelled, Cancelled),
        (PromptTooLong("long"), PromptTooLong, RunFailed),
        (BudgetExceeded("spent"), BudgetExceeded, BudgetExceeded),
        (DeadlineExceeded("late"), RunFailed, RunFailed),  # which this state has not exceeded
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_derived_error_has_the_kind_and_the_root_of_its_cause(cause, own, of_other, at):
    state = at.root(1)
    state.restrict(Budget(deadline_s=60.0, output_tokens=0))
    errors = [derived_error("no value", cause, state), derived_error("no value", cause, state, of_other=True)]
    assert [type(error) for error in errors] == [own, of_other]
    for error in errors:
        assert error.__cause__ is cause
        again = derived_error("and none here", error, state)
        assert again.__cause__ is cause
