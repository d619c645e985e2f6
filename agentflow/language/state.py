"""A state: an append-only stream of operations, as a program sees it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from agentflow.errors import AgentflowError, BadArgument, Cancelled, ForeignState, RunFailed, StateClosed
from agentflow.language.appending import FIRST_MAPPED, Appending, Path
from agentflow.language.expressions import Appendable, ImageExpression, Sequence_
from agentflow.language.fork import Branches
from agentflow.language.graph import Graph
from agentflow.language.program_line import calling_line
from agentflow.language.reference import Reference
from agentflow.language.stream import EventStream
from agentflow.language.values import ValueType
from agentflow.language.variable import Variable
from agentflow.protocol import ops
from agentflow.protocol.amounts import is_whole
from agentflow.protocol.events import ErrorInfo

if TYPE_CHECKING:
    from agentflow.language.run import Run


class State(Appending):
    """Made by a session (the root, handed to a program) or by ``fork``.

    ``s += x`` appends text, a variable, ``gen``, ``select`` or a role and never waits. ``s["x"]`` is
    the latest variable of that name. ``await s`` waits until all that was appended is done.
    ``async for event in s`` gives the text of its variables as it comes.

    >>> s += af.user("Is it about science?")
    >>> s += af.assistant(af.select("related", ["yes", "no"]))
    >>> await s["related"]
    'yes'
    """

    def __init__(self, run: Run, state_id: int, path: Path, parent: State | None = None) -> None:
        super().__init__(run, state_id, path, parent)
        self._children: list[State] = []
        self._parent = parent
        self._forked_after = parent._backlog.num_submitted if parent is not None else 0
        self._error: ErrorInfo | None = None

    def __repr__(self) -> str:
        return f"<State {self.path} with {', '.join(map(repr, self._names)) or 'no variables'}>"

    def fork(self, count: int) -> Branches:
        """``count`` states that go on from here independently and share the prefix. As ``async
        with s.fork(3) as branches`` they are a task group: see ``Branches``. ``BadArgument`` for a count
        below 1.

        >>> for branch, dimension in zip(s.fork(2), ["clarity", "evidence"]):
        ...     branch += af.user(f"Judge its {dimension}.")
        ...     branch += af.assistant(af.gen("judgment", max_tokens=64))
        """
        self._check_appendable()
        if not is_whole(count, 1, math.inf):
            raise BadArgument(f"fork({count!r}): say how many branches, 1 or more")
        ids = [self.session.next_id() for _ in range(count)]
        self._submit([ops.Fork(self._id, tuple(ids))])
        first = len(self._children)
        children = [
            self._run.adopt(State(self._run, state_id, (*self.path, first + i), self))
            for i, state_id in enumerate(ids)
        ]
        self._children += children
        return Branches(self, children)

    def copy(self) -> State:
        """A state that goes on from here by itself: a fork of one.

        >>> draft = s.copy()
        >>> draft += af.user("Try again.") + af.assistant(af.gen("answer", temperature=0.8))
        """
        return self.fork(1)[0]

    def join(self, branches: Branches, *, separator: str = "") -> State:
        """Appends what each branch of a fork of this state appended, in the order of the branches, with
        ``separator`` between them; turns lose their marks. Waits for nothing: what is still generated is
        passed on when it is there. A branch that failed or was cancelled fails this state, with its cause.

        >>> async with s.fork(3) as branches:
        ...     for branch in branches:
        ...         branch += af.gen("paragraph")
        >>> s.join(branches, separator="\\n")
        """
        if not isinstance(branches, Branches) or branches.parent is not self:
            raise ForeignState("join: these are no branches of this state: give what its fork returned")
        if not isinstance(separator, str):
            raise BadArgument(f"join: the separator must be a string, not {separator!r}")
        self._check_appendable()
        contents = [branch.transcript.own_content() for branch in branches]
        # Before the ends of the branches are asked for. Each image ends a run of text.
        num_images = sum(isinstance(part, ImageExpression) for content in contents for part in content)
        self._backlog.check_room(1 + 2 * num_images)
        parts: list[Appendable] = []
        for branch, content in zip(branches, contents, strict=True):
            parts += [separator, *content, branch.ending()]
        return self.add(Sequence_(tuple(parts[1:])))

    def ending(self) -> Variable[str]:
        """An empty text that is there when all that was appended here is done. For ``join``."""
        name = f"the end of branch {self.path}"
        variable = Variable[str](self.session.next_id(), name, self, is_shown=False)
        self._own.append(variable)
        self.session.expect(variable)
        # Not a part of the stream as the program sees it, so that a sealed state may have one.
        self.session.send([ops.Set(self._id, variable.id, name, ())])
        return variable

    def mapped(self, reference: Reference[Any], function: Callable[[Any], str]) -> Variable[str]:
        """What ``function`` makes of the value of ``reference``, a variable of this state. For ``map``."""
        self.session.check_alive()
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise BadArgument(f"map: give a function (not an async one) of the value, not {function!r}")
        if not self.session.is_open(self):
            raise StateClosed(f"the state of {reference.shown_name} has ended: map it before its run ends")
        self.session.needs_values(f"{reference.shown_name} is mapped by a Python function")
        variable = self.argument(f"{reference.source.name}.map")
        self._mapped_lines[variable.id] = calling_line()
        self._run.touch(variable)
        self.session.start_soon(self._provide, variable, reference, function)
        return variable

    def argument(self, name: str) -> Variable[str]:
        """A variable whose value this side provides. For ``map`` and traces."""
        variable = Variable[str](self.session.next_id(), name, self, is_shown=False)
        self.session.send([ops.Expect(self._id, variable.id, name)])
        self._own.append(variable)
        self.session.expect(variable)
        return variable

    def await_graph(self) -> None:
        """This is the root of a graph that was sent: it is done when all of that is. For ``GraphRun``."""
        self._backlog.num_submitted += 1
        self._backlog.next_ticket()

    def branch_of_graph(self, state_id: int, number: int) -> State:
        """A branch of this state of a graph, which only its backend runs. For ``GraphRun``."""
        branch = State(self._run, state_id, (*self.path, number), self)
        self._children.append(branch)
        return branch

    def output(self, var_id: int, graph: Graph, number: int) -> Variable[Any]:
        """The variable that receives output ``number`` of a graph, in this state of it. For ``GraphRun``."""
        variable = Variable[Any](var_id, graph.names[number], self, graph.type_of(number))
        self._own.append(variable)
        self.session.expect(variable)
        return variable

    async def _provide(
        self, variable: Variable[str], reference: Reference[Any], function: Callable[[Any], str]
    ) -> None:
        """Gives an expected variable its value, or the reason why it has none."""
        source = reference.source
        await source.settled()
        if source.error is not None:  # not awaited below: that would tell the program of it
            self.session.send([ops.Provide(variable.id, error=source.error)], quiet=True)
            return
        try:
            value = function(await reference)
            if not isinstance(value, str):
                raise BadArgument(f"map: the function must return a string, not {value!r}")
            self.session.markers.refuse([value], "map: what the function returns")
            self.session.send([ops.Provide(variable.id, value)], quiet=True)
        except Exception as error:
            failure = error if isinstance(error, AgentflowError) else RunFailed(f"map failed: {error!r}")
            failure.__cause__ = None if failure is error else error
            # With a place of its own, so that two failures of equal words stay two.
            info = ErrorInfo.of(failure).at(self._id, FIRST_MAPPED + variable.id)
            self.session.send([ops.Provide(variable.id, error=info)], quiet=True)

    def cancel(self) -> None:
        """Aborts what this state and its forks still run; their unfinished variables raise
        ``Cancelled``. May be repeated.

        >>> branches[1].cancel()
        """
        if self.session.is_open(self):
            self.session.send([ops.Cancel(self._id)], quiet=True)
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
        ticket = self._backlog.next_ticket() if self._error is None else None
        if ticket is not None:
            self.session.send([ops.Await(self._id, ticket)])

    async def settled(self) -> None:
        """Waits until all that was appended is done or the state has failed; raises nothing (``await s``
        raises what failed).

        >>> await s.settled()
        """
        if self.session.is_tracing:
            return
        self.ask()
        num_awaited = self._backlog.num_submitted
        while not self._backlog.is_done(num_awaited) and self._error is None:
            await self._backlog.change()

    def __aiter__(self) -> EventStream:
        self.session.needs_values("the events of a state are read")
        return self._run.watch_state(self)

    def new_variable(self, name: str, value_type: ValueType, *, is_shown: bool) -> Variable[Any]:
        return Variable(self.session.next_id(), name, self, value_type, is_shown=is_shown)

    @property
    def variables(self) -> list[Variable[Any]]:
        """Its own variables, in the order in which they were declared (not those of its parent).

        >>> [variable.name for variable in s.variables]
        ['answer']
        """
        return [variable for variable in self._own if variable.is_shown]

    @property
    def error(self) -> ErrorInfo | None:
        """What this state failed with, if it did. For the session."""
        return self._error

    def reach(self, ticket: int) -> None:
        """The backend has got to this ticket. For the session."""
        self._backlog.reach(ticket)
        self._has_begun()

    def end_variable(self, var_id: int) -> None:
        """The backend is done with this variable. For the session."""
        self._backlog.end_variable(var_id)
        self._has_begun()

    def _has_begun(self) -> None:
        """Something was done here, so the fork was: nobody has to ask about it."""
        state, parent = self, self._parent
        while parent is not None and not parent._backlog.is_done(state._forked_after):
            parent._backlog.settle(state._forked_after)
            state, parent = parent, parent._parent

    def fail(self, error: ErrorInfo) -> None:
        """Nothing more will be done here, unless it has failed before. For the session."""
        self._error = self._error or error
        self._backlog.wake()

    def seal(self, why: str = "was sealed when its fork's block was left") -> None:
        """Nothing more may be appended; variables stay readable, and so does what the state holds (``text``,
        ``token_ids``).

        >>> branches[0].seal()
        >>> judgment = await branches[0]["judgment"]
        """
        if self._closed is None:
            self._closed = why
            self._is_sealed = True
            self.session.send([ops.Seal(self._id)], quiet=True)

    def couple(self, children: list[State]) -> None:
        """Makes forked states a task group. For ``Branches``."""
        self.session.check_alive()
        if not self.session.is_open(self):
            raise StateClosed(f"state {self.path} {self._closed}: its branches cannot become a task group")
        self.session.send([ops.TaskGroup(self._id, tuple(child._id for child in children))])

    def close(self) -> None:
        """The state is not needed any more. For its run."""
        self._closed = self._closed or "has ended with its run"
        self.session.forget(self)
        if self._error is None and not self._backlog.is_settled:  # nobody will hear of the rest
            self.fail(ErrorInfo.of(StateClosed(f"state {self.path} {self._closed}")))
