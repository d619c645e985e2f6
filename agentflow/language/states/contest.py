"""The first, the best, or the most frequent value of a fork's branches; the other branches are cancelled. A
branch that was chosen stays open when the block of its fork is left.

``Contest`` reads one variable of each branch, in the order in which the backend completes them. ``Poll``
counts votes until no further vote can change the winner.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

from agentflow.errors import AgentflowError, BadArgument, Cancelled
from agentflow.language.failures.user_code import UserCode
from agentflow.language.states.event_stream import EventStream, StreamedVariable
from agentflow.language.states.run import Run, StateNode, VariableNode
from agentflow.protocol.sampling import is_whole

Key = Callable[[Any], Any]
RankBranch = Callable[[int, Any], Any]
"""The rank of a branch, from its number and its value."""


class Contest:
    """``entries``: each branch with its variable, and how to wait for the variable's value. ``is_group``: the
    branches are a task group, so that the failure of one is a failure of all."""

    def __init__(
        self,
        run: Run,
        entries: Sequence[tuple[StateNode, VariableNode, Awaitable[Any]]],
        *,
        is_group: bool,
    ) -> None:
        run.link.check_alive()
        run.link.needs_values("which branch is chosen")
        self._entries = list(entries)
        self._is_group = is_group
        self._waiting = set(range(len(entries)))
        self._ends = _Ends(run, [node for _, node, _ in entries])
        self._failure: AgentflowError | None = None

    async def first(self) -> int:
        """The branch whose value is complete first. Cancels the others. Raises if none has a value."""
        while self._waiting:
            index, value = await self._next()
            if value is not _NO_VALUE:
                self._choose([index], "first")
                return index
        raise self._no_value()

    async def ended(self) -> int | None:
        """The next branch whose variable has ended, with or without a value. None after the last."""
        return (await self._next())[0] if self._waiting else None

    async def best(self, rank: RankBranch, count: int) -> list[int]:
        """The ``count`` branches with the greatest ranks, the greatest first; of equal ranks the first
        branches. Fewer if fewer have a value. Cancels the others. Raises if none has a value."""
        if not is_whole(count, 1, math.inf):
            raise BadArgument(f"best: n={count!r}: say how many branches, 1 or more", param="n")
        values: dict[int, Any] = {}
        while self._waiting:
            index, value = await self._next()
            if value is not _NO_VALUE:
                values[index] = value
        if not values:
            raise self._no_value()
        with UserCode("best: the key"):
            ranks = {index: _plain(rank(index, values[index]), "best") for index in sorted(values)}
            ranked = sorted(ranks, key=ranks.__getitem__, reverse=True)
        self._choose(ranked[:count], "best")
        return ranked[:count]

    async def vote(self, key: Key | None, enough: int | None) -> Any:
        """The answer with the most votes, as soon as it is certain. Cancels the branches that have not voted
        by then. None if all abstain; raises if none has a value."""
        if enough is not None and not is_whole(enough, 1, math.inf):
            raise BadArgument(f"vote: n={enough!r}: say how many votes are enough, 1 or more", param="n")
        poll = Poll(len(self._entries), enough)
        num_values = 0
        while not poll.is_decided:
            _, value = await self._next()
            num_values += value is not _NO_VALUE
            with UserCode("vote: the key"):
                poll.add(None if value is _NO_VALUE else value if key is None else _plain(key(value), "vote"))
        if not num_values:
            raise self._no_value()
        for index in self._waiting:
            self._entries[index][0].cancel("vote() was decided without it")
        return poll.winner

    async def _next(self) -> tuple[int, Any]:
        """The next branch to end, in the order in which the backend ended them, with its value."""
        while True:
            ended = [index for index in self._waiting if self._entries[index][1].is_done]
            if ended:
                break
            await self._ends.change()
        index = min(ended, key=lambda index: (self._entries[index][1].end_number, index))
        self._waiting.discard(index)
        try:
            return index, await self._entries[index][2]
        except AgentflowError as error:
            self._note_failure(self._entries[index][1], error)
            return index, _NO_VALUE

    def _note_failure(self, node: VariableNode, error: AgentflowError) -> None:
        if node.error is not None and self._is_group and node.error.origin.code != Cancelled.code:
            raise error from error.__cause__
        if self._failure is None or isinstance(self._failure, Cancelled):
            self._failure = error

    def _no_value(self) -> AgentflowError:
        return self._failure or BadArgument("there are no branches to choose from")

    def _choose(self, winners: Collection[int], method: str) -> None:
        paths = ", ".join([str(self._entries[index][0].path) for index in winners])
        reason = f"{method}() chose {'state' if len(winners) == 1 else 'the states'} {paths}"
        for index, (state, _, _) in enumerate(self._entries):
            if index in winners:
                state.is_chosen = True
            else:
                if state.error is not None and not self._is_group:
                    state.run.raised(state.error, state)  # it lost: its failure is not the run's
                state.cancel(reason)


_NO_VALUE: Final = object()


def _plain(result: Any, where: str) -> Any:
    """The result of a key. ``BadArgument`` if it is async: each coroutine would be an answer for itself."""
    if inspect.iscoroutine(result):
        result.close()
        raise BadArgument(f"{where}: the key must be a plain function, not an async one", param="key")
    return result


class _Ends(EventStream):
    """Waits until any of several variables of one run has ended."""

    def __init__(self, run: Run, variables: Sequence[VariableNode]) -> None:
        super().__init__(lambda: False)
        self._awaited = {variable.id for variable in variables}
        run.follow(self, ())

    def touch(self, variable: StreamedVariable) -> None:
        if variable.is_done and variable.id in self._awaited:
            self.wake()


class Poll:
    """Counts ``num_voters`` votes. ``enough``: an answer with this many votes wins immediately. The winner
    has the most votes; among equals, the answer that reached them first.

    >>> poll = Poll(3)
    >>> poll.add("yes")
    >>> poll.add("yes")
    >>> poll.is_decided, poll.winner
    (True, 'yes')
    """

    def __init__(self, num_voters: int, enough: int | None = None) -> None:
        self._num_left = num_voters
        self._enough = enough
        self._answers: list[Any] = []  # equal answers need not be hashable
        self._counts: list[int] = []
        self._leader: int | None = None

    def add(self, answer: Any) -> None:
        """The next vote; None abstains."""
        self._num_left -= 1
        if answer is None:
            return
        if answer not in self._answers:
            self._answers.append(answer)
            self._counts.append(0)
        index = self._answers.index(answer)
        self._counts[index] += 1
        if self._leader is None or self._counts[index] > self._counts[self._leader]:
            self._leader = index

    @property
    def winner(self) -> Any:
        """The answer that leads; None if no vote was cast."""
        return None if self._leader is None else self._answers[self._leader]

    @property
    def is_decided(self) -> bool:
        """Whether no further vote can change the winner."""
        if self._leader is None:
            return self._num_left <= 0
        most = self._counts[self._leader]
        if self._enough is not None and most >= self._enough:
            return True
        others = [count for index, count in enumerate(self._counts) if index != self._leader]
        return max(others, default=0) + self._num_left <= most
