"""``race``: several ways to one result, each in a task. The first result counts; the other contenders and
the states that they wrote are cancelled.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar, overload

import anyio

from agentflow.errors import BadArgument, add_note, short_repr
from agentflow.language.failures.user_code import UserCode
from agentflow.language.link import TRACE
from agentflow.language.op_log import WRITTEN
from agentflow.language.states.run import StateNode
from agentflow.language.states.state import State, state_node
from agentflow.language.states.variable import Reference, find_target
from agentflow.runtime.task_group import open_task_group

ResultT = TypeVar("ResultT")


@overload
async def race(*contenders: State) -> State: ...
@overload
async def race(*contenders: Awaitable[ResultT]) -> ResultT: ...
async def race(*contenders: Any) -> Any:
    """The first result of several awaitables, such as calls of programs, variables, or ``flow.run(...)``. The
    result of a state is the state itself, once everything appended to it is done. Cancels the others, and the
    states that they represent or have appended to: give each program a separate state.

    A contender that fails cannot win. If all fail, the first failure is raised. If several end in the same
    step of the event loop, the first in order wins.

    >>> await af.race(judge(s.copy(), essay), judge(s.copy(), essay, dimensions=("style",)))
    'A'
    >>> await af.race(branches[0]["judgment"], branches[1]["judgment"])
    'Plants turn light into sugar.'
    """
    try:
        if not contenders:
            raise BadArgument("race: give at least one awaitable", param="contenders")
        for contender in contenders:
            if not inspect.isawaitable(contender):
                raise BadArgument(
                    f"race: {short_repr(contender)} cannot be awaited: give calls of programs, as in "
                    "race(judge(s.copy(), essay), …), variables, or states",
                    param="contenders",
                )
        if (trace := TRACE.get()) is not None:
            trace.needs_values("which contender of a race is first")
        return await _Race(contenders).run()
    finally:
        for contender in contenders:
            if inspect.iscoroutine(contender):
                contender.close()  # it may not have begun


class _Race:
    def __init__(self, contenders: Iterable[Awaitable[Any]]) -> None:
        self._contenders = list(contenders)
        self._results: dict[int, Any] = {}
        self._failures: list[Exception] = []
        self._written: list[dict[int, StateNode]] = [{} for _ in self._contenders]
        self._changed = anyio.Event()

    async def run(self) -> Any:
        async with open_task_group() as group:
            for index in range(len(self._contenders)):
                group.start_soon(self._contend, index)
            while not self._results and len(self._failures) < len(self._contenders):
                await self._changed.wait()
                self._changed = anyio.Event()
            winner = min(self._results, default=None)
            group.cancel_scope.cancel()
        if winner is None:
            failure = self._failures[0]
            if len(self._failures) > 1:
                add_note(failure, f"in race: all {len(self._failures)} contenders failed, this one first")
            raise failure from failure.__cause__
        kept = self._states(winner)
        for index in range(len(self._contenders)):
            for state in self._states(index):
                if not any(_is_within(other, state) for other in kept):
                    _cancel(state)
        return self._results[winner]

    async def _contend(self, index: int) -> None:
        WRITTEN.set((*WRITTEN.get(), self._written[index]))
        contender = self._contenders[index]
        try:
            with UserCode("a contender of the race"):
                result = await contender
            self._results[index] = contender if isinstance(contender, State) else result
        except Exception as error:
            self._failures.append(error)
        self._changed.set()

    def _states(self, index: int) -> list[StateNode]:
        contender = self._contenders[index]
        if isinstance(contender, State):
            return [state_node(contender)]
        if isinstance(contender, Reference):
            return [find_target(contender).node.state]
        return list(self._written[index].values())


def _is_within(state: StateNode, tree: StateNode) -> bool:
    """Whether ``state`` is ``tree`` or was forked from it."""
    return state.run is tree.run and state.path[: len(tree.path)] == tree.path


def _cancel(state: StateNode) -> None:
    if state.error is not None:
        state.run.raised(state.error, state)  # it lost: its failure is not the run's
    state.cancel("another contender won its race")
