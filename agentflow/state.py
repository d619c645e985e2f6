"""A state: an append-only stream of operations, as a program sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import TYPE_CHECKING

import anyio
import msgspec

from agentflow import ops
from agentflow.errors import BacklogFull, BadArgument, Cancelled, ForeignState, StateClosed, UnknownVariable
from agentflow.events import ErrorInfo
from agentflow.expression import Appendable, GenExpression, RoleExpression, SelectExpression, Sequence_
from agentflow.fork import Branches
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
        self._reached = 0
        self._changed = anyio.Event()

    def __repr__(self) -> str:
        return f"<State {self.path} with {', '.join(map(repr, self._names)) or 'no variables'}>"

    def __iadd__(self, item: Appendable) -> State:
        return self.add(item)

    def add(self, item: Appendable) -> State:
        """``s += item``, for where Python's rebinding gets in the way."""
        self._check_open()
        recorder = _Recorder(self)
        recorder.add(item, in_role=False)
        recorder.flush()
        self._submit(recorder.ops)
        for variable in recorder.declared:
            self._declare(variable)
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
            raise BadArgument(f"fork({count!r}): a fork needs at least one branch")
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
        for child in self._children:
            child._cancel_here(error)
        self._closed = self._closed or "was cancelled"
        for variable in self._own:
            if not variable.is_done:
                self.session.settle(variable, error)
        self._fail(error)

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()

    async def _wait(self) -> None:
        if self._num_settled < self._num_submitted and self._error is None:
            self._ticket += 1
            ticket = self._ticket
            self.session.check_alive()
            self._submit([ops.Await(self._id, ticket)])
            self._marks[-ticket] = self._num_submitted
            while self._reached < ticket and self._error is None:
                await self._changed.wait()
        if self._error is not None:
            raise self._error.to_exception()

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
        self._reached = max(self._reached, ticket)
        self._settle(-ticket)
        self._wake()

    def end_variable(self, var_id: int) -> None:
        """The backend is done with this variable. For the session."""
        self._settle(var_id)

    def fail(self, error: ErrorInfo) -> None:
        """The backend ended this state. For the session."""
        self._fail(error)

    def seal(self, why: str = "was sealed when its fork's block was left") -> None:
        """Nothing more may be appended; variables stay readable."""
        if self._closed is None:
            self._closed = why
            self.session.submit([ops.Seal(self._id)], quiet=True)

    def couple(self, children: list[State]) -> None:
        """Makes forked states a task group. For ``Branches``."""
        self.session.submit([ops.TaskGroup(self._id, tuple(child._id for child in children))])

    def close(self) -> None:
        """The state is not needed any more. For its run."""
        self._closed = self._closed or "has ended with its run"
        self.session.forget(self)

    def new_variable(self, name: str) -> Variable:
        """A variable of this state, not declared yet. For the recorder."""
        return Variable(self.session.next_id(), name, self)

    def derived_seed(self, ordinal: int) -> int:
        """The seed of a gen that names none: it follows from the session's seed, the run, the path
        in the fork tree and the gen's place in the state, so that a replay draws the same."""
        place = f"{self.session.seed}/{self._run.index}/{self.path}/{len(self._own) + ordinal}"
        return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big") >> 1

    def _declare(self, variable: Variable) -> None:
        self._own.append(variable)
        self._names[variable.name] = variable
        self._marks[variable.id] = self._num_submitted
        self.session.expect(variable)
        self._run.touch(variable)

    def _submit(self, recorded: list[ops.Op]) -> None:
        if self._num_submitted + len(recorded) - self._num_settled > MAX_BACKLOG:
            raise BacklogFull(f"{MAX_BACKLOG} ops wait on this state: await something before appending more")
        self.session.submit(recorded)
        self._num_submitted += len(recorded)

    def _settle(self, key: int) -> None:
        self._num_settled = max(self._num_settled, self._marks.pop(key, 0))

    def _fail(self, error: ErrorInfo) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _check_open(self) -> None:
        self.session.check_alive()
        if self._closed is not None:
            raise StateClosed(f"state {self.path} {self._closed}: nothing can be appended to it")


class _Recorder:
    """Turns expressions into ops; touches nothing until the state submits them."""

    def __init__(self, state: State) -> None:
        self.ops: list[ops.Op] = []
        self.declared: list[Variable] = []
        self._state = state
        self._text: list[str | ops.Ref] = []

    def add(self, item: Appendable, *, in_role: bool) -> None:
        """Records one item."""
        state_id = self._state.id
        match item:
            case str():
                self._text += self._state.session.markers.split(item)
            case Variable():
                self._text.append(self._reference(item))
            case Sequence_():
                for part in item.parts:
                    self.add(part, in_role=in_role)
            case GenExpression():
                params = item.params
                if params.seed is None:
                    params = msgspec.structs.replace(
                        params, seed=self._state.derived_seed(len(self.declared))
                    )
                self._put(ops.Gen(state_id, self._new(item.name), item.name, params))
            case SelectExpression():
                self._put(ops.Select(state_id, self._new(item.name), item.name, item.choices, item.method))
            case RoleExpression():
                if in_role:
                    raise BadArgument(f"a {item.role} turn cannot stand inside another turn")
                self._put(ops.Begin(state_id, item.role))
                for part in item.parts:
                    self.add(part, in_role=True)
                self._put(ops.End(state_id))
            case _:
                raise BadArgument(
                    f"cannot append {type(item).__name__} {item!r}: "
                    "append a string, a variable, gen, select or a role"
                )

    def flush(self) -> None:
        """Ends the run of text."""
        if self._text:
            parts, self._text = tuple(self._text), []
            self.ops.append(ops.Text(self._state.id, parts))

    def _put(self, op: ops.Op) -> None:
        self.flush()
        self.ops.append(op)

    def _new(self, name: str) -> int:
        variable = self._state.new_variable(name)
        self.declared.append(variable)
        return variable.id

    def _reference(self, variable: Variable) -> str | ops.Ref:
        if variable.state.session is not self._state.session:
            raise ForeignState(
                f"variable {variable.name!r} belongs to another session: await it and append its value"
            )
        if self._state.session.is_open(variable.state):
            return ops.Ref(variable.id)
        if variable.is_done:
            return variable.text
        raise StateClosed(f"the state of variable {variable.name!r} has ended: await it before its run ends")
