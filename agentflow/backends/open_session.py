"""``af.session``: which backend a session runs on.

The synchronous doors, for scripts: a program run from ordinary code, with an event loop of its own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, TypeVarTuple, Unpack, overload

import anyio

from agentflow.backends.replay import replayed_seed
from agentflow.errors import BadArgument, ProgramError
from agentflow.language.map import DEFAULT_CONCURRENCY, Inputs, ItemT, ManyOf, MapOptions, OnError
from agentflow.language.program import check_program
from agentflow.language.session import Session
from agentflow.language.state import State
from agentflow.protocol.backend import Backend
from agentflow.recording.file import Recorded


def session(
    url: str | None = None,
    *,
    model: str | None = None,
    api_key: str | None = None,
    backend: Backend | None = None,
    seed: int | None = None,
    deadline_s: float | None = None,
    output_tokens: int | None = None,
    record: str | os.PathLike[str] | None = None,
) -> Session:
    """A session on a backend.

    With ``url`` (``ws://…`` or ``wss://…``; default: the variable AGENTFLOW_URL) on that server, on
    its ``model`` of that name, or its first one; with ``backend`` on that; otherwise on the embedded
    engine, which runs ``model`` (a name that ``agentflow pull`` knows, or a Hugging Face folder;
    default ``smollm2-135m``) in this process. ``api_key``: the server's; default: the variable
    AGENTFLOW_API_KEY.
    ``deadline_s`` and ``output_tokens``: what all states of the session together may take, from when
    it is entered; more raises ``DeadlineExceeded`` or ``BudgetExceeded``. ``seed``: sampling without
    a seed of its own draws the same again for the same seed. ``record``: a file to write all ops and
    events to, for ``af.Replay`` and ``agentflow replay``. It holds prompts and answers as they are.

    >>> async with af.session() as flow:
    ...     grade = await flow.run(judge, essay)
    >>> async with af.session("ws://127.0.0.1:8410", deadline_s=60, output_tokens=5000) as flow:
    ...     grade = await flow.run(judge, essay)
    """
    for name, given in {"url": url, "model": model, "api_key": api_key}.items():
        kinds = (str, os.PathLike) if name == "model" else str
        if given is not None and not isinstance(given, kinds):
            raise BadArgument(f"session: {name} must be a string, not {given!r:.200}")
    if backend is None:
        backend = _chosen_backend(url, model, api_key)
    elif url is not None or model is not None:
        raise BadArgument("session: give a backend, or a url, or a model, not several of them")
    elif not callable(getattr(backend, "connect", None)):
        raise BadArgument(
            f"session: {backend!r:.200} is no backend: give af.Scripted(…), af.Replay(…) or the like"
        )
    seed = replayed_seed(backend, seed)
    if record is not None:
        seed = secrets.randbits(63) if seed is None else seed
        backend = Recorded(backend, record, seed)
    return Session(backend, seed=seed, deadline_s=deadline_s, output_tokens=output_tokens)


_open = session  # where a parameter has its name


def _chosen_backend(url: str | None, model: str | None, api_key: str | None) -> Backend:
    url = url or os.environ.get("AGENTFLOW_URL")
    if url is None:
        from agentflow.backends.local import Embedded

        return Embedded(model) if model is not None else Embedded()
    from agentflow.backends.remote import Remote

    api_key = api_key or os.environ.get("AGENTFLOW_API_KEY") or None
    return Remote(url, api_key=api_key, model=model)


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
        async with _open() if session is None else session as flow:
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
        async with _open() if session is None else session as flow:
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
        # Ctrl-C shows no traceback of the event loop's cancelled tasks.
        raise KeyboardInterrupt from None


def _is_in_a_loop() -> bool:
    try:
        anyio.get_cancelled_exc_class()
    except RuntimeError:
        return False
    return True
