"""``wired``: a chain that runs as one program of agentflow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from langchain_core.exceptions import ModelAPIError, ModelConnectionError, ModelRateLimitError
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, patch_config
from langchain_core.runnables.utils import AddableDict

from agentflow.integrations import ModelConnection
from langchain_agentflow.chains.driver import Awaiting, Blocking, driven
from langchain_agentflow.chains.parts import UnwiredPart, connections_in, unwired_parts
from langchain_agentflow.chains.values import Pending
from langchain_agentflow.chains.walk import running
from langchain_agentflow.programs import one_batch
from langchain_agentflow.settings import MAX_THREADS

# After these, the chain runs again, unwired: its models retry.
_TRANSIENT: Final = (ModelRateLimitError, ModelAPIError, ModelConnectionError)


def wired(chain: Runnable[Any, Any]) -> WiredChain:
    """Returns the chain as one program with the same results: answers of its models are passed to later
    prompts in the backend, without a round trip.

    Sequences, ``RunnableParallel``, ``RunnablePassthrough`` and its ``assign``, ``RunnablePick``, prompt
    templates with f-strings, models of this package and ``StrOutputParser`` are wired. Other parts run in
    this process, on the values that they need; ``unwired`` lists them.

    >>> chain = wired(outline | model | StrOutputParser() | essay | model)
    >>> chain.unwired
    ()
    >>> chain.invoke({"topic": "rivers"})
    """
    return WiredChain(chain)


class WiredChain(Runnable[Any, Any]):
    """A chain that runs as one program; made by ``wired``.

    Callbacks get one run for all its wired parts. After a transient failure the chain runs again, unwired,
    unless a part has run in this process.
    """

    def __init__(self, chain: Runnable[Any, Any]) -> None:
        self.chain = chain
        self.name = f"wired {chain.get_name()}"
        self._unwired = tuple(unwired_parts(chain, is_last=True))

    @property
    def unwired(self) -> tuple[UnwiredPart, ...]:
        """The parts that run in this process, in the chain's order."""
        return self._unwired

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Runs the chain."""

        def run(value: Any, run_manager: Any, config: RunnableConfig) -> Any:
            child = patch_config(config, callbacks=run_manager.get_child())
            with running(Blocking(child), run_manager) as walk:
                try:
                    return driven(walk.result(self.chain, value))
                except _TRANSIENT:
                    if walk.has_run_here:
                        raise
            return self.chain.invoke(value, child)

        return self._call_with_config(run, input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Like ``invoke``, without blocking the event loop."""

        async def run(value: Any, run_manager: Any, config: RunnableConfig) -> Any:
            child = patch_config(config, callbacks=run_manager.get_child())
            with running(Awaiting(child), run_manager) as walk:
                try:
                    return await walk.result(self.chain, value)
                except _TRANSIENT:
                    if walk.has_run_here:
                        raise
            return await self.chain.ainvoke(value, child)

        return await self._acall_with_config(run, input, config, **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        """Yields the last answer piece by piece; a dict as a whole."""

        def run(inputs: Iterator[Any], run_manager: Any, config: RunnableConfig) -> Iterator[Any]:
            child = patch_config(config, callbacks=run_manager.get_child())
            for value in inputs:
                with running(Blocking(child), run_manager) as walk:
                    last = driven(walk.value(self.chain, value))
                    if isinstance(last, Pending):
                        yield from walk.pieces(last)
                    result = driven(walk.finished(last))
                    if not isinstance(last, Pending):
                        yield AddableDict(result) if isinstance(result, dict) else result

        yield from self._transform_stream_with_config(iter([input]), run, config, **kwargs)

    async def astream(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """Like ``stream``, without blocking the event loop."""

        async def run(
            inputs: AsyncIterator[Any], run_manager: Any, config: RunnableConfig
        ) -> AsyncIterator[Any]:
            child = patch_config(config, callbacks=run_manager.get_child())
            async for value in inputs:
                with running(Awaiting(child), run_manager) as walk:
                    last = await walk.value(self.chain, value)
                    if isinstance(last, Pending):
                        async for piece in walk.apieces(last):
                            yield piece
                    result = await walk.finished(last)
                    if not isinstance(last, Pending):
                        yield AddableDict(result) if isinstance(result, dict) else result

        async def given() -> AsyncIterator[Any]:
            yield input

        async for piece in self._atransform_stream_with_config(given(), run, config, **kwargs):
            yield piece

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs all inputs concurrently, as one program."""
        most = min(len(inputs), MAX_THREADS)
        configs: list[RunnableConfig] = [
            one if one.get("max_concurrency") is not None else {**one, "max_concurrency": most}
            for one in get_config_list(config, len(inputs))
        ]
        with one_batch(self._connections(), len(inputs)):
            return super().batch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs all inputs concurrently, as one program."""
        with one_batch(self._connections(), len(inputs)):
            return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    def _connections(self) -> list[ModelConnection]:
        return list({id(one): one for one in connections_in(self.chain)}.values())
