"""The branches of a fork: a list of states, and a task group where wanted."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentflow.state import State


class Branches(list["State"]):
    """The states that ``fork`` made, in order.

    ``async with s.fork(n) as branches`` makes them a task group: a branch's failure cancels its
    siblings and is raised at the parent's next await; leaving the block seals the branches and does
    not wait for them; leaving it by an exception cancels them. ``await branches`` waits for all.
    """

    def __init__(self, parent: State, states: list[State]) -> None:
        super().__init__(states)
        self._parent = parent

    async def __aenter__(self) -> Branches:
        self._parent.couple(list(self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for branch in self:
            if error is not None:
                branch.cancel()
            else:
                branch.seal()

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        for branch in self:
            branch.ask()
        for branch in self:
            await branch
