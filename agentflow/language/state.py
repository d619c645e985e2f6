"""A state: an append-only stream of operations, as a program sees it.

What a state takes: text, generations, turns, and what else goes into its stream of ops.

``async with s.user():`` a turn that stays open for a block.

The branches of a fork: a list of states, a task group where wanted, and the ways to join them.
"""

from __future__ import annotations

import inspect
import json
import math
from abc import abstractmethod
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, get_args, overload

from agentflow.errors import (
    AgentflowError,
    BadArgument,
    Cancelled,
    ForeignState,
    NotSupported,
    RunFailed,
    StateClosed,
    UnknownVariable,
)
from agentflow.language.expressions import Appendable, GenExpression, ImageExpression, Sequence_
from agentflow.language.graph import Graph
from agentflow.language.recorder import (
    Appenders,
    Backlog,
    Content,
    LineTable,
    ProgramLine,
    Recorder,
    Transcript,
    TurnContent,
    calling_line,
)
from agentflow.language.stream import EventStream
from agentflow.language.values import TEXT, ValueType
from agentflow.language.variable import Reference, Variable
from agentflow.protocol import ops
from agentflow.protocol.chat import CalledTool, Message
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.ops import Objective, ReadWhat, Role, place_of
from agentflow.protocol.sampling import is_whole
from agentflow.protocol.transform import apply_in_turn
from agentflow.runtime.limits import limit_op

if TYPE_CHECKING:
    from agentflow.language.run import Run
    from agentflow.language.session import Session
    from agentflow.language.variable import Variable


class Turn:
    """Begins a turn of ``role`` on entering and ends it on leaving. Where the block fails, the turn stays
    open: what the state holds then is not a conversation any more."""

    def __init__(self, state: Appending, role: Role) -> None:
        self._state = state
        self._role = role

    async def __aenter__(self) -> Appending:
        self._state.begin(self._role)
        return self._state

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._state.end()


ValueT = TypeVar("ValueT")

FIRST_MAPPED = 2**52
"""A variable's number beyond this stands for its ``map`` where a failure names its op."""

Path = tuple[int, ...]
"""Where a state stands in its fork tree: () is the root, (2,) its third branch, (2, 0) a branch of that."""


