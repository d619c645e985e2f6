"""The embedded engine, whose model runs in this process, in a thread of its own.

``interpreted`` interprets ops in this process with any generator; ``Scripted`` uses it too. The engine is
imported only when a session opens; nothing else in the frontend needs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Generic

from agentflow.errors import ModelError
from agentflow.protocol.backend import Connection, Deliver, Lost
from agentflow.protocol.events import Capabilities
from agentflow.protocol.ops import Op
from agentflow.protocol.wire import DEFAULT_MODEL
from agentflow.runtime.generator import ContextT, Generator
from agentflow.runtime.interpreter import Interpreter
from agentflow.runtime.task_group import open_task_group


class _InterpretedConnection(Generic[ContextT]):
    """A ``Connection`` to an interpreter in the same event loop."""

    def __init__(self, interpreter: Interpreter[ContextT], capabilities: Capabilities) -> None:
        self._interpreter = interpreter
        self.capabilities = capabilities

    def send(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self._interpreter.submit(op)

    def end(self, error: BaseException | None) -> None:
        pass


@asynccontextmanager
async def interpreted(generator: Generator[ContextT], deliver: Deliver) -> AsyncIterator[Connection]:
    """Interprets ops with ``generator`` for the duration of the scope, whose end aborts running ops."""
    with ExitStack() as at_the_end:
        async with open_task_group() as group:
            interpreter = Interpreter(generator, group)
            at_the_end.callback(interpreter.close)

            async def pump() -> None:
                while True:
                    await interpreter.events.wait()
                    deliver(interpreter.events.drain())

            group.start_soon(pump)
            try:
                yield _InterpretedConnection(interpreter, generator.capabilities)
            finally:
                group.cancel_scope.cancel()


class Embedded:
    """An engine in this process, the default of ``af.session()``.

    ``model``: a short name (``agentflow models`` lists them), ``OWNER/NAME`` on the Hugging Face hub, a model
    folder or a GGUF file. A model of the hub is pulled if it is missing. ``dtype``: ``auto``, ``bfloat16``,
    ``float16`` or ``float32``; ``auto`` is ``bfloat16``, but on a CPU quantised weights of a GGUF file stay
    as they are. ``quantize``: ``int8`` or ``int4``, for weights that are not quantised. ``device``: ``cpu``,
    ``cuda``, or None to choose one. ``kv_tokens``: the size of the KV pool in tokens, for the cache and
    running requests together; None to choose one. ``token_budget``: prompt tokens per step. ``max_running``:
    requests per batch. ``threads``: CPU threads. ``cache=False`` turns the prefix cache off. ``loras``:
    adapters (LoRA) as ``NAME=PATH``, and ``adapter``: the name of the one that the session uses. The defaults
    are those of ``agentflow serve``.

    >>> async with af.session(backend=af.Embedded("smollm2-135m", dtype="float32")) as flow:
    ...     grade = await flow.run(judge, essay)
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        quantize: str | None = None,
        device: str | None = None,
        kv_tokens: int | None = None,
        token_budget: int | None = None,
        max_running: int = 64,
        threads: int | None = None,
        cache: bool = True,
        loras: Sequence[str] = (),
        adapter: str = "",
    ) -> None:
        self._options: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype,
            "quantize": quantize,
            "device": device,
            "kv_tokens": kv_tokens,
            "token_budget": token_budget,
            "max_running": max_running,
            "threads": threads,
            "cache": cache,
            "max_unfinished": None,
            "loras": tuple(loras),
            "adapter": adapter,
        }

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Loads the model and starts the engine. For the session."""
        try:
            from agentflow.engine.local_engine import open_generator
        except ImportError as error:
            raise ModelError(
                f"the embedded engine needs the package {error.name!r}: pip install 'agentflow-lm[engine]' "
                "(`agentflow doctor` names the build of torch that fits), or give the url of a server"
            ) from error
        async with (
            open_generator(**self._options) as generator,
            interpreted(generator, deliver) as connection,
        ):
            yield connection
