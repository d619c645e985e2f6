"""How many of a state's ops have been submitted, and how many of these are done.

Two things say that ops are done: the end of a variable that was declared among them, and a ticket that
the backend has reached.
"""

from __future__ import annotations

import anyio

from agentflow.errors import BacklogFull

MAX_BACKLOG = 10_000


class Backlog:
    """Of one state. A *mark* is a variable's id, or a ticket with its sign turned."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.ticket = 0  # the last one asked for
        self._num_settled = 0
        self._marks: dict[int, int] = {}  # mark → ops submitted up to it
        self._changed = anyio.Event()

    @property
    def is_settled(self) -> bool:
        """Whether all that was submitted is done."""
        return self._num_settled >= self.num_submitted

    def check_room(self, num_ops: int) -> None:
        """``BacklogFull`` where so many more would be too many."""
        if self.num_submitted + num_ops - self._num_settled > MAX_BACKLOG:
            raise BacklogFull(f"{MAX_BACKLOG} ops wait on this state: await something before appending more")

    def expect(self, var_id: int, num_ops: int) -> None:
        """When this variable ends, the first ``num_ops`` ops are done."""
        self._marks[var_id] = num_ops

    def next_ticket(self) -> int | None:
        """A ticket that is reached when all that was submitted is done; None where one is asked already,
        or all is done."""
        if self.is_settled or self._marks.get(-self.ticket) == self.num_submitted:
            return None
        self.ticket += 1
        self._marks[-self.ticket] = self.num_submitted
        return self.ticket

    def end_variable(self, var_id: int) -> None:
        """The variable has ended."""
        self.settle(self._marks.pop(var_id, 0))

    def reach(self, ticket: int) -> None:
        """The ticket was reached."""
        self.settle(self._marks.pop(-ticket, 0))

    def settle(self, num_ops: int) -> None:
        """The first ``num_ops`` ops are done."""
        self._num_settled = max(self._num_settled, num_ops)
        self.wake()

    def wake(self) -> None:
        """Whoever waits for a change looks again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        """Waits until something changes."""
        await self._changed.wait()

    def is_done(self, num_ops: int) -> bool:
        """Whether the first ``num_ops`` are done."""
        return self._num_settled >= num_ops