class Appending:
    """The part of ``State`` that puts ops into its stream, and finds the variables that they declare."""

    def __init__(self, run: Run, state_id: int, path: Path, parent: State | None) -> None:
        self.session: Session = run.session
        self.path = path
        self.transcript: Transcript = Transcript(parent.transcript if parent is not None else None)
        self._run = run
        self._id = state_id
        self._names: dict[str, Variable[Any]] = dict(parent._names) if parent is not None else {}
        self._own: list[Variable[Any]] = []
        self._closed: str | None = None
        self._is_sealed = False
        self._num_gens = 0
        self._backlog = Backlog()
        self._lines = LineTable()
        self._mapped_lines: dict[int, ProgramLine | None] = {}  # variable of a map → where
        self._appenders = Appenders()

    @property
    def id(self) -> int:
        """Its number in the session. For the session."""
        return self._id

    @property
    def run(self) -> Run:
        """The run it belongs to. For the session."""
        return self._run

    def __iadd__(self, item: Appendable) -> Self:
        return self.add(item)

    def add(self, item: Appendable) -> Self:
        """``s += item``, for where Python's rebinding gets in the way. Gives the state.

        >>> def ask(question: str) -> None:
        ...     s.add(af.user(question)).add(af.assistant(af.gen("answer", max_tokens=32)))
        >>> ask("What do plants do?")
        """
        recorder = self._recorder()
        recorder.add(item)
        self._take(recorder)
        return self

    def begin(self, role: Role) -> None:
        """Opens a turn; what is appended from now on is in it, until ``end``. ``BadArgument`` for a role
        that there is not, or inside another turn.

        >>> s.begin("user")
        >>> s += "What do plants do?"
        >>> s.end()
        """
        if role not in get_args(Role):
            raise BadArgument(f"begin({role!r}): a turn is one of {', '.join(get_args(Role))}")
        recorder = self._recorder()
        recorder.begin(role)
        self._take(recorder)

    def end(self) -> None:
        """Closes the open turn, which ``begin`` has opened.

        >>> s.begin("assistant")
        >>> s += af.gen("answer")
        >>> s.end()
        """
        recorder = self._recorder()
        recorder.end()
        self._take(recorder)

    def system(self) -> Turn:
        """A system turn around what the block appends.

        >>> async with flow.state() as s, s.system():
        ...     s += "You are a strict judge of essays."
        """
        return Turn(self, "system")

    def user(self) -> Turn:
        """A user turn around what the block appends.

        >>> async with s.user():
        ...     for line in essays:
        ...         s += f"- {line}\\n"
        """
        return Turn(self, "user")

    def assistant(self) -> Turn:
        """An assistant turn around what the block appends, in which the program may wait.

        >>> async with s.assistant():
        ...     s += "The answer is " + af.gen("answer", stop=".")
        ...     print(await s["answer"])
        Plants turn light into sugar
        """
        return Turn(self, "assistant")

    def tool(self) -> Turn:
        """A tool's turn around what the block appends.

        >>> async with s.tool():
        ...     s += weather("Oslo")
        """
        return Turn(self, "tool")

    def set(self, name: str, value: str | Reference[Any] | Sequence_) -> Variable[str]:
        """A variable with a text of the program's own; the state's text stays as it is. ``value`` may hold
        variables, which need not be there yet.

        >>> question = s.set("question", f"What follows from {s['answer']}")
        >>> await question
        'What follows from Plants turn light into sugar.'
        """
        if not isinstance(name, str) or not name:
            raise BadArgument(f"set({name!r}, …): give the variable a name")
        parts = value.parts if isinstance(value, Sequence_) else (value,)
        if not all(isinstance(part, str | Reference) for part in parts):
            raise BadArgument(f"set({name!r}, {value!r}): the value must be text, which may hold variables")
        recorder = self._recorder()
        recorder.set(name, [part for part in parts if isinstance(part, str | Reference)])
        self._take(recorder)
        return self._names[name]

    def text(self) -> Variable[str]:
        """All that the state holds here, once that is there: the template's marks included. Of a sealed
        branch too, until its run ends (``StateClosed`` where very many have been sealed since).

        >>> async with flow.state() as s:
        ...     s += af.user("Hello")
        ...     print(await s.text())
        <user>Hello</user>
        """
        return self._read("text", TEXT)

    def token_ids(self) -> Variable[list[int]]:
        """The token ids that the state holds here, as ``text``; ``NotSupported`` where the backend has none.

        >>> ids = await s.token_ids()
        >>> all(isinstance(token_id, int) for token_id in ids)
        True
        """
        return self._read("token_ids", ValueType("list of token ids", None, json.loads))

    def _read(self, what: ReadWhat, value_type: ValueType) -> Variable[Any]:
        if not (self._is_sealed and self.session.state_of(self._id) is not None):
            self._check_appendable()
        self.session.check_alive()
        recorder = Recorder(self)
        variable = recorder.read(what, value_type)
        self._take(recorder)
        return variable

    async def messages(self) -> list[dict[str, Any]]:
        """The conversation so far as chat APIs have it, ``{"role": …, "content": …}``, and as
        ``af.conversation`` takes it: what a reply calls is its turn's ``tool_calls``. Waits for what is being
        generated. Text outside turns is in none of them. ``NotSupported`` where a turn holds an image.

        >>> (await s.messages())[0]
        {'role': 'user', 'content': 'What do plants do?'}
        """
        turns = self.transcript.turns()
        if any(isinstance(part, ImageExpression) for turn in turns for part in turn.content):
            raise NotSupported("messages() gives texts, and this conversation holds an image")
        return [(await _message_of(turn)).as_dict() for turn in turns]

    def hint(
        self,
        *,
        objective: Objective | None = None,
        output_tokens: int | None = None,
        forks: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """What the program knows and the backend cannot: whether somebody waits for the next generations
        (``objective="latency"``) or only the sum of all counts (``"throughput"``), how many tokens they
        will have, how many ``forks`` come next, in how many seconds from now they should be done
        (``deadline_s``; the first deadline goes first). Changes no result.

        >>> s.hint(objective="throughput", output_tokens=64)
        """
        if objective not in (None, *get_args(Objective)):
            raise BadArgument(f"hint: objective must be latency or throughput, not {objective!r}")
        ops.check_hint(output_tokens, forks, deadline_s)
        recorder = self._recorder()
        recorder.ops.append(ops.Hint(self._id, objective, output_tokens, forks, deadline_s))
        self._take(recorder)

    def limit(self, *, deadline_s: float | None = None, output_tokens: int | None = None) -> None:
        """From now on this state and its forks may take so many seconds, and generate so many tokens
        together. What goes on after that fails with ``DeadlineExceeded`` or ``BudgetExceeded``.

        >>> s.limit(deadline_s=30, output_tokens=1000)
        """
        self._check_open()
        self.session.send([limit_op(self._id, deadline_s, output_tokens)])

    @overload
    def __getitem__(self, name: GenExpression[ValueT]) -> Variable[ValueT]: ...
    @overload
    def __getitem__(self, name: str) -> Variable[Any]: ...
    def __getitem__(self, name: Any) -> Variable[Any]:
        wanted = name.name if isinstance(name, GenExpression) else name
        found = self._names.get(wanted) if isinstance(wanted, str) else None
        if found is None:
            known = ", ".join(repr(known) for known in self._names) or "none yet"
            raise UnknownVariable(
                f"this state has no variable {wanted!r} (it has: {known}): append its gen first"
            )
        if isinstance(name, GenExpression) and found.value_type is not name.value_type:
            raise UnknownVariable(
                f"the state's variable {wanted!r} is not of this gen: append the gen first, and look its "
                "variable up before another of that name"
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @abstractmethod
    def new_variable(self, name: str, value_type: ValueType, *, is_shown: bool) -> Variable[Any]:
        """A variable of this state, not declared yet. For the recorder."""

    def seed_place(self, ordinal: int) -> str:
        """Where a gen stands: the path in the fork tree, and the gen's number here. For its seed."""
        return place_of(self.path, self._num_gens + ordinal)

    def line_of(self, number: int) -> ProgramLine | None:
        """The program's line that appended op ``number``, or mapped a variable. For its run."""
        if number > FIRST_MAPPED:
            return self._mapped_lines.get(number - FIRST_MAPPED)
        return self._lines.line_of(number)

    def _recorder(self) -> Recorder:
        self._check_appendable()
        return Recorder(self)

    def _take(self, recorder: Recorder) -> None:
        """Submits what was recorded, all of it or (where that raises) nothing."""
        recorder.flush()
        num_before = self._backlog.num_submitted
        self._submit(recorder.ops)
        self.transcript.extend(recorder.entries, recorder.open_role)
        for variable, expression, num_ops in recorder.declared:
            self._num_gens += isinstance(expression, GenExpression)
            variable.line = self._lines.line_of(num_before + num_ops)
            self._own.append(variable)
            if variable.is_shown:
                self._names[variable.name] = variable
            self._backlog.expect(variable.id, num_before + num_ops)
            self.session.expect(variable)
            self._run.touch(variable)

    def _submit(self, recorded: list[ops.Op]) -> None:
        self._backlog.check_room(len(recorded))
        self.session.send(recorded)
        self._backlog.num_submitted += len(recorded)
        self._lines.add(self._backlog.num_submitted, calling_line())

    def _check_appendable(self) -> None:
        self._check_open()
        if not self.session.is_tracing:
            self._appenders.check()

    def _check_open(self) -> None:
        self.session.check_alive()
        if self._closed is not None:
            raise StateClosed(f"state {self.path} {self._closed}: nothing can be appended to it")


async def _message_of(turn: TurnContent) -> Message:
    begin, content = turn.begin, "".join([await _text_of(part) for part in turn.content])
    calls = [call for calls in turn.calls for call in await _called(calls.source)]
    return Message(
        begin.role, content, tool_calls=tuple(calls), tool_call_id=begin.tool_call_id, name=begin.name
    )


async def _called(source: tuple[CalledTool, ...] | Variable[Any]) -> tuple[CalledTool, ...]:
    if isinstance(source, tuple):
        return source
    await source.settled()
    source.raise_failure()
    return source.tool_calls


async def _text_of(part: Content) -> str:
    assert not isinstance(part, ImageExpression)
    if isinstance(part, str):
        return part
    return await apply_in_turn(await part.source.whole_text(), part.transforms)


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
