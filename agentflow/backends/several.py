"""Several backends as the models of one session.

Each backend has a separate interpreter. ``SeveralConnection`` sends each op to the backend of its state,
under the numbers of the session. Three things cross backends:

- A variable that a state of another backend refers to. There the state gets an *import*, a variable that the
  client provides: the session sends its text in parts while it grows. Imports have negative numbers.
- A fork onto another model. The branches are roots in their backend, which first wait for an import of the
  parent's progress, so that they begin and fail as branches do.
- Cancellations, limits and task groups of such forks, which no backend sees as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio
import msgspec

from agentflow.errors import AgentflowError, BadArgument, Cancelled, NotSupported, RunFailed
from agentflow.language.uploads import parts_of_upload
from agentflow.protocol import ops
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.batches import BatchNotes, batched
from agentflow.protocol.chat import ReplySoFar, read_reply
from agentflow.protocol.events import (
    Capabilities,
    Delta,
    ErrorInfo,
    Event,
    GraphReply,
    StateFailed,
    Stats,
    StatsReply,
    Value,
    VarFailed,
    Watched,
    spent,
    summed,
)
from agentflow.protocol.growing_text import GrowingText
from agentflow.protocol.images import known_file
from agentflow.protocol.op_table import declared, expanded

T = TypeVar("T")


class Several:
    """Several backends, the backend of ``af.session(models={...})``.

    Args:
        backends: The backends by the names that programs use for their models; the first is the default.

    >>> small, large = af.Scripted("A draft."), af.Scripted("A verdict.")
    >>> async with af.session(models={"small": small, "large": large}) as flow, flow.state() as s:
    ...     s += af.user("Write.") + af.gen("draft")
    ...     judge = s.copy(model="large")
    ...     judge += af.user("Judge it.") + af.gen("verdict")
    ...     print(await judge["verdict"])
    A verdict.
    """

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        if not backends:
            raise BadArgument("session: models must name at least one model", param="models")
        self._backends = dict(backends)

    def with_costs(self, costs: Any) -> Several:
        """The backends, with one cap for all that are behind a paid API."""
        found: dict[str, Any] = dict(self._backends)
        for name, backend in found.items():
            if hasattr(backend, "with_costs"):
                found[name] = backend.with_costs(costs)
        return Several(found)

    def batches(self, notes: BatchNotes) -> Backend:
        """The default backend for one map in batches. ``NotSupported`` if it has none."""
        name, backend = next(iter(self._backends.items()))
        return batched(backend, notes, name)

    @property
    def is_paid(self) -> bool:
        """Whether a backend is behind an API."""
        return any(hasattr(backend, "with_costs") for backend in self._backends.values())

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Opens all backends. For the session."""
        connection = SeveralConnection(deliver, lost)
        async with AsyncExitStack() as stack:
            for name, backend in self._backends.items():
                opened = _OpenBackend(name)
                connecting = backend.connect(
                    partial(connection.receive, opened), partial(connection.lose, opened)
                )
                opened.connection = await stack.enter_async_context(connecting)
                connection.add(opened)
            yield connection


@dataclass(eq=False)
class _OpenBackend:
    """An open backend. ``error``: why it has ended."""

    name: str
    connection: Connection = field(init=False)
    error: Exception | None = None

    @property
    def has_media(self) -> bool:
        """Whether its models accept images or videos."""
        models = self.connection.models.values()
        return self.error is None and any(model.images or model.videos for model in models)


@dataclass(eq=False)
class _State:
    """An open state. ``root``: the op that opened the root of its tree. ``is_import``: it is the root of
    another backend, forked from ``parent``, and its first op is not the program's. ``group``: its task group,
    if that spans backends. ``graph``: the forks of the graph whose root it is."""

    number: int
    backend: _OpenBackend
    parent: _State | None
    root: ops.Open
    is_import: bool = False
    is_closed: bool = False
    lost: ErrorInfo | None = None  # why its backend does not know it any more
    error: ErrorInfo | None = None  # with which it has failed, as its backend reported it
    cancelled: ErrorInfo | None = None  # why its task group has cancelled it
    children: list[_State] = field(default_factory=list)
    group: list[_State] = field(default_factory=list)
    graph: list[_State] = field(default_factory=list)
    variables: list[int] = field(default_factory=list)
    imports: dict[int, int] = field(default_factory=dict)  # of variables of other backends, by their numbers

    def with_forks(self) -> Iterator[_State]:
        """The state and all its forks."""
        pending = [self]
        while pending:
            state = pending.pop()
            yield state
            pending += state.children

    def with_parents(self) -> Iterator[_State]:
        """The state and all states above it."""
        state: _State | None = self
        while state is not None:
            yield state
            state = state.parent


