"""Model calls of LangChain, each as part of a program: the run at the root of its chain.

``complete``, ``stream`` and their asynchronous versions make a call, with errors of LangChain's types.
``RunTree`` is a callback handler that records the root of every chain, tool and retriever, because a model
call knows only its parent; when the root ends, its program ends. The calls of a batch are one program, too.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from typing import Any, Final
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from agentflow.integrations import Answer, Delta, ModelCall, ModelConnection, Objective
from langchain_agentflow.errors import langchain_errors

# Runs whose end is never reported (of an abandoned iterator, for example) are dropped, the oldest first.
MAX_RUNS: Final = 10_000


def complete(
    connection: ModelConnection, call: ModelCall, run_manager: Any, max_retries: int
) -> list[Answer]:
    """Returns the complete answers, by index; blocks until then."""
    with langchain_errors():
        return connection.complete(call, *program_of(run_manager, connection), max_retries=max_retries)


async def acomplete(
    connection: ModelConnection, call: ModelCall, run_manager: Any, max_retries: int
) -> list[Answer]:
    """Like ``complete``, without blocking the event loop."""
    with langchain_errors():
        program, objective = program_of(run_manager, connection)
        return await connection.acomplete(call, program, objective, max_retries=max_retries)


def stream(
    connection: ModelConnection, call: ModelCall, run_manager: Any, max_retries: int
) -> Generator[Delta | Answer, None, None]:
    """Yields the answer piece by piece and then complete; blocks between them."""
    program, objective = program_of(run_manager, connection)
    with (
        langchain_errors(),
        closing(connection.stream(call, program, objective, max_retries=max_retries)) as events,
    ):
        yield from events


async def astream(
    connection: ModelConnection, call: ModelCall, run_manager: Any, max_retries: int
) -> AsyncGenerator[Delta | Answer, None]:
    """Like ``stream``, without blocking the event loop."""
    program, objective = program_of(run_manager, connection)
    with langchain_errors():
        async with aclosing(connection.astream(call, program, objective, max_retries=max_retries)) as events:
            async for event in events:
                yield event


class RunTree(BaseCallbackHandler):
    """The root of each unfinished run, and the connections on which its program ends with it."""

    run_inline = True  # not in a thread: the handler never blocks
    ignore_llm = ignore_chat_model = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        self._roots: OrderedDict[UUID, UUID] = OrderedDict()
        self._at_end: dict[UUID, set[ModelConnection]] = {}
        self._after_fork()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # in a forked process no thread releases the old one

    def __reduce__(self) -> tuple[Callable[[], RunTree], tuple[()]]:
        return _singleton, ()  # copies of callbacks refer to the same object

    def root_of(self, parent_id: UUID | None) -> UUID | None:
        """Returns the root run of a model call; None if the call has no parent, or if the root began without
        this handler, which would not see its end."""
        return None if parent_id is None else self._roots.get(parent_id)

    def end_with(self, root: UUID, connection: ModelConnection) -> None:
        """Ends the root's program on this connection when the root ends."""
        with self._lock:
            if root in self._roots:
                self._at_end.setdefault(root, set()).add(connection)

    def on_chain_start(
        self, *args: Any, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """Records a chain, a graph, an agent, a retriever, or a tool, which may call models."""
        with self._lock:
            self._roots[run_id] = run_id if parent_run_id is None else self._roots.get(parent_run_id, run_id)
            oldest = next(iter(self._roots)) if len(self._roots) > MAX_RUNS else None
        if oldest is not None:
            self.on_chain_end(run_id=oldest)

    on_tool_start = on_retriever_start = on_chain_start

    def on_chain_end(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        """Records the end of a run, which may have failed or been cancelled."""
        with self._lock:
            is_root = self._roots.pop(run_id, None) == run_id
            connections = self._at_end.pop(run_id, set()) if is_root else set()
        for connection in connections:
            connection.end_program(str(run_id))

    on_tool_end = on_retriever_end = on_chain_end
    on_chain_error = on_tool_error = on_retriever_error = on_chain_end


RUNS: Final = RunTree()


def _singleton() -> RunTree:
    return RUNS


_runs: ContextVar[RunTree | None] = ContextVar("agentflow_runs", default=RUNS)
register_configure_hook(_runs, inheritable=True)

_batch: ContextVar[tuple[str, Objective] | None] = ContextVar("agentflow_batch", default=None)


@contextmanager
def one_batch(connections: Sequence[ModelConnection], num_calls: int) -> Iterator[None]:
    """Makes the model calls in the block one program, unless there is only one of them."""
    if num_calls < 2:
        yield
        return
    name = f"batch {uuid4()}"
    token = _batch.set((name, "throughput"))
    try:
        yield
    finally:
        _batch.reset(token)
        for connection in connections:
            connection.end_program(name)


def _parent_here() -> UUID | None:
    """Returns the current run, for streamed models, which get no run manager from LangChain."""
    callbacks = (var_child_runnable_config.get() or {}).get("callbacks")
    return callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None


def program_of(run_manager: Any, connection: ModelConnection) -> tuple[str, Objective | None]:
    """Returns the name and the objective of the program of a call with this run manager."""
    batch = _batch.get()
    if batch is not None:
        return batch
    root = RUNS.root_of(_parent_here() if run_manager is None else run_manager.parent_run_id)
    if root is None:
        return "", None
    RUNS.end_with(root, connection)
    return str(root), None
