"""One program in the server: requests that are connected by variables, on one interpreter.

Each request is a state, whose text is a prompt with variables: in the order of the prompt, the values of
inputs are filled in, and outputs are generated. An output must be a new variable, so there are no cycles. An
input that is not the output of an earlier request is set by a client.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import anyio
from anyio.abc import TaskGroup

from agentflow.errors import AgentflowError, RateLimited, UnknownModel
from agentflow.protocol import ops
from agentflow.protocol.events import Capabilities
from agentflow.protocol.op_table import OP_BYTES, require
from agentflow.protocol.sampling import GenParams
from agentflow.protocol.text.transform import Transform
from agentflow.runtime.generator import SessionModels
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.interpreter.variables import EventCursor, Reports, VariableRecord
from agentflow.runtime.limits import STATE_BYTES, MemoryBudget, MemoryReservation, text_bytes, variable_bytes
from agentflow.runtime.loop_turns import LoopTurn
from agentflow.runtime.programs.deduction import How
from agentflow.runtime.programs.live import TenantGraphs

MAX_REQUESTS = 5_000
"""The limit of requests of one program."""
_ENTRY_BYTES = 1_000
"""The estimated memory of a variable or a request in the tables of its program."""
_ROOT = 1
"""The state that declares the variables that clients set."""


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """A place in a prompt where a variable's value is filled in."""

    variable: str
    transforms: tuple[Transform, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgramOutput:
    """A place in a prompt where text is generated. The value of the variable is the text after the
    transforms."""

    variable: str
    params: GenParams
    transforms: tuple[Transform, ...] = ()


PromptPiece = str | ProgramInput | ProgramOutput


@dataclass(eq=False, slots=True)
class SubmittedPrompt:
    """A request of a program: its state, and its variables in the order of the prompt."""

    state: int
    variables: list[ProgramVariable] = field(default_factory=list)
    criteria: ops.Objective | None = None  # the objective of a reader of its values
    failed: ProgramVariable | None = None  # the first variable without a value, once it was looked up


@dataclass(eq=False, slots=True)
class ProgramVariable:
    """A variable of a program. ``gen``: the number of the generated variable, before the transforms.
    ``request``: the request whose output it is; None: a client sets it."""

    id: str
    record: VariableRecord
    gen: int
    request: SubmittedPrompt | None
    reservation: MemoryReservation


class ServedProgram:
    """A program of a tenant. ``begin`` starts it.

    Args:
        program_id: Its id.
        tenant: The name of its tenant.
        memory: The budget of its memory.
        cache_salt: Its states share cached KV only with states of the same salt.
        is_valid: Whether the API key that created it still identifies the tenant.
        graphs: The graphs of the tenant's sessions.
    """

    def __init__(
        self,
        program_id: str,
        tenant: str,
        memory: MemoryBudget,
        *,
        cache_salt: str = "",
        is_valid: Callable[[], bool] = lambda: True,
        graphs: TenantGraphs | None = None,
    ) -> None:
        self.id = program_id
        self.tenant = tenant
        self.is_valid = is_valid
        self.has_ended = False
        self.ended = anyio.Event()
        self._memory = memory
        self._cache_salt = cache_salt
        self._graphs = graphs
        self._interpreter: Interpreter[Any] | None = None
        self._models: dict[str, Capabilities] = {}
        self._variables: dict[str, ProgramVariable] = {}
        self._num_requests = 0
        self._states, self._numbers = count(_ROOT + 1), count(1)
        self._readers: set[EventCursor] = set()
        self._submitting = anyio.Lock()
        self._follower: EventCursor | None = None
        self._added: list[ProgramVariable] = []  # the variables that the follower has not taken

    def begin(self, models: SessionModels, tasks: TaskGroup) -> None:
        """Starts the interpreter, whose tasks ``tasks`` owns. ``Overloaded`` if there is no memory."""
        _check_room(self._memory, STATE_BYTES)
        self._interpreter = Interpreter(
            models.default,
            tasks,
            self._memory,
            hides_faults=True,
            models=models.others,
            embedders=models.embedders,
            counted=models.counted,
            program=self.id,
            graphs=self._graphs,
        )
        self._models = self._interpreter.models
        self._interpreter.submit(ops.Open(_ROOT, self._cache_salt, label=self.id))

    def end(self) -> None:
        """Ends the program: its owner cancels its work, and its readers raise ``ProgramEnded``."""
        self.has_ended = True
        self.ended.set()
        for cursor in self._readers:
            cursor.wake()

    async def aclose(self) -> None:
        """Frees everything that the program holds. Its tasks must have ended."""
        self.end()
        with anyio.CancelScope(shield=True):
            async with self._submitting:  # a submission in progress finishes first, with ``ProgramEnded``
                self._variables.clear()
                if self._interpreter is None:
                    self._memory.close()
                else:
                    await self._interpreter.aclose()

    @property
    def variable_ids(self) -> tuple[str, ...]:
        """The ids of the program's variables."""
        return tuple(self._variables)

    def followed(self) -> EventCursor:
        """The cursor of the one reader of all variables. New variables (``take_added``) wake it."""
        self._follower = EventCursor()
        self._added = [*self._variables.values()]
        return self._follower

    def take_added(self) -> list[ProgramVariable]:
        """Returns the variables that were added since the last call."""
        added, self._added = self._added, []
        return added

    def find(self, variable_id: str) -> ProgramVariable | None:
        """The variable with this id, or None."""
        return self._variables.get(variable_id)

    @property
    def _running(self) -> Interpreter[Any]:
        self._check_open()
        assert self._interpreter is not None
        return self._interpreter

    def _check_open(self) -> None:
        """``ProgramEnded`` after the end, when nothing may use memory any more."""
        if self.has_ended or self._interpreter is None:
            raise ProgramEnded

    async def submit(self, pieces: Sequence[PromptPiece], *, model: str = "", trace: str = "") -> None:
        """Starts a request, without waiting for it. Its outputs must be new variables; inputs that do not
        exist are declared, and a client must set them. An error leaves the program unchanged.

        Raises:
            UnknownModel: There is no such model.
            NotSupported: The model does not accept a parameter of an output.
            VariableTaken: The variable of an output exists.
            RateLimited: The program has too many requests.
            Overloaded: There is no memory for the request.
            ProgramEnded: The program was closed meanwhile.
        """
        if model and model not in self._models:
            known = ", ".join(sorted(self._models))
            raise UnknownModel(f"there is no model {model[:200]!r} here (there are: {known})", param="model")
        async with self._submitting:
            self._check_open()
            for piece in pieces:
                if isinstance(piece, ProgramOutput):
                    if piece.variable in self._variables:
                        raise VariableTaken(
                            piece.variable, "this variable exists, and an output must be a new one"
                        )
                    features = self._models[model or next(iter(self._models))]
                    require(ops.Gen(_ROOT, 0, piece.variable, piece.params), features)
            if self._num_requests >= MAX_REQUESTS:
                raise RateLimited(f"this program has {MAX_REQUESTS} requests, which is the limit")
            num_bytes = STATE_BYTES + _ENTRY_BYTES + sum(map(_piece_bytes, pieces))
            _check_room(self._memory, num_bytes)
            with anyio.CancelScope(shield=True):  # a request is submitted as a whole, or not at all
                await self._take(pieces, model, trace)

    async def _take(self, pieces: Sequence[PromptPiece], model: str, trace: str) -> None:
        request = SubmittedPrompt(next(self._states))
        self._num_requests += 1
        inputs = [piece.variable for piece in pieces if isinstance(piece, ProgramInput)]
        for variable_id in dict.fromkeys(inputs):
            if variable_id not in self._variables:
                await self._declare(variable_id)
        await self._send(ops.Open(request.state, self._cache_salt, label=self.id, model=model))
        texts: list[str | ops.Ref] = []
        for piece in pieces:
            match piece:
                case str():
                    texts.append(piece)
                case ProgramInput():
                    source = self._variables[piece.variable]
                    request.variables.append(source)
                    texts.append(ops.Ref(source.record.id, piece.transforms))
                case ProgramOutput():
                    if texts:
                        await self._send(ops.Text(request.state, tuple(texts)))
                        texts = []
                    await self._generate(request, piece, trace)
        # The text after the last output is left out: it changes no value.
        await self._send(ops.Seal(request.state))

    async def _generate(self, request: SubmittedPrompt, output: ProgramOutput, trace: str) -> None:
        gen, name = next(self._numbers), output.variable
        await self._send(ops.Gen(request.state, gen, name, output.params, trace=trace))
        number = gen
        if output.transforms:
            number = next(self._numbers)
            await self._send(ops.Set(request.state, number, name, (ops.Ref(gen, output.transforms),)))
        variable = self._add(name, number, gen, request)
        request.variables.append(variable)

    async def _declare(self, variable_id: str) -> ProgramVariable:
        number = next(self._numbers)
        await self._send(ops.Expect(_ROOT, number, variable_id))
        return self._add(variable_id, number, number, None)

    def _add(
        self, variable_id: str, number: int, gen: int, request: SubmittedPrompt | None
    ) -> ProgramVariable:
        reservation = MemoryReservation(self._memory, 0)
        reservation.count(_ENTRY_BYTES + sys.getsizeof(variable_id))
        record = self._running.variable(number)
        variable = ProgramVariable(variable_id, record, gen, request, reservation)
        self._variables[variable_id] = variable
        if self._follower is not None:
            self._added.append(variable)
            self._follower.wake()
        return variable

    async def _send(self, op: ops.Op) -> None:
        turn = LoopTurn()
        try:
            for _ in self._running.submitting(op):
                await turn.pause()
                self._check_open()
        except AgentflowError:  # too many ops were rejected
            self.end()
            raise
        await turn.pause()

    async def set(self, variable_id: str, value: str) -> None:
        """Sets a variable that does not exist, or that is only an input.

        Raises:
            VariableTaken: The variable has a value, or is the output of a request.
            Overloaded: There is no memory for the value.
            ProgramEnded: The program was closed meanwhile.
        """
        async with self._submitting:
            self._check_open()
            _check_room(self._memory, _ENTRY_BYTES + variable_bytes(variable_id) + sys.getsizeof(value))
            with anyio.CancelScope(shield=True):
                variable = self.find(variable_id) or await self._declare(variable_id)
                if variable.request is not None:
                    raise VariableTaken(variable_id, "this variable is the output of a request")
                if variable.record.has_ended:
                    raise VariableTaken(variable_id, "this variable has a value")
                await self._send(ops.Provide(variable.record.id, value))

    async def prefer(self, variable: ProgramVariable, criteria: ops.Objective, how: How = "value") -> None:
        """Advises the scheduler that a reader waits for the variable, or reads it in another way (``how``).
        All requests that its value depends on get the objective ``criteria``; latency takes precedence over
        throughput. ``ProgramEnded``."""
        if variable.request is None or variable.record.has_ended:
            return
        async with self._submitting:  # an op is submitted after the last step of the previous one
            self._check_open()
            with anyio.CancelScope(shield=True):  # a request whose ``criteria`` is set must be announced
                await self._want(variable, criteria, how)

    async def _want(self, variable: ProgramVariable, criteria: ops.Objective, how: How) -> None:
        turn = LoopTurn()
        pending: list[SubmittedPrompt] = []

        def reach(request: SubmittedPrompt | None) -> None:
            if request is not None and request.criteria not in ("latency", criteria):
                request.criteria = criteria
                pending.append(request)

        self._running.submit(ops.Want(variable.gen, how))
        reach(variable.request)
        while pending:
            request = pending.pop()
            for one in request.variables:
                if one.record.has_ended:
                    continue
                if one.request is request:
                    self._running.submit(ops.Want(one.gen, objective=criteria))
                reach(one.request)
            await turn.pause()

    @contextmanager
    def reading(self, variable: ProgramVariable, reports: Reports = "all") -> Iterator[EventCursor]:
        """The scope of one reader of a variable. ``Overloaded`` if there is no memory; ``ProgramEnded``."""
        self._check_open()
        cursor = EventCursor()
        with variable.record.reading(cursor, reports):
            self._readers.add(cursor)
            try:
                yield cursor
            finally:
                self._readers.remove(cursor)

    async def wait(self, variable: ProgramVariable, most_s: float | None = None) -> bool:
        """Waits at most ``most_s`` seconds for the end of a variable. Returns whether it has ended.
        ``Overloaded`` if there is no memory; ``ProgramEnded``."""
        self._check_open()
        if variable.record.has_ended:
            return True
        with self.reading(variable, "end") as cursor, anyio.move_on_after(most_s):
            while not variable.record.has_ended and not self.has_ended:
                await cursor.wait()
                cursor.drain()
        self._check_open()
        return variable.record.has_ended

    async def path_of_failure(self, variable: ProgramVariable) -> list[ProgramVariable]:
        """The chain of variables from the cause of a failure to ``variable``. Yields to the event loop
        meanwhile."""
        path, turn = [variable], LoopTurn()
        while (failed := _failed_before(path[-1])) is not None:
            path.append(failed)
            await turn.pause()
        return path[::-1]


class ProgramEnded(Exception):
    """The program was closed, or has expired."""


class VariableTaken(Exception):
    """The variable has a value, or is the output of a request. ``variable``: its id."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(message)
        self.variable = variable


def _failed_before(variable: ProgramVariable) -> ProgramVariable | None:
    """The first failed variable of the request of ``variable``; None if that is ``variable`` itself, or if it
    has no request."""
    request = variable.request
    if request is None:
        return None
    if request.failed is None:
        request.failed = next(one for one in request.variables if one.record.error is not None)
    return None if request.failed is variable else request.failed


def _piece_bytes(piece: PromptPiece) -> int:
    """An estimate of the memory that a piece takes before its request runs."""
    if isinstance(piece, str):
        return OP_BYTES + text_bytes(piece)
    return 2 * (OP_BYTES + variable_bytes(piece.variable)) + _ENTRY_BYTES


def _check_room(memory: MemoryBudget, num_bytes: int) -> None:
    """``Overloaded`` if there is no room for ``num_bytes`` bytes."""
    memory.reserve(num_bytes)
    memory.count(-num_bytes)
