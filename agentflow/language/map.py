"""A program on many inputs: a list of results to await, or an ordered stream of them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from agentflow.errors import BadArgument
from agentflow.language.graph import Graph
from agentflow.language.map_inputs import Inputs, MapInputs
from agentflow.language.map_work import MapWork, OnError
from agentflow.language.run import check_program
from agentflow.protocol.amounts import is_whole

if TYPE_CHECKING:
    from rich.console import Console

    from agentflow.language.session import Session

ResultT = TypeVar("ResultT")

DEFAULT_CONCURRENCY = 64


class ProgramMap(Generic[ResultT]):
    """What ``flow.map`` gives. Nothing runs before it is awaited, iterated or entered.

    ``await`` it for the list of all results (of those not taken yet, where some have been). ``async
    for`` gives them one by one, in the order of the inputs, in bounded memory: before the first result
    that was not taken yet, at most ``4 * concurrency`` inputs are read ahead.

    Whoever may stop before the end should enter it, so that leaving the block cancels what runs and
    waits for its end:

    >>> async with flow.map(judge, essays) as grades:
    ...     async for grade in grades:
    ...         if grade == "A":
    ...             break

    Without the block, what runs is cancelled when the map is dropped (at once, after ``break`` in
    ``async for grade in flow.map(judge, essays)``) and ends with the session at the latest. A wait for
    one result that is cancelled, by a time-out for example, cancels that wait only; an ``await`` of
    the whole list that is cancelled cancels everything.
    """

    def __init__(
        self,
        session: Session,
        program: Callable[..., Awaitable[Any]] | Graph,
        inputs: Inputs,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        on_error: OnError = "raise",
        console: Console | None = None,
    ) -> None:
        if not isinstance(program, Graph):
            check_program(program, "map")
        if not is_whole(concurrency, 1, math.inf):
            raise BadArgument(f"map: concurrency={concurrency!r}: say how many may run at once, 1 or more")
        if on_error not in ("raise", "return"):
            raise BadArgument(
                f"map: on_error={on_error!r}: give 'raise' (the first failure ends the map) "
                "or 'return' (failures stand among the results)"
            )
        session.check_alive()
        self._work: MapWork[ResultT] = MapWork(
            session,
            program,
            MapInputs(inputs),
            concurrency=concurrency,
            on_error=on_error,
            console=console,
        )
        weakref.finalize(self, self._work.abandon).atexit = False

    def __await__(self) -> Generator[object, None, list[ResultT]]:
        return self._collect().__await__()

    async def _collect(self) -> list[ResultT]:
        self._work.take_all()
        try:
            return [result async for result in self]
        except BaseException:
            await self.aclose()
            raise

    def __aiter__(self) -> ProgramMap[ResultT]:
        return self

    async def __anext__(self) -> ResultT:
        work = self._work
        work.start()
        try:
            return cast(ResultT, await work.take())
        finally:
            # The traceback of an exception (a cancellation of the reader, say) keeps this frame, and would
            # keep a map that has been left from being dropped.
            del self

    async def aclose(self) -> None:
        """Cancels what still runs and waits for its end. May be repeated; iterating any further
        raises ``Cancelled``, unless all results had been taken.

        >>> grades = flow.map(judge, essays)
        >>> first = await anext(grades)
        >>> await grades.aclose()
        """
        await self._work.stop()

    async def __aenter__(self) -> ProgramMap[ResultT]:
        self._work.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