PART_CHARS = 256
"""The least characters of a growing text that are sent. States compute them in larger steps."""


@dataclass(eq=False)
class _Import:
    """The import of a variable in a state of another backend. ``num_sent``: the characters that were sent."""

    state: _State
    number: int
    num_sent: int = 0

    @property
    def has_room(self) -> bool:
        """Whether parts of the text may be sent. If not, a later part or the end contains them, so that
        nothing waits twice for a slow connection."""
        backend = self.state.backend
        return self.state.lost is None and backend.error is None and backend.connection.has_room


@dataclass(eq=False)
class _Variable:
    """A variable of an open state. ``reply``: reads the text, if that is the notation of a reply.
    ``imports``: the imports that wait for more of it."""

    state: _State
    name: str
    reply: ReplySoFar | None = None
    text: GrowingText = field(default_factory=GrowingText)
    has_value: bool = False
    error: ErrorInfo | None = None
    imports: list[_Import] = field(default_factory=list)

    def extend(self, event: Delta | Value) -> None:
        """Appends the text of an event."""
        num_known = len(self.text)
        self.text.put(num_known, event.text[max(num_known - event.at, 0) :])
        if isinstance(event, Value):
            self.has_value = True
            self.text.end()

    def provided(self, one: _Import) -> ops.Provide | None:
        """The op with the text that the import does not have yet, or with the error. None if there is too
        little of it, or no room."""
        if self.error is not None:
            return ops.Provide(one.number, error=self.error)
        if not self.has_value and not one.has_room:
            return None
        if self.reply is None:
            rest = self.text.part(one.num_sent)
        elif self.has_value:
            rest = read_reply(str(self.text)).text[one.num_sent :]
        else:
            rest = self.reply.follow(self.text).text_from(one.num_sent)
        if not self.has_value and len(rest) < PART_CHARS:
            return None
        one.num_sent += len(rest)
        return ops.Provide(one.number, rest, more=not self.has_value)


def _discard(items: list[T], item: T) -> None:
    """Removes the item, unless another event has done so."""
    if item in items:
        items.remove(item)


class _Limit(NamedTuple):
    """The limits of a state and its forks in all backends together. ``tokens``: that they may still
    generate."""

    deadline: float = math.inf
    tokens: float = math.inf

    def tightest(self, *others: _Limit) -> _Limit:
        """The earliest deadline, and the fewest tokens."""
        return _Limit(*map(min, zip(self, *others, strict=True)))

    def as_op(self, number: int) -> ops.Limit:
        """The rest of the limits, for a state (0: all states) of one backend."""
        left_s = None if math.isinf(self.deadline) else max(0.0, self.deadline - anyio.current_time())
        return ops.Limit(number, left_s, None if math.isinf(self.tokens) else int(self.tokens))


