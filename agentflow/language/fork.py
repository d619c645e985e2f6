"""The branches of a fork: a list of states, a task group where wanted, and the ways to join them."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from agentflow.errors import BadArgument

if TYPE_CHECKING:
    from agentflow.language.state import State
    from agentflow.language.variable import Variable


class Branches(list["State"]):
    """The states that ``fork`` made, in order.

    ``async with s.fork(n) as branches`` makes them a task group: a branch's failure cancels its
    siblings and is raised at the parent's next await; leaving the block seals the branches and does
    not wait for them; leaving it by an exception cancels them.

    Three ways to join: ``await branches`` waits for all; ``await branches.gather("x")`` gives the
    values of ``x``, in the order of the branches; ``s.join(branches)`` appends their texts.

    >>> async with s.fork(2) as branches:
    ...     for branch, dimension in zip(branches, ["clarity", "evidence"]):
    ...         branch += af.user(f"Judge its {dimension}.")
    ...         branch += af.assistant(af.gen("judgment", max_tokens=64))
    >>> await branches
    """

    def __init__(self, parent: State, states: list[State]) -> None:
        super().__init__(states)
        self.parent = parent

    def __iadd__(self, item: object) -> NoReturn:  # type: ignore[misc]
        raise BadArgument(
            "the branches of a fork are a list of states: append to each of them, as in "
            "`for branch in branches: branch += …`"
        )

    async def __aenter__(self) -> Branches:
        self.parent.couple(list(self))
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

    def variables(self, name: str) -> list[Variable[Any]]:
        """Variable ``name`` of each branch, to be passed on unawaited. ``UnknownVariable`` where one has
        none of that name: nobody's place shifts.

        >>> s += af.user("Two judges wrote:", *branches.variables("judgment"))
        """
        if not isinstance(name, str):
            raise BadArgument(f"variables({name!r}): give the variables' name")
        return [branch[name] for branch in self]

    async def gather(self, name: str) -> list[Any]:
        """The values of variable ``name``, in the order of the branches; raises the first failure.

        >>> judgments = await branches.gather("judgment")
        """
        variables = self.variables(name)
        for branch in self:
            branch.ask()
        return [await variable for variable in variables]
