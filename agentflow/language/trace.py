"""Tracing: a program is run with abstract arguments and without a model, and what it appends is collected
as a graph.

Text arguments that are not given, and every awaited value, are stand-ins: they can be appended, wired,
transformed and returned, and whoever looks at them is refused with the line that does so. What the
program does between its ops (a loop over a given list, say) is done once, now.

A graph goes to the backend in one op, and its result comes back: for ``flow.submit``, and where a graph is
mapped over inputs or streamed.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from agentflow.errors import BadArgument, DataDependent
from agentflow.language.graph import Graph, Output
from agentflow.language.recorder import ProgramLine, calling_line
from agentflow.language.run import Run, called
from agentflow.language.session import Session
from agentflow.language.state import State
from agentflow.language.variable import Reference, Variable
from agentflow.protocol import ops
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.constraint import CONSTRAINT_KINDS
from agentflow.protocol.events import Capabilities
from agentflow.protocol.transform import Transform

if TYPE_CHECKING:
    from agentflow.language.session import Session


_LEFT_OUT = ops.Await | ops.Close | ops.GetStats
_EVERYTHING = Capabilities(model="a trace", constraints=CONSTRAINT_KINDS, images=True, conversations=True)


class StandIn(Reference[str]):
    """A text that is not there: an argument of the program, or a value that it has awaited."""

    def __init__(self, source: Variable[Any], transforms: tuple[Transform, ...] = ()) -> None:
        self.source = source
        self.transforms = transforms
        self._marker_id = source.state.session.next_id()
        source.hold(self)

    @property
    def shown_name(self) -> str:
        return f"the value of {self.source.name!r}"

    @property
    def marker_id(self) -> int:
        return self._marker_id

    def __await__(self) -> Generator[object, None, NoReturn]:
        raise BadArgument(f"{self.shown_name} is a value already: it cannot be awaited")

    def _refuse(self, what: str) -> NoReturn:
        raise _data_dependent(
            f"{self.shown_name} is {what}, and what the program does next would follow from it"
        )

    def __str__(self) -> str:
        self._refuse("turned into a string")

    def __iter__(self) -> NoReturn:
        self._refuse("iterated over")

    def __int__(self) -> NoReturn:
        self._refuse("turned into a number")

    def __float__(self) -> NoReturn:
        self._refuse("turned into a number")

    def __lt__(self, other: object) -> NoReturn:
        self._refuse("compared")

    __le__ = __gt__ = __ge__ = __lt__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"asked for its {name!r}")


def _data_dependent(what: str) -> DataDependent:
    advice = "a trace has no values. Use flow.run, or give the value to trace(...)"
    return DataDependent(f"{calling_line() or 'the program'}: {what}: {advice}")


class _Collector:
    """A connection that keeps what is sent, and answers nothing."""

    capabilities = _EVERYTHING

    def __init__(self) -> None:
        self.ops: list[ops.Op] = []
        self.cancelled_at: ProgramLine | None = None

    def send(self, sent: Sequence[ops.Op]) -> None:
        self.ops += sent
        if self.cancelled_at is None and any(isinstance(op, ops.Cancel) for op in sent):
            self.cancelled_at = calling_line()

    def end(self, error: BaseException | None) -> None:
        pass


class _Tracer:
    def connect(self, deliver: Deliver, lost: Lost) -> AbstractAsyncContextManager[Connection]:
        return _collecting()


@asynccontextmanager
async def _collecting() -> AsyncIterator[Connection]:
    yield _Collector()


class TraceSession(Session):
    """A session in which nothing runs: awaits give stand-ins at once."""

    def __init__(self) -> None:
        super().__init__(_Tracer(), seed=0)
        self.collected = _Collector()
        self._connection = self.collected

    @property
    def is_tracing(self) -> bool:
        return True

    def needs_values(self, what: str) -> NoReturn:
        raise _data_dependent(what)

    def awaited(self, variable: Variable[Any]) -> StandIn:
        """What an await of ``variable`` gives."""
        return StandIn(variable)


def trace(function: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """The graph of ``function``, called with these arguments after its state; see ``Program.trace``."""
    session = TraceSession()
    run = Run(session)
    arguments, bound = _abstract(function, run.root, args, kwargs)
    result = _driven(called(function, *bound.args, **bound.kwargs), function.__name__)
    recorded = [op for op in session.collected.ops if not isinstance(op, _LEFT_OUT)]
    if session.collected.cancelled_at is not None:
        raise DataDependent(
            f"{session.collected.cancelled_at}: a state is cancelled, which a graph cannot do"
        )
    variables = {variable.id: variable for state in run.states for variable in state.variables}
    return Graph(
        name=function.__name__,
        ops=tuple(recorded),
        arguments={name: variable.id for name, variable in arguments.items()},
        result=_as_output(result, function.__name__),
        places=run.places,
        value_types={number: variable.value_type for number, variable in variables.items()},
    )


def _abstract(
    function: Callable[..., Any], root: State, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Variable[str]], inspect.BoundArguments]:
    """Stand-ins for the text parameters that are not given; what has another type must be given."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind_partial(root, *args, **kwargs)
    except TypeError as error:
        raise BadArgument(f"trace of {function.__name__}: {error}") from None
    arguments: dict[str, Variable[str]] = {}
    for parameter in signature.parameters.values():
        if parameter.name in bound.arguments or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if parameter.annotation in (str, "str", parameter.empty):
            arguments[parameter.name] = root.argument(parameter.name)
            bound.arguments[parameter.name] = StandIn(arguments[parameter.name])
        elif parameter.default is parameter.empty:
            raise BadArgument(
                f"trace of {function.__name__}: {parameter.name!r} is no text, so give its value: "
                f"trace({parameter.name}=…)"
            )
    bound.apply_defaults()
    return arguments, bound


def _driven(awaitable: Awaitable[Any], name: str) -> Any:
    """What it returns: nothing in a trace waits, so its first step is its last."""
    steps = awaitable.__await__()
    try:
        next(steps)
    except StopIteration as stop:
        return stop.value
    steps.close()
    raise DataDependent(f"{name} waits for something that is not the model: a trace cannot")


def _as_output(result: Any, name: str) -> Any:
    match result:
        case StandIn() if not result.transforms:
            return Output(result.source.id)
        case list():
            return [_as_output(item, name) for item in result]
        case tuple():
            return tuple([_as_output(item, name) for item in result])
        case dict():
            return {key: _as_output(item, name) for key, item in result.items()}
        case Reference():
            raise BadArgument(f"{name} returns {result.shown_name}, not awaited: await it, or set a variable")
        case _:
            return result
