"""The drivers of a walk: ``Awaiting`` runs its coroutines on the caller's event loop, ``Blocking`` in the
caller's threads, where they never suspend.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_executor_for_config

from agentflow.integrations import ModelConnection, UserCode, open_task_group
from langchain_agentflow.errors import langchain_errors

ResultT = TypeVar("ResultT")


class Driver(Protocol):
    """Runs a walk's coroutines, and the waiting calls in them."""

    config: RunnableConfig

    async def run_in_loop(
        self, connection: ModelConnection, function: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        """Runs a function in the connection's loop."""

    async def invoke(self, part: Runnable[Any, Any], value: Any) -> Any:
        """Runs a part of the chain in this process."""

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Runs coroutines concurrently."""


class Awaiting:
    def __init__(self, config: RunnableConfig) -> None:
        self.config = config

    async def run_in_loop(
        self, connection: ModelConnection, function: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        with langchain_errors():
            return await connection.shared.loop.arun(function)

    async def invoke(self, part: Runnable[Any, Any], value: Any) -> Any:
        with UserCode("a part of the chain"):
            return await part.ainvoke(value, self.config)

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        results: list[Any] = [None] * len(coroutines)

        async def run(index: int, coroutine: Coroutine[Any, Any, Any]) -> None:
            results[index] = await coroutine

        async with open_task_group() as group:
            for index, coroutine in enumerate(coroutines):
                group.start_soon(run, index, coroutine)
        return results


class Blocking:
    def __init__(self, config: RunnableConfig) -> None:
        self.config = config

    async def run_in_loop(
        self, connection: ModelConnection, function: Callable[[], Awaitable[ResultT]]
    ) -> ResultT:
        with langchain_errors():
            return connection.shared.loop.run(function)

    async def invoke(self, part: Runnable[Any, Any], value: Any) -> Any:
        return part.invoke(value, self.config)

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        with get_executor_for_config(self.config) as threads:
            futures = [threads.submit(driven, coroutine) for coroutine in coroutines]
            return [future.result() for future in futures]


def driven(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("a blocking run was suspended")
