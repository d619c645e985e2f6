"""One run: a root state with all its forks, from the first op until everything it began has ended."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agentflow.errors import AgentflowError, BadArgument, Cancelled
from agentflow.language.map_inputs import short
from agentflow.language.state import State
from agentflow.language.stream import EventStream, TextDelta, VariableDone
from agentflow.language.variable import Variable
from agentflow.protocol import ops
from agentflow.protocol.events import ErrorInfo
from agentflow.protocol.seeds import derived_seed, run_of
from agentflow.runtime.generator import Usage

if TYPE_CHECKING:
    from agentflow.language.session import Session

ResultT = TypeVar("ResultT")


def check_program(program: object, where: str) -> None:
    """``BadArgument`` where it cannot be called."""
    if not callable(program):
        raise BadArgument(
            f"{where}: {short(program)} cannot be called: give the program itself, and what it is called "
            "with beside it"
        )


def called(program: Callable[..., Awaitable[ResultT]], *args: Any, **kwargs: Any) -> Awaitable[ResultT]:
    """The program's call, to be awaited. ``BadArgument`` where it cannot be: the function is not async."""
    running = program(*args, **kwargs)
    if not inspect.isawaitable(running):
        raise BadArgument(
            f"{short(program)} returned {short(running)}, which cannot be awaited: a program is an async "
            "function"
        )
    return running


class Run:
    """The states of one call of a program, or of one ``flow.state()``. ``index``: from
    ``next_run_index``, where its order matters. ``objective``: a hint for all its states. ``program``: what
    it is a part of, where it is no whole one. ``usage``: of its variables that are complete."""

    def __init__(
        self,
        session: Session,
        *,
        cache_salt: str = "",
        index: int | None = None,
        root_id: int | None = None,
        objective: ops.Objective | None = None,
        program: str = "",
        root_type: type[State] = State,
    ) -> None:
        self.session = session
        self.index = session.next_run_index() if index is None else index
        self.usage = Usage()
        self.places: dict[int, str] = {}
        """Of a trace: where its gens stand."""
        self._states: list[State] = []
        self._variables: dict[int, Variable[Any]] = {}
        self._failed: list[Variable[Any]] = []
        self._told: set[ErrorInfo] = set()
        # Weak: a reader that is gone needs no news.
        self._streams: weakref.WeakSet[EventStream] = weakref.WeakSet()
        if root_id is None:  # otherwise it is opened by a graph
            root_id = session.next_id()
            session.send([ops.Open(root_id, cache_salt, objective, program)])
        self.root = self.adopt(root_type(self, root_id, ()))

    async def execute(
        self, program: Callable[..., Awaitable[ResultT]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ResultT:
        """Calls the program on the root state, waits for everything it left running, and ends."""
        try:
            result = await called(program, self.root, *args, **kwargs)
            await self._settle()
        except BaseException:
            self.root.cancel()
            raise
        finally:
            self.close()
        return result

    async def _settle(self) -> None:
        """Nothing outlives the run: waits for what nobody awaited, and raises what failed there,
        unless the program has been told of that failure already."""
        for state in self._states:
            state.ask()
        for state in self._states:
            await state.settled()
        # Those that functions of the program provide: no state waits for them.
        provided = [*self._failed, *self._variables.values()]
        for variable in provided:
            await variable.settled()
        errors = [state.error for state in self._states] + [variable.error for variable in provided]
        for error in errors:
            if error is not None and error.code != Cancelled.code and error.origin not in self._told:
                raise self._located(error)

    @property
    def seed_prefix(self) -> str:
        """What the seeds of this run have in common."""
        return run_of(self.session.seed, self.index)

    def seed_at(self, var_id: int, place: str) -> int | None:
        """The seed of a gen that names none; in a trace None, and the place is kept."""
        if self.session.is_tracing:
            self.places[var_id] = place
            return None
        return derived_seed(self.seed_prefix, place)

    @property
    def states(self) -> list[State]:
        """Its states so far, the root first."""
        return list(self._states)

    def told(self, error: ErrorInfo) -> AgentflowError:
        """The exception of a failure that is now raised in the program: how to go on is up to it."""
        self._told.add(error.origin)
        return self._located(error)

    def _located(self, error: ErrorInfo) -> AgentflowError:
        """The exception, with a note that names the program's line whose op failed."""
        exception = error.to_exception()
        place = error.place
        state = self.session.state_of(place[0]) if place is not None else None
        line = state.line_of(place[1]) if state is not None and place is not None else None
        if line is not None:
            exception.add_note(f"what failed was appended at {line}")
        return exception

    def adopt(self, state: State) -> State:
        """A state of this run. For the run and ``State.fork``."""
        self._states.append(state)
        self.session.register(state)
        return state

    def touch(self, variable: Variable[Any]) -> None:
        """A variable is new, or has news: whoever watches hears of it."""
        if variable.is_done:
            if self._variables.pop(variable.id, None) is not None and variable.error is not None:
                self._failed.append(variable)
        else:
            self._variables.setdefault(variable.id, variable)
        if not variable.is_shown:
            return
        for stream in self._streams:
            stream.touch(variable)

    def watch(self, is_over: Callable[[], bool], *, as_sent: bool = False) -> EventStream:
        """The events of all variables of this run until ``is_over``; replays what there is."""
        stream = EventStream(is_over, as_sent=as_sent)
        for state in self._states:
            for variable in state.variables:
                stream.touch(variable)
        self._streams.add(stream)
        return stream

    def watch_state(self, state: State) -> EventStream:
        """The events of one state's variables, until all that it has now are done."""
        stream = _StateStream(state)
        for variable in state.variables:
            stream.touch(variable)
        self._streams.add(stream)
        return stream

    def wake_streams(self) -> None:
        """Something ended: streams look whether they are over."""
        for stream in self._streams:
            stream.wake()

    def close(self) -> None:
        """All its states end."""
        for state in reversed(self._states):
            state.close()
        self.wake_streams()

    @property
    def is_unfinished(self) -> bool:
        """Whether some of its variables are not done."""
        return bool(self._variables)


class RootState(State):
    """What ``flow.state()`` gives: a state without a program, which leaving its ``async with`` ends."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or self._run.is_unfinished:
            self.cancel()
        self._run.close()


class _StateStream(EventStream):
    """Raises at its end what failed of the state's variables."""

    def __init__(self, state: State) -> None:
        super().__init__(lambda: all(variable.is_done for variable in state.variables))
        self._state = state
        self._has_ended = False

    def touch(self, variable: Variable[Any]) -> None:
        if variable.state is self._state:
            super().touch(variable)

    async def __anext__(self) -> TextDelta | VariableDone:
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            if not self._has_ended:
                self._has_ended = True
                for variable in self._state.variables:
                    variable.raise_failure()
            raise