class SeveralConnection:
    """A connection to all backends."""

    def __init__(self, deliver: Deliver, lost: Lost) -> None:
        self.models: dict[str, Capabilities] = {}
        self._deliver = deliver
        self._lost = lost
        self._backends: dict[str, _OpenBackend] = {}
        self._states: dict[int, _State] = {}
        self._variables: dict[int, _Variable] = {}
        self._numbers = itertools.count(-1, -1)
        # Undo the notes about the op that ``send`` translates. None for ops that follow from events.
        self._undos: list[Callable[[], object]] | None = None
        self._limits: dict[_State | None, _Limit] = {}  # None: of all states
        self._stale: dict[_State | None, None] = {}  # whose rest the backends do not know yet
        self._imported: set[_State] = set()  # the states that are imports
        # By the tickets of ops.GetStats: the counters of each backend, None until it has answered.
        self._asked: dict[int, dict[_OpenBackend, Stats | None]] = {}
        self._images: set[str] = set()  # the sources of those that the session has uploaded
        self._asked_graphs: set[int] = set()  # tickets of ops.GetGraph without an answer
        self._watched: int | None = None  # the ticket of the session's watch

    def add(self, backend: _OpenBackend) -> None:
        """Adds a backend that is open."""
        self._backends[backend.name] = backend
        self.models[backend.name] = next(iter(backend.connection.models.values()))

    @property
    def _default(self) -> _OpenBackend:
        return next(iter(self._backends.values()))

    @property
    def is_connected(self) -> bool:
        return all(
            backend.error is None and backend.connection.is_connected for backend in self._backends.values()
        )

    @property
    def has_room(self) -> bool:
        return all(
            backend.error is None and backend.connection.has_room for backend in self._backends.values()
        )

    def end(self, error: BaseException | None) -> None:
        for backend in self._backends.values():
            backend.connection.end(error)

    def send(self, sent: Sequence[ops.Op]) -> None:
        """Sends ops to their backends. Ops that a backend refuses, and all after them, leave no trace."""
        outgoing: list[tuple[_OpenBackend, ops.Op]] = []
        undos: list[list[Callable[[], object]]] = []  # of each op
        ends: list[int] = []  # of the ops in ``outgoing`` that each op has become
        num_sent = 0
        try:
            for op in sent:
                self._undos = []
                undos.append(self._undos)
                outgoing += self._translated(op)
                ends.append(len(outgoing))
            self._undos = None
            # Each run of ops for one backend is sent together.
            for backend, pairs in itertools.groupby(outgoing, key=lambda pair: pair[0]):
                run = [op for _, op in pairs]
                if backend.error is None:
                    backend.connection.send(run)
                num_sent += len(run)
        except BaseException:
            self._undos = None
            num_whole = len([end for end in ends if end <= num_sent])
            for undo in reversed([one for part in undos[num_whole:] for one in part]):
                undo()
            raise

    def _on_refusal(self, undo: Callable[..., object], *args: Any) -> None:
        if self._undos is not None:
            self._undos.append(partial(undo, *args))

    def _react(self, outgoing: Iterable[tuple[_OpenBackend, ops.Op]]) -> None:
        """Sends the ops that follow from events. No program waits for their errors: an import whose text its
        backend does not accept fails with that error."""
        for backend, op in outgoing:
            if backend.error is not None:
                continue
            try:
                backend.connection.send([op])
            except AgentflowError as error:
                if isinstance(op, ops.Provide) and op.error is None:
                    backend.connection.send([ops.Provide(op.var, error=ErrorInfo.of(error))])

    # From ops of the session to ops of the backends.

    def _translated(self, op: ops.Op) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        match op:
            case ops.Open():
                backend = self._open(op.state, op)
                yield backend, msgspec.structs.replace(op, model="")
            case ops.SubmitGraph():
                yield from self._graph(op)
            case ops.Fork() if (state := self._known(op.state)) is not None:
                backend = self._backend(op.model) if op.model else state.backend
                if backend is state.backend:
                    self._add(op.children, backend, state)
                    yield backend, msgspec.structs.replace(op, model="")
                else:
                    yield from self._fork_onto(backend, state, op.children)
            case ops.TaskGroup() if (state := self._known(op.state)) is not None:
                yield from self._group(state, op)
            case ops.Cancel() if (state := self._known(op.state)) is not None:
                yield state.backend, op
                for fork in state.with_forks():
                    if fork.is_import and fork.lost is None:
                        yield fork.backend, ops.Cancel(fork.number, op.failure)
            case ops.Close() if op.state in self._states:
                state = self._states[op.state]
                if state.lost is None:
                    yield state.backend, op
                for one in (state, *state.graph):
                    self._forget(one)
            case ops.Limit():
                yield from self._limit(op)
            case ops.Provide() | ops.Want() if (variable := self._variables.get(op.var)) is not None:
                yield variable.state.backend, op
            case ops.GetStats():
                self._backend("")
                asked = [backend for backend in self._backends.values() if backend.error is None]
                self._asked[op.ticket] = dict.fromkeys(asked)
                for backend in asked:
                    yield backend, op
            case ops.GetGraph():  # of the default backend
                yield self._backend(""), op
                self._asked_graphs.add(op.ticket)
            case ops.Upload() | ops.Release():
                if isinstance(op, ops.Upload):
                    self._images.add(op.source)
                else:
                    self._images.discard(op.source)
                for backend in self._backends.values():
                    if backend.has_media:
                        yield backend, op
            case ops.Watch():  # of the default backend
                yield self._backend(""), op
                self._watched = op.ticket
            case ops.Unwatch() | ops.Peek():
                if isinstance(op, ops.Unwatch):
                    self._watched = None
                yield self._default, op
            case _ if (state := self._states.get(getattr(op, "state", 0))) is not None:
                if state.lost is None:
                    yield from self._in_stream(state, op)
                elif not isinstance(op, ops.Seal | ops.Await):
                    raise state.lost.to_exception()
            case _:
                pass

    def _backend(self, name: str) -> _OpenBackend:
        backend = self._backends[name] if name else self._default
        if backend.error is not None:
            raise ErrorInfo.of(backend.error).to_exception()
        return backend

    def _known(self, number: int) -> _State | None:
        """The state, unless its backend has lost it."""
        state = self._states.get(number)
        return None if state is None or state.lost is not None else state

    def _open(self, number: int, op: ops.Open) -> _OpenBackend:
        backend = self._backend(op.model)
        self._states[number] = _State(number, backend, None, op)
        self._on_refusal(self._states.pop, number, None)
        return backend

    def _add(
        self, numbers: Iterable[int], backend: _OpenBackend, parent: _State, *, is_import: bool = False
    ) -> None:
        for number in numbers:
            state = _State(number, backend, parent, parent.root, is_import)
            parent.children.append(state)
            self._states[number] = state
            self._on_refusal(self._states.pop, number, None)
            if is_import:
                self._imported.add(state)
                self._on_refusal(self._imported.discard, state)
            self._on_refusal(parent.children.remove, state)

    def _graph(self, op: ops.SubmitGraph) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        first, *rest = op.ops
        if not isinstance(first, ops.Open) or any(isinstance(part, ops.Fork) and part.model for part in rest):
            raise NotSupported("a graph runs on one model: leave out the model of its forks")
        backend = self._open(op.state, first)
        root = self._states[op.state]
        for part in expanded(op):
            if isinstance(part, ops.Fork):
                self._add(part.children, backend, self._states[part.state])
                root.graph += [self._states[child] for child in part.children]
        self._declare(root, op)
        yield backend, msgspec.structs.replace(op, ops=(msgspec.structs.replace(first, model=""), *rest))

    def _declare(self, state: _State, op: ops.Op) -> None:
        for number, name in declared(op):
            is_reply = isinstance(op, ops.Gen) and op.reply
            self._add_variable(number, _Variable(state, name, ReplySoFar() if is_reply else None))

    def _add_variable(self, number: int, variable: _Variable) -> None:
        self._variables[number] = variable
        variable.state.variables.append(number)
        self._on_refusal(self._variables.pop, number, None)
        self._on_refusal(variable.state.variables.remove, number)

    def _in_stream(self, state: _State, op: ops.Op) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        """An op of the state's stream, after the imports that its text needs."""
        if isinstance(op, ops.Text | ops.Set):
            parts: list[str | ops.Ref] = []
            for part in op.parts:
                if isinstance(part, ops.Ref) and self._crosses(part.var, state):
                    if part.var not in state.imports:
                        state.imports[part.var] = next(self._numbers)
                        self._on_refusal(state.imports.pop, part.var)
                        yield from self._import(state, part.var, state.imports[part.var])
                    parts.append(ops.Ref(state.imports[part.var], part.transforms))
                else:
                    parts.append(part)
            op = msgspec.structs.replace(op, parts=tuple(parts))
        self._declare(state, op)
        yield state.backend, op

    def _crosses(self, number: int, reader: _State) -> bool:
        """Whether the reader's backend does not know the variable, or not any more."""
        variable = self._variables.get(number)
        if variable is None:
            return False
        return variable.state.backend is not reader.backend or variable.state.lost is not None

    def _import(self, state: _State, source: int, number: int) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        """Declares an import of variable ``source`` in the state."""
        variable, made = self._variables[source], _Import(state, number)
        yield state.backend, ops.Expect(state.number, number, variable.name)
        if (provide := variable.provided(made)) is not None:
            yield state.backend, provide
        if provide is None or provide.more:
            variable.imports.append(made)
            self._on_refusal(_discard, variable.imports, made)

    def _fork_onto(
        self, backend: _OpenBackend, parent: _State, children: Sequence[int]
    ) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        """Opens the branches of a fork as roots of another backend, where they wait for the parent."""
        progress = next(self._numbers)
        self._add_variable(progress, _Variable(parent, "the fork"))
        yield parent.backend, ops.Done(parent.number, progress, "the fork")
        self._add(children, backend, parent, is_import=True)
        for child in children:
            yield backend, msgspec.structs.replace(parent.root, state=child, model="")
            yield from self._inherited_limits(self._states[child])
            number = next(self._numbers)
            yield from self._import(self._states[child], progress, number)
            yield backend, ops.Text(child, (ops.Ref(number),))

    def _group(self, state: _State, op: ops.TaskGroup) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        members = [self._states[child] for child in op.children if child in self._states]
        if all(not member.is_import for member in members):
            yield state.backend, op
            return
        for member in members:
            member.group = members
        if near := tuple([member.number for member in members if not member.is_import]):
            yield state.backend, ops.TaskGroup(op.state, near)
        for member in members:  # it may have failed before it became a member
            yield from self._fail_group(member)

    # Limits.

    def _limit(self, op: ops.Limit) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        root = self._known(op.state) if op.state else None
        if op.state and root is None:
            return
        before = self._limits.get(root, _Limit())
        self._on_refusal(self._set_limit, root, before)
        deadline = math.inf if op.deadline_s is None else anyio.current_time() + op.deadline_s
        given = _Limit(deadline, math.inf if op.output_tokens is None else op.output_tokens)
        self._set_limit(root, before.tightest(given))
        yield from self._everywhere(root, given)

    def _set_limit(self, root: _State | None, limit: _Limit) -> None:
        if limit == _Limit():
            self._limits.pop(root, None)
        else:
            self._limits[root] = limit

    def _everywhere(self, root: _State | None, limit: _Limit) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        """The limit in each backend of the state and its forks, or of all states."""
        if root is None:
            for backend in self._backends.values():
                yield backend, limit.as_op(0)
            return
        for state in root.with_forks() if self._imported else (root,):
            if (state is root or state.is_import) and state.lost is None:
                yield state.backend, limit.as_op(state.number)

    def _inherited_limits(self, child: _State) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        """The limits of the states above a root of another backend."""
        above = [self._limits[one] for one in child.with_parents() if one in self._limits]
        if above:
            yield child.backend, above[0].tightest(*above[1:]).as_op(child.number)

    def _spend(self, state: _State, num_tokens: int) -> None:
        """Charges tokens that one backend has counted to the limits."""
        for root in (None, *state.with_parents()):
            limit = self._limits.get(root)
            if limit is not None and 0 < limit.tokens < math.inf:
                self._limits[root] = limit._replace(tokens=max(0, limit.tokens - num_tokens))
                self._stale[root] = None

    def _rests(self) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        """The rests of the limits that were charged, once for all events that came together."""
        stale, self._stale = self._stale, {}
        for root in stale:
            if root in self._limits:
                yield from self._everywhere(root, _Limit(tokens=self._limits[root].tokens))

    # From events of the backends to events of the session.

    def receive(self, backend: _OpenBackend, events: Iterable[Event]) -> None:
        """Delivers the events of a backend, and provides the imports of its variables."""
        delivered: list[Event] = []
        outgoing: list[tuple[_OpenBackend, ops.Op]] = []
        for event in events:
            match event:
                case Delta() | Value() | VarFailed():
                    outgoing += self._follow(event)
                    if event.var > 0:
                        delivered.append(self._renumbered(event))
                case StateFailed():
                    outgoing += self._failed(event)
                    delivered.append(self._renumbered(event))
                case StatsReply():
                    delivered += self._counted(backend, event)
                case GraphReply():
                    self._asked_graphs.discard(event.ticket)
                    delivered.append(event)
                case _:
                    delivered.append(event)
        if delivered:
            self._deliver(delivered)
        self._react([*self._rests(), *outgoing])  # before texts on which generations wait

    def _counted(self, backend: _OpenBackend, reply: StatsReply) -> Iterator[StatsReply]:
        """The counters of all backends, when the last one has answered."""
        replies = self._asked.get(reply.ticket)
        if replies is None:
            return
        if reply.stats is not None:
            replies[backend] = reply.stats
        elif backend is self._default:
            del self._asked[reply.ticket]
            yield reply
            return
        else:  # its counters are lost
            del replies[backend]
        found = [stats for stats in replies.values() if stats is not None]
        if len(found) == len(replies):
            del self._asked[reply.ticket]
            yield StatsReply(reply.ticket, summed(found))

    def _follow(self, event: Delta | Value | VarFailed) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        variable = self._variables.get(event.var)
        if variable is None:
            return
        if isinstance(event, VarFailed):
            variable.error = event.error
        else:
            variable.extend(event)
        if (usage := spent(event)) is not None and usage.output_tokens:
            self._spend(variable.state, usage.output_tokens)
        for one in variable.imports:
            if (provide := variable.provided(one)) is not None:
                yield one.state.backend, provide
        if variable.has_value or variable.error is not None:
            variable.imports.clear()
            if variable.state.is_closed:
                del self._variables[event.var]

    def _renumbered(self, event: Event) -> Event:
        """The event with the program's numbers of ops: the first op of a forked root is not the program's. A
        cancellation by a task group gets its cause."""
        if not isinstance(event, VarFailed | StateFailed):
            return event
        if isinstance(event, StateFailed):
            state = self._states.get(event.state)
        else:
            state = self._variables[event.var].state if event.var in self._variables else None
        if event.error.code == Cancelled.code and state is not None:
            for one in state.with_parents():
                if one.cancelled is not None:
                    return msgspec.structs.replace(event, error=one.cancelled)
        return msgspec.structs.replace(event, error=self._renumbered_error(event.error))

    def _renumbered_error(self, error: ErrorInfo) -> ErrorInfo:
        renumbered: ErrorInfo | None = None
        for one in reversed(error.chain):
            state = None if one.state is None else self._states.get(one.state)
            op = one.op
            if state is not None and state.is_import and op is not None:
                op = op - 1 if op > 1 else None
            renumbered = msgspec.structs.replace(
                one, cause=renumbered, op=op, state=one.state if op else None
            )
        assert renumbered is not None
        return renumbered

    def _failed(self, event: StateFailed) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        """The failure of a state."""
        state = self._states.get(event.state)
        if state is not None:
            state.error = event.error
            yield from self._fail_group(state)

    def _fail_group(self, state: _State) -> Iterator[tuple[_OpenBackend, ops.Op]]:
        """If the state is a failed branch of a task group that spans backends: cancels the others, and fails
        the parent."""
        if not state.group or state.error is None or state.error.code == Cancelled.code:
            return
        group, parent = state.group, state.parent
        origin = self._renumbered_error(state.error.origin)
        message = f"branch {group.index(state)} of its fork failed: {origin.message}"
        for member in group:
            member.group = []
            if member is not state and member.lost is None:
                member.cancelled = ErrorInfo(Cancelled.code, message, origin)
                yield member.backend, ops.Cancel(member.number)
        if parent is None or parent.lost is not None or not state.is_import:
            return  # the backend of the parent has failed it already
        number = next(self._numbers)
        message = f"branch {group.index(state)} of a fork failed: {origin.message}"
        error = ErrorInfo(RunFailed.code, message, state.error.origin)  # renumbered on delivery
        yield parent.backend, ops.Expect(parent.number, number, "a branch of the fork")
        # The parent may be sealed, which refuses text.
        yield parent.backend, ops.Set(parent.number, next(self._numbers), "the fork", (ops.Ref(number),))
        yield parent.backend, ops.Provide(number, error=error)

    def lose(self, backend: _OpenBackend, error: Exception, *, is_final: bool = True) -> None:
        """A backend has lost its states; the other backends go on."""
        if is_final:
            backend.error = error
        if all(one.error is not None for one in self._backends.values()):
            self._lost(error)
            return
        info = ErrorInfo.of(error)
        failures: list[Event] = []
        for number, variable in self._variables.items():
            if variable.state.backend is backend and not variable.has_value and variable.error is None:
                failures.append(VarFailed(number, info))
        for state in self._states.values():
            if state.backend is backend and state.lost is None:
                failures.append(StateFailed(state.number, info))
                state.lost = info
        for ticket, replies in self._asked.items():
            if backend in replies and replies[backend] is None:
                failures.append(StatsReply(ticket, None, info))
        if backend is self._default:
            failures += [GraphReply(ticket, None, info) for ticket in self._asked_graphs]
            failures += [] if self._watched is None else [Watched(self._watched, error=info)]
        self.receive(backend, failures)
        if not is_final:  # the limits and images of the session are lost as well
            if None in self._limits:
                self._react([(backend, self._limits[None].as_op(0))])
            images = [known_file(source) for source in self._images if backend.has_media]
            for image in images:
                self._react([(backend, op) for op in (parts_of_upload(image) if image is not None else ())])

    def _forget(self, state: _State) -> None:
        state.is_closed = True
        del self._states[state.number]
        for number in state.variables:
            variable = self._variables[number]
            if variable.has_value or variable.error is not None:  # otherwise its end is still to come
                del self._variables[number]
        if state.parent is not None and state in state.parent.children:
            state.parent.children.remove(state)
        self._limits.pop(state, None)
        self._imported.discard(state)
