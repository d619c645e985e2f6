"""The HTTP APIs behind a real web server in a separate thread, on the deterministic engine: for tests with
the real clients. Look at the server through ``call`` and the methods here only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from support.direct_compiler import direct_compiler
from support.fake_engine import TEMPLATE, FakeEngine
from support.holds import until
from support.sent_requests import SentRequests

from agentflow.backends.apis.serving import ApiBackend
from agentflow.backends.local import open_backend_generator
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.compiler import LOADER, ConstraintCompiler, constraint_compiler
from agentflow.engine.grammar.compiler.messages import CompileLimits
from agentflow.engine.messages import EngineStats
from agentflow.engine.store.embedding_folder import EmbeddingFolder
from agentflow.engine.tenant import ANONYMOUS
from agentflow.engine.text.chat_template import ChatTemplate
from agentflow.server.app import Access
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.models.api_model import ApiModel
from agentflow.server.models.models import EngineModel, Model, Models
from agentflow.server.serve import RunningServer, running_server
from agentflow.server.service import Service
from agentflow.server.stores.shared import SharedStore
from agentflow.server.tenants.keys import Tenants
from agentflow.server.tenants.rate_limit import TenantGate

MODEL = "fake"
EMBEDDER = "embedder"
VENDOR = "vendor"
ResultT = TypeVar("ResultT")


@dataclass
class ApiServer:
    """``url``: such as ``http://127.0.0.1:4000``. ``engine``: its gate pauses and resumes steps."""

    url: str
    engine: FakeEngine
    _server: RunningServer
    _portal: BlockingPortal

    def call(self, function: Callable[..., ResultT], *args: object) -> ResultT:
        """Calls a function, or waits for a coroutine function, in the server's loop."""
        return self._portal.call(function, *args)

    @property
    def service(self) -> Service:
        """The parts of the server."""
        return self._server.service

    @property
    def generator(self) -> EngineGenerator:
        """The generator of a server without keys."""
        generator = self.service.models.find(MODEL, ANONYMOUS).generator(ANONYMOUS)
        assert isinstance(generator, EngineGenerator)
        return generator

    def stats(self) -> EngineStats:
        """The engine's current statistics."""
        return self.call(self.generator.engine_stats)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Waits, in the server's loop, for a condition without an event."""

        async def wait() -> None:
            with anyio.fail_after(30):
                await until(holds)

        self.call(wait)

    def observe_requests(self) -> SentRequests:
        """The requests that the engine's client sends from now on."""
        requests = SentRequests()
        self.call(self.generator.observe, requests)
        return requests

    def assert_idle(self) -> None:
        """Nothing runs or waits, and no slot is in use."""
        self.call(self.engine.assert_idle)


@contextmanager
def api_server(
    engine: FakeEngine | None = None,
    *,
    template: ChatTemplate = TEMPLATE,
    tenants: Tenants | None = None,
    gate: TenantGate | None = None,
    limits: HttpLimits | None = None,
    constraints: bool = True,
    compile_limits: CompileLimits | None = None,
    compile_loader: str = LOADER,
    server_limits: ServerLimits | None = None,
    max_wait_s: float | None = None,
    hosts: tuple[str, ...] | None = None,
    has_page: bool = True,
    embedding: EmbeddingFolder | None = None,
    embedder: FakeEngine | None = None,
    vendor: ApiBackend | None = None,
    shared: SharedStore | None = None,
) -> Iterator[ApiServer]:
    """A server on a free port, whose model is called ``fake``. ``embedder``: the engine of the model
    ``embedder``. ``vendor``: the backend of the model ``vendor``. ``embedding``: the folder of the
    engines' embedding. ``gate``: checks its tenants' requests. ``constraints``: compiles them; under
    ``compile_limits`` or by another ``compile_loader``, in a process. ``hosts``: its names. ``shared``:
    the store of several servers."""
    engine = engine or FakeEngine()

    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(engine.open_client())
            compiler: ConstraintCompiler | None = None
            if constraints:
                is_direct = compile_limits is None and compile_loader == LOADER
                compiler = await stack.enter_async_context(
                    direct_compiler()
                    if is_direct
                    else constraint_compiler(compile_limits, loader=compile_loader)
                )
            model = EngineModel(
                MODEL,
                client,
                template,
                compiler=compiler,
                gate=gate,
                max_wait_s=max_wait_s,
                embedding=embedding,
            )
            models: list[Model] = [model]
            if embedder is not None:
                other = await stack.enter_async_context(embedder.open_client())
                models.append(EngineModel(EMBEDDER, other, template, gate=gate, embedding=embedding))
            if vendor is not None:
                generator = await stack.enter_async_context(open_backend_generator(vendor))
                models.append(ApiModel(VENDOR, generator, gate=gate))
            yield Models(models, compiler, gate)

    async def run() -> AbstractAsyncContextManager[RunningServer]:
        access = Access(tenants or Tenants(), allowed_hosts=hosts, has_page=has_page)
        return running_server(
            open_models, limits=server_limits, http_limits=limits, access=access, shared=shared
        )

    with contextlib.ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal("asyncio"))
        server = stack.enter_context(portal.wrap_async_context_manager(portal.call(run)))
        yield ApiServer(server.url.replace("ws://", "http://"), engine, server, portal)
