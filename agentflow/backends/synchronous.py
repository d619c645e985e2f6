"""The synchronous doors, for scripts: a program run from ordinary code, with an event loop of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

import anyio

from agentflow.backends.open_session import session as open_session
from agentflow.errors import ProgramError
from agentflow.language.map import DEFAULT_CONCURRENCY
from agentflow.language.map_inputs import Inputs, ItemT, ManyOf, MapOptions
from agentflow.language.map_work import OnError
from agentflow.language.run import check_program
from agentflow.language.session import Session
from agentflow.language.state import State

P = ParamSpec("P")
ArgTs = TypeVarTuple("ArgTs")
ResultT = TypeVar("ResultT")


@overload
def run(
    program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
    *args: Any,
    session: Session | None,
    **kwargs: Any,
) -> ResultT: ...
@overload
def run(
    program: Callable[Concatenate[State, P], Awaitable[ResultT]], *args: P.args, **kwargs: P.kwargs
) -> ResultT: ...
def run(  # type: ignore[misc]  # a program's argument that is called session cannot be given
    program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
    *args: Any,
    session: Session | None = None,
    **kwargs: Any,
) -> ResultT:
    """Runs a program and gives what it returns, as ``await flow.run(...)`` does in a session. For
    scripts: it opens ``session`` (default: ``af.session()``), runs, and closes it again.

    All keyword arguments but ``session`` are the program's. Type checkers compare the arguments with the
    program's, unless ``session`` stands among them. ``ProgramError`` inside a running event
    loop (a notebook has one): await ``flow.run`` there. Ctrl-C cancels the program and raises
    ``KeyboardInterrupt``.

    >>> af.run(judge, essay)
    >>> af.run(judge, essay, session=af.session("ws://127.0.0.1:8410", seed=7))
    """

    check_program(program, "run")

    async def main() -> ResultT:
        async with open_session() if session is None else session as flow:
            return await flow.run(program, *args, **kwargs)

    return _wait_for(main, "run")


class SessionMapOptions(MapOptions, total=False):
    """And what ``af.map`` takes."""

    session: Session | None


@overload
def map(
    program: Callable[[State, ItemT], Awaitable[ResultT]],
    inputs: ManyOf[ItemT],
    *,
    on_error: Literal["raise"] = ...,
    **options: Unpack[SessionMapOptions],
) -> list[ResultT]: ...
@overload
def map(
    program: Callable[[State, ItemT], Awaitable[ResultT]],
    inputs: ManyOf[ItemT],
    *,
    on_error: Literal["return"],
    **options: Unpack[SessionMapOptions],
) -> list[ResultT | Exception]: ...
@overload
def map(
    program: Callable[[State, *ArgTs], Awaitable[ResultT]],
    inputs: ManyOf[tuple[*ArgTs]],
    *,
    on_error: Literal["raise"] = ...,
    **options: Unpack[SessionMapOptions],
) -> list[ResultT]: ...
@overload
def map(
    program: Callable[[State, *ArgTs], Awaitable[ResultT]],
    inputs: ManyOf[tuple[*ArgTs]],
    *,
    on_error: Literal["return"],
    **options: Unpack[SessionMapOptions],
) -> list[ResultT | Exception]: ...
@overload
def map(
    program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
    inputs: ManyOf[dict[str, Any]],
    *,
    on_error: Literal["raise"] = ...,
    **options: Unpack[SessionMapOptions],
) -> list[ResultT]: ...
@overload
def map(
    program: Callable[Concatenate[State, ...], Awaitable[ResultT]],
    inputs: ManyOf[dict[str, Any]],
    *,
    on_error: Literal["return"],
    **options: Unpack[SessionMapOptions],
) -> list[ResultT | Exception]: ...
def map(
    program: Callable[Concatenate[State, ...], Awaitable[Any]],
    inputs: Inputs,
    *,
    concurrency: int = DEFAULT_CONCURRENCY,
    progress: bool = False,
    on_error: OnError = "raise",
    session: Session | None = None,
) -> list[Any]:
    """Runs a program on many inputs and gives the list of its results, as ``await flow.map(...)``
    does in a session; see there. For scripts: it opens ``session`` (default: ``af.session()``) and
    closes it again. ``ProgramError`` inside a running event loop.

    >>> af.map(judge, essays, progress=True)
    """

    check_program(program, "map")

    async def main() -> list[Any]:
        async with open_session() if session is None else session as flow:
            return await flow.map(
                program, inputs, concurrency=concurrency, progress=progress, on_error=on_error
            )

    return _wait_for(main, "map")


def _wait_for(main: Callable[[], Awaitable[ResultT]], name: str) -> ResultT:
    if _is_in_a_loop():
        raise ProgramError(
            f"af.{name}(...) waits for its result and would block the event loop that runs here: "
            f"use `await flow.{name}(...)` inside `async with af.session() as flow`"
        )
    try:
        return anyio.run(main)
    except KeyboardInterrupt:
        # How the loop and its tasks were cancelled says nothing to whoever pressed the keys.
        raise KeyboardInterrupt from None


def _is_in_a_loop() -> bool:
    try:
        anyio.get_cancelled_exc_class()
    except RuntimeError:
        return False
    return True
