"""Which program a model call belongs to: the run of LangChain that began it all.

A handler hears of every chain, tool and retriever that begins, and remembers which one is at its root; model
calls only know what is right above them. When the root ends, so does the program.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from agentflow.integrations.client import ModelConnection
from agentflow.protocol.ops import Objective

# Runs whose end nobody tells (an iterator that was left, say) are forgotten, the oldest first.
MOST_RUNS: Final = 10_000


class RunTree(BaseCallbackHandler):
    """The root of each run that goes on, and who wants to know of its end."""

    run_inline = True  # at once, not in a thread: it only looks things up
    ignore_llm = ignore_chat_model = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        self._roots: OrderedDict[UUID, UUID] = OrderedDict()
        self._at_end: dict[UUID, set[ModelConnection]] = {}

    def root_of(self, parent_id: UUID | None) -> UUID | None:
        """Of a model call that is part of something; None for one that stands alone, or in a run that began
        elsewhere (its end would not be heard)."""
        return None if parent_id is None else self._roots.get(parent_id)

    def tell_end(self, root: UUID, connection: ModelConnection) -> None:
        """When the root ends, its program on that connection does."""
        if root in self._roots:
            self._at_end.setdefault(root, set()).add(connection)

    def _begin(self, run_id: UUID, parent_run_id: UUID | None) -> None:
        self._roots[run_id] = run_id if parent_run_id is None else self._roots.get(parent_run_id, run_id)
        while len(self._roots) > MOST_RUNS:
            self._end(next(iter(self._roots)))

    def _end(self, run_id: UUID) -> None:
        if self._roots.pop(run_id, None) == run_id:
            for connection in self._at_end.pop(run_id, ()):
                connection.end_program(str(run_id))

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A chain, a graph, an agent."""
        self._begin(run_id, parent_run_id)

    def on_tool_start(
        self,
        serialized: Any,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        """A tool, in which models may be called."""
        self._begin(run_id, parent_run_id)

    def on_retriever_start(
        self, serialized: Any, query: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        """A retriever."""
        self._begin(run_id, parent_run_id)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It has ended."""
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It has failed, or was cancelled."""
        self._end(run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It has ended."""
        self._end(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It has failed."""
        self._end(run_id)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """It has ended."""
        self._end(run_id)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """It has failed."""
        self._end(run_id)


RUNS: Final = RunTree()
_runs: ContextVar[RunTree | None] = ContextVar("agentflow_runs", default=RUNS)
register_configure_hook(_runs, inheritable=True)

_batch: ContextVar[tuple[str, Objective] | None] = ContextVar("agentflow_batch", default=None)


@contextmanager
def one_batch(connection: ModelConnection, num_calls: int) -> Iterator[None]:
    """Model calls within belong together: those of one batch, if it is one."""
    if num_calls < 2:
        yield
        return
    name = f"batch {uuid4()}"
    token = _batch.set((name, "throughput"))
    try:
        yield
    finally:
        _batch.reset(token)
        connection.end_program(name)


def _parent_here() -> UUID | None:
    """The run that this is called in: a model that is streamed is given no run manager."""
    callbacks = (var_child_runnable_config.get() or {}).get("callbacks")
    return callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None


def program_of(run_manager: Any, connection: ModelConnection) -> tuple[str, Objective | None]:
    """The name of the program that a call of this run manager belongs to, and what matters there."""
    batch = _batch.get()
    if batch is not None:
        return batch
    root = RUNS.root_of(_parent_here() if run_manager is None else run_manager.parent_run_id)
    if root is None:
        return "", None
    RUNS.tell_end(root, connection)
    return str(root), None
