"""A state: an append-only stream of operations, as a program sees it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import anyio

from agentflow import ops
from agentflow.errors import BacklogFull, BadArgument, Cancelled, StateClosed, UnknownVariable
from agentflow.events import ErrorInfo
from agentflow.expression import Appendable
from agentflow.fork import Branches
from agentflow.recorder import Recorder
from agentflow.sampling import derived_seed
from agentflow.stream import EventStream
from agentflow.variable import Variable

if TYPE_CHECKING:
    from agentflow.run import Run
    from agentflow.session import Session

MAX_BACKLOG = 10_000

Path = tuple[int, ...]
"""Where a state stands in its fork tree: () is the root, (2,) its third branch, (2, 0) a branch of that."""


class State:
    """Made by a session (the root, handed to a program) or by ``fork``.

    ``s += x`` appends text, a variable, ``gen``, ``select`` or a role and never waits. ``s["x"]`` is
    the latest variable of that name. ``await s`` waits until all that was appended is done.
    ``async for event in s`` gives the text of its variables as it comes.
    """

    def __init__(self, run: Run, state_id: int, path: Path, names: dict[str, Variable]) -> None:
        self.session: Session = run.session
        self.path = path
        self._run = run
        self._id = state_id
        self._names = names
        self._own: list[Variable] = []
        self._children: list[State] = []
        self._error: ErrorInfo | None = None
        self._closed: str | None = None
        self._num_submitted = 0
        self._num_settled = 0
        self._marks: dict[int, int] = {}  # variable id or -ticket → ops submitted up to it
        self._ticket = 0
        self._changed = anyio.Event()

    def __repr__(self) -> str:
        return f"<State {self.path} with {', '.join(map(repr, self._names)) or 'no variables'}>"

    def __iadd__(self, item: Appendable) -> State:
        return self.add(item)

    def add(self, item: Appendable) -> State:
        """``s += item``, for where Python's rebinding gets in the way."""
        self._check_open()
        recorder = Recorder(self)
        recorder.add(item, in_role=False)
        recorder.flush()
        num_before = self._num_submitted
        self._submit(recorder.ops)
        for variable, num_ops in recorder.declared:
            self._declare(variable, num_before + num_ops)
        return self

    def __getitem__(self, name: str) -> Variable:
        if name not in self._names:
            known = ", ".join(repr(known) for known in self._names) or "none yet"
            raise UnknownVariable(
                f"this state has no variable {name!r} (it has: {known}): append its gen first"
            )
        return self._names[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def fork(self, count: int) -> Branches:
        """``count`` states that go on from here independently and share the prefix. As ``async
        with s.fork(3) as branches`` they are a task group: see ``Branches``."""
        self._check_open()
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise BadArgument(f"fork({count!r}): say how many branches, 1 or more")
        ids = [self.session.next_id() for _ in range(count)]
        self._submit([ops.Fork(self._id, tuple(ids))])
        first = len(self._children)
        children = [
            self._run.adopt(State(self._run, state_id, (*self.path, first + i), dict(self._names)))
            for i, state_id in enumerate(ids)
        ]
        self._children += children
        return Branches(self, children)

    def cancel(self) -> None:
        """Aborts what this state and its forks still run; their unfinished variables raise
        ``Cancelled``. May be repeated."""
        if self.session.is_open(self):
            self.session.submit([ops.Cancel(self._id)], quiet=True)
        self._cancel_here(ErrorInfo.of(Cancelled("its state was cancelled")))

    def _cancel_here(self, error: ErrorInfo) -> None:
        doomed = [self]
        while doomed:  # a chain of forks may be deeper than Python's stack
            state = doomed.pop()
            doomed += state._children
            state._closed = state._closed or "was cancelled"
            for variable in state._own:
                if not variable.is_done:
                    self.session.settle(variable, error)
            state.fail(error)

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        await self.settled()
        if self._error is not None:
            raise self._run.told(self._error)

    def ask(self) -> None:
        """Tells the backend that somebody waits for what was appended so far. For ``settled``."""
        if self._is_settled or self._marks.get(-self._ticket) == self._num_submitted:
            return
        self._ticket += 1
        self._marks[-self._ticket] = self._num_submitted
        self.session.submit([ops.Await(self._id, self._ticket)])

    async def settled(self) -> None:
        """Waits until all that was appended is done or the state has failed; raises neither."""
        self.ask()
        num_awaited = self._num_submitted
        while self._num_settled < num_awaited and self._error is None:
            await self._changed.wait()

    @property
    def _is_settled(self) -> bool:
        return self._num_settled >= self._num_submitted or self._error is not None

    def __aiter__(self) -> EventStream:
        return self._run.watch_state(self)

    @property
    def id(self) -> int:
        """Its number in the session."""
        return self._id

    @property
    def run(self) -> Run:
        """The run it belongs to."""
        return self._run

    @property
    def variables(self) -> list[Variable]:
        """Its own variables, in the order in which they were declared (not those of its parent)."""
        return list(self._own)

    @property
    def error(self) -> ErrorInfo | None:
        """What this state failed with, if it did. For the session."""
        return self._error

    def reach(self, ticket: int) -> None:
        """The backend has got to this ticket. For the session."""
        self._settle(-ticket)

    def end_variable(self, var_id: int) -> None:
        """The backend is done with this variable. For the session."""
        self._settle(var_id)

    def fail(self, error: ErrorInfo) -> None:
        """Nothing more will be done here, unless it has failed before. For the session."""
        self._error = self._error or error
        self._wake()

    def seal(self, why: str = "was sealed when its fork's block was left") -> None:
        """Nothing more may be appended; variables stay readable."""
        if self._closed is None:
            self._closed = why
            self.session.submit([ops.Seal(self._id)], quiet=True)

    def couple(self, children: list[State]) -> None:
        """Makes forked states a task group. For ``Branches``."""
        self.session.check_alive()
        if not self.session.is_open(self):
            raise StateClosed(f"state {self.path} {self._closed}: its branches cannot become a task group")
        self.session.submit([ops.TaskGroup(self._id, tuple(child._id for child in children))])

    def close(self) -> None:
        """The state is not needed any more. For its run."""
        self._closed = self._closed or "has ended with its run"
        self.session.forget(self)
        if not self._is_settled:  # nobody will hear of the rest
            self.fail(ErrorInfo.of(StateClosed(f"state {self.path} {self._closed}")))

    def new_variable(self, name: str) -> Variable:
        """A variable of this state, not declared yet. For the recorder."""
        return Variable(self.session.next_id(), name, self)

    def derived_seed(self, ordinal: int) -> int:
        """The seed of a gen that names none, the ``ordinal``-th of what is being appended."""
        return derived_seed(self.session.seed, self._run.index, self.path, len(self._own) + ordinal)

    def _declare(self, variable: Variable, num_ops: int) -> None:
        self._own.append(variable)
        self._names[variable.name] = variable
        self._marks[variable.id] = num_ops
        self.session.expect(variable)
        self._run.touch(variable)

    def _submit(self, recorded: list[ops.Op]) -> None:
        if self._num_submitted + len(recorded) - self._num_settled > MAX_BACKLOG:
            raise BacklogFull(f"{MAX_BACKLOG} ops wait on this state: await something before appending more")
        self.session.submit(recorded)
        self._num_submitted += len(recorded)

    def _settle(self, key: int) -> None:
        self._num_settled = max(self._num_settled, self._marks.pop(key, 0))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _check_open(self) -> None:
        self.session.check_alive()
        if self._closed is not None:
            raise StateClosed(f"state {self.path} {self._closed}: nothing can be appended to it")
