"""The embedded engine, whose model runs in a thread of this process.

``interpreted`` interprets ops in this process with any generator; ``Scripted`` uses it too.
``open_backend_generator`` opens a generator without a session. The engine is
imported only when a session opens; nothing else in the frontend needs it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from types import MappingProxyType
from typing import Any, Generic, Literal

from agentflow.errors import ModelError, NotSupported
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.protocol.events import Event
from agentflow.protocol.wire import DEFAULT_MODEL
from agentflow.runtime.generator import ContextT, Embedder, Generator
from agentflow.runtime.interpreter.interpreter import Interpreter
from agentflow.runtime.task_group import open_task_group


class InterpretedConnection(Generic[ContextT]):
    """A ``Connection`` to an interpreter in the same event loop. ``StateModels.admit`` must have accepted its
    ops. ``generator``: of the default model."""

    is_connected = True
    has_room = True

    def __init__(self, interpreter: Interpreter[ContextT], generator: Generator[ContextT]) -> None:
        self.interpreter = interpreter
        self.generator = generator
        self.models = interpreter.models
        self.send = interpreter.submit_all

    def end(self, error: BaseException | None) -> None:
        pass


@asynccontextmanager
async def interpreted(
    generator: Generator[ContextT],
    deliver: Deliver,
    embedders: Mapping[str, Embedder] = MappingProxyType({}),
    models: Mapping[str, Generator[ContextT]] = MappingProxyType({}),
    *,
    max_states: float | None = None,
) -> AsyncIterator[InterpretedConnection[ContextT]]:
    """Interprets ops for the duration of the scope, whose end aborts running ops.

    Args:
        generator: Runs the states of the default model.
        deliver: Receives the events.
        embedders: Further models that make embeddings, by name.
        models: The generators of further models, by name.
        max_states: The most states that may be open; None: as many as in a session on a server.
    """
    with ExitStack() as at_the_end:
        async with open_task_group() as group:
            interpreter = Interpreter(
                generator,
                group,
                models=models,
                embedders=embedders,
                max_states=max_states,
            )
            at_the_end.callback(interpreter.close)
            group.start_soon(interpreter.events.deliver_to, deliver)
            try:
                yield InterpretedConnection(interpreter, generator)
            finally:
                group.cancel_scope.cancel()


@asynccontextmanager
async def open_backend_generator(backend: Backend) -> AsyncIterator[Generator[Any]]:
    """The generator of the default model of a backend that runs ops in this process, for a server that runs
    the ops of its sessions on it. ``NotSupported`` for other backends."""
    async with backend.connect(_ignore_events, _ignore_loss) as connection:
        if not isinstance(connection, InterpretedConnection):
            raise NotSupported(f"{backend!r} runs its ops elsewhere: a server cannot serve its model")
        yield connection.generator


def _ignore_events(events: Iterable[Event]) -> None:
    """No op runs in this session, so there are none."""


def _ignore_loss(error: Exception, *, is_final: bool = True) -> None:
    """The calls of the generator fail themselves."""


class Embedded:
    """An engine in this process, the default of ``af.session()``. The defaults are the same as in
    ``agentflow serve``.

    Args:
        model: A short name (``agentflow models`` lists them), ``OWNER/NAME`` on the Hugging Face hub, a model
            folder or a GGUF file. A model of the hub is pulled if it is missing.
        embed_model: Another model, which makes the embeddings of ``flow.embed``. It runs in a separate engine
            with the same ``dtype``, ``device`` and ``threads``.
        task: ``embed``: ``model`` makes embeddings and generates nothing.
        dtype: ``auto``, ``bfloat16``, ``float16`` or ``float32``. ``auto`` is ``bfloat16``; on a CPU,
            quantised weights of a GGUF file keep their format.
        quantize: ``int8``, ``int4`` or ``fp8`` (8-bit floats, on newer GPUs), for weights that are not
            quantised.
        kv_dtype: ``fp8`` keeps keys and values in 8-bit floats, on newer GPUs; ``auto`` as ``dtype`` says.
        chat_template: A Jinja file that replaces the model's chat template.
        device: ``cpu`` or ``cuda``; None to choose one.
        kv_tokens: The size of the KV pool in tokens, for the cache and running requests together; None to
            choose one.
        token_budget: The maximum number of prompt tokens per step.
        max_running: The maximum number of requests per batch.
        threads: The number of CPU threads.
        tensor_parallel: The number of processes over which the model is divided: each has a GPU, from
            ``device`` on, or on a CPU a part of ``threads``.
        cache: False turns the prefix cache off.
        loras: Adapters (LoRA) as ``NAME=PATH``.
        adapter: The name of the adapter that the session uses.

    >>> async with af.session(backend=af.Embedded("smollm2-135m", dtype="float32")) as flow:
    ...     grade = await flow.run(judge, essay)
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        embed_model: str | None = None,
        task: Literal["generate", "embed"] = "generate",
        dtype: str = "auto",
        quantize: str | None = None,
        kv_dtype: str = "auto",
        chat_template: str | os.PathLike[str] | None = None,
        device: str | None = None,
        kv_tokens: int | None = None,
        token_budget: int | None = None,
        max_running: int = 64,
        threads: int | None = None,
        tensor_parallel: int = 1,
        cache: bool = True,
        loras: Sequence[str] = (),
        adapter: str = "",
    ) -> None:
        self._options: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype,
            "quantize": quantize,
            "kv_dtype": kv_dtype,
            "chat_template": None if chat_template is None else os.fspath(chat_template),
            "device": device,
            "kv_tokens": kv_tokens,
            "token_budget": token_budget,
            "max_running": max_running,
            "threads": threads,
            "tensor_parallel": tensor_parallel,
            "cache": cache,
            "max_unfinished": None,
            "loras": tuple(loras),
            "adapter": adapter,
            "task": task,
        }
        shared = ("dtype", "device", "threads", "max_unfinished")
        self._embedding_options: dict[str, Any] | None = None
        if embed_model is not None:
            self._embedding_options = {name: self._options[name] for name in shared}
            self._embedding_options |= {"model": str(embed_model), "task": "embed"}

    @property
    def source(self) -> str:
        """The models and the options that change their answers. For the keys of caches."""
        names = (
            "model",
            "task",
            "dtype",
            "quantize",
            "kv_dtype",
            "chat_template",
            "loras",
            "adapter",
            "device",
        )
        embed_model = (self._embedding_options or {}).get("model")
        return repr({"embed_model": embed_model, **{name: self._options[name] for name in names}})

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        """Loads the model and starts the engine. For the session."""
        try:
            from agentflow.engine.local_engine import open_generator
        except ImportError as error:
            raise ModelError(
                f"the embedded engine needs the package {error.name!r}: pip install 'agentflow-lm[engine]' "
                "(`agentflow doctor` shows the build of torch that fits), or give the url of a server"
            ) from error
        async with AsyncExitStack() as stack:
            # The engine's memory first: this takes only the rest.
            generator = await stack.enter_async_context(open_generator(**self._options))
            embedders: dict[str, Embedder] = {}
            if self._embedding_options is not None:
                embedder = await stack.enter_async_context(open_generator(**self._embedding_options))
                embedders[embedder.capabilities.model] = embedder
            yield await stack.enter_async_context(interpreted(generator, deliver, embedders))
