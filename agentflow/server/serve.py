"""Runs the application: binds a socket before models load, serves on it with uvicorn, and shuts down cleanly.

``serve`` runs until a signal; ``running_server`` runs within a scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.engine.process.shutdown_budget import DRAIN_S, ShutdownBudget
from agentflow.errors import AgentflowError, PortInUse, ServerError
from agentflow.runtime.task_group import open_task_group
from agentflow.server.app import Access, create_app
from agentflow.server.config.limits import HttpLimits, ServerLimits
from agentflow.server.http.acceptor import Acceptor, max_open_connections
from agentflow.server.http.protocol import TimedHttpProtocol, timed_http_protocol
from agentflow.server.models.models import EngineModel, OpenModels
from agentflow.server.service import Service
from agentflow.server.stores.shared import SharedStore
from agentflow.server.websocket.sessions import Sessions

logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
_NOT_PEM = (None, "ASN1_LIB", "BAD_BASE64_DECODE", "NO_START_LINE", "PEM_LIB", "UNSUPPORTED")
"""The reasons of OpenSSL for a file that is no key in PEM format."""
# Time for open connections to close when the server stops.
SHUTDOWN_S = 2
# A frame slightly over the limit is still read, so that it can be answered with an error. The websocket
# implementation rejects a frame far over it (close code 1009).
READ_LIMIT_FACTOR = 2


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens at ``url``."""

    url: str
    app: Starlette

    @property
    def http_url(self) -> str:
        """The server's address for HTTP requests."""
        return self.url.replace("ws", "http", 1)

    @property
    def models(self) -> list[str]:
        """The names of the server's models."""
        return [model.name for model in self.service.models]

    @property
    def weights(self) -> dict[str, str]:
        """A description of the weights of each model."""
        models = [model for model in self.service.models if isinstance(model, EngineModel)]
        return {model.name: model.client.info.weights for model in models}

    @property
    def service(self) -> Service:
        """The state of the server."""
        service: Service = self.app.state.service
        return service

    @property
    def sessions(self) -> Sessions[Any]:
        """The open sessions."""
        return self.service.sessions


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files: the server's certificate (with its chain) and key."""

    certificate: Path
    key: Path
    key_password: str | None = None


def serve(
    running: AbstractAsyncContextManager[RunningServer],
    *,
    shutdown: ShutdownBudget | None = None,
    on_ready: Callable[[RunningServer], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM. Then new requests are rejected, and running ones may continue for
    ``shutdown.drain_s``. A second signal stops the server immediately.

    Args:
        running: the server, as by ``running_server``.
        shutdown: the time budget of the shutdown.
        on_ready: runs when the server is ready, until it stops; by default the addresses are printed.

    Raises:
        PortInUse: the port is in use.
        ServerError: the address cannot be bound for another reason.
    """
    budget = shutdown or ShutdownBudget(DRAIN_S)

    async def main() -> None:
        with anyio.CancelScope() as scope, Signals(scope) as signals:
            async with running as server, open_task_group() as group:
                group.start_soon(_reload_keys, server.service, signals.until_hang_up)
                collect_garbage_rarely()
                group.start_soon(on_ready or _print_addresses, server)
                await signals.until_stop()
                if not await server.service.drain(budget.take(budget.drain_s)):
                    logger.warning("requests still run after %g s and are cancelled", budget.drain_s)
                group.cancel_scope.cancel()

    anyio.run(main, backend="asyncio")  # uvicorn's event loop


async def _print_addresses(server: RunningServer) -> None:
    print(f"agentflow serves {', '.join(server.models)} at {server.url}")
    base = server.http_url
    print(f"OpenAI's API is at {base}/v1, Anthropic's at {base}", flush=True)


@asynccontextmanager
async def running_server(
    open_models: OpenModels,
    *,
    host: str = DEFAULT_HOST,
    port: int = 0,
    limits: ServerLimits | None = None,
    http_limits: HttpLimits | None = None,
    access: Access | None = None,
    shared: SharedStore | None = None,
    tls: Tls | None = None,
) -> AsyncIterator[RunningServer]:
    """Serves while the scope lasts, without signal handlers. Needs asyncio.

    While models load, the server already answers requests, with the error that it is not ready. The scope is
    entered when they are loaded.

    Args:
        open_models: opens the models.
        host: the address to listen on.
        port: the port to listen on; 0: any free port.
        limits: limits of connections and sessions.
        http_limits: limits of the HTTP APIs.
        access: the tenants, and the pages and host names that may use the server.
        shared: the store that several servers share.
        tls: the certificate, for HTTPS.
    """
    limits = limits or ServerLimits()
    with contextlib.closing(listen(host, port)) as listener:
        app = create_app(open_models, limits, http_limits=http_limits, access=access, shared=shared)
        # Before the models, so that a bad certificate fails immediately.
        server = HttpServer(http_config(app, limits, tls), limits, listener)
        async with (
            # An unreachable store fails here, before models load.
            contextlib.nullcontext() if shared is None else shared.running(),
            open_task_group() as group,
        ):
            group.start_soon(server.run_shielded)
            try:
                # In this task, so that errors of the models are raised here.
                async with app.router.lifespan_context(app):
                    try:
                        yield RunningServer(listening_url(listener, "ws" if tls is None else "wss"), app)
                    finally:
                        if (service := app.state.service) is not None:
                            service.end()
                        await server.end()  # before the models, which its connections still use
            finally:
                server.begin_end()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. ``PortInUse`` or ``ServerError`` if the address cannot be bound."""
    if not 0 <= port <= 65_535:  # getaddrinfo would reduce it modulo 65,536
        raise ServerError(f"cannot listen on port {port} of {host}: a port is from 0 to 65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
        try:
            if os.name == "posix":  # elsewhere the option lets two programs share a port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Now, not after the models load, so that a second server fails immediately.
            listener.listen(socket.SOMAXCONN)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} of {host} is in use: stop the other program, or choose another port"
            ) from error
        raise ServerError(f"cannot listen on port {port} of {host}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise ServerError(f"cannot listen on port {port} of {host}: {error}") from error
    listener.setblocking(False)
    return listener


def check_tls(tls: Tls) -> None:
    """``ServerError`` for a certificate or key that cannot be used. Asks no terminal for a password."""
    was_asked = False

    def password() -> str:
        nonlocal was_asked
        was_asked = True
        return tls.key_password or ""

    try:
        for path in (tls.certificate, tls.key):
            path.open("rb").close()
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key, password)
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            why = f"tls_key: {tls.key} is not the key of {tls.certificate}"
        elif was_asked and tls.key_password is None:
            why = f"tls_key: {tls.key} is encrypted: set AGENTFLOW_SERVE_TLS_KEY_PASSWORD"
        elif was_asked:
            why = f"tls_key_password does not decrypt {tls.key}"
        elif not _is_certificate(tls.certificate):
            why = f"tls_cert: {tls.certificate} is not a certificate in PEM format"
        elif error.reason in _NOT_PEM:
            why = f"tls_key: {tls.key} is not a private key in PEM format"
        else:
            why = f"tls_cert or tls_key cannot be used: {error.reason or error}"
        raise ServerError(why, param="tls") from error
    except OSError as error:
        raise ServerError(f"{error.filename} cannot be read: {error.strerror}", param="tls") from error


def _is_certificate(path: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def http_config(
    app: ASGIApp, limits: ServerLimits, tls: Tls | None, *, max_message_bytes: int | None = None
) -> uvicorn.Config:
    """Returns uvicorn's configuration. ``max_message_bytes``: the limit of a websocket message that is read;
    None: as ``limits.frame_bytes`` needs it. ``ServerError`` for a certificate that cannot be used."""
    if tls is not None:
        check_tls(tls)
    config = uvicorn.Config(
        app,
        http=timed_http_protocol(limits.header_timeout_s, limits.idle_timeout_s),
        limit_concurrency=2 * limits.max_connections,  # websockets, and as many other connections
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
        ssl_keyfile_password=None if tls is None else tls.key_password,
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="websockets-sansio",
        ws_max_size=max_message_bytes or limits.frame_bytes * READ_LIMIT_FACTOR,
        ws_per_message_deflate=False,
        ws_ping_interval=limits.ping_interval_s,
        ws_ping_timeout=limits.ping_interval_s,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    config.load()
    return config


class HttpServer:
    """Serves the application on one socket. Replaces ``uvicorn.Server``, which installs signal handlers, and
    which polls every 0.1 s for the end of the server and of its connections."""

    def __init__(self, config: uvicorn.Config, limits: ServerLimits, listener: socket.socket) -> None:
        self._config = config
        self._state = ServerState()
        self._is_ending = anyio.Event()
        self._has_ended = anyio.Event()
        self._acceptor = Acceptor(
            listener,
            self._make_protocol,
            max_connections=max_open_connections(limits),
            max_per_address=limits.max_connections_per_address,
            tls=config.ssl,
            handshake_timeout_s=limits.header_timeout_s,
        )

    async def run_shielded(self) -> None:
        """Serves until ``end``. Shielded from cancellation, so that the shutdown is clean."""
        try:
            with anyio.CancelScope(shield=True):
                async with open_task_group() as group:
                    group.start_soon(self._acceptor.run)
                    while not self._is_ending.is_set():
                        date = (b"date", formatdate(usegmt=True).encode())
                        self._state.default_headers = [date, *self._config.encoded_headers]
                        with anyio.move_on_after(1):
                            await self._is_ending.wait()
                    self._acceptor.close()
                await self._close_connections()
        finally:
            self._has_ended.set()

    def _make_protocol(self, on_lost: Callable[[], None]) -> TimedHttpProtocol:
        kind = self._config.http_protocol_class
        assert issubclass(kind, TimedHttpProtocol)
        protocol = kind(config=self._config, server_state=self._state, app_state={})
        protocol.on_lost = on_lost
        return protocol

    async def _close_connections(self) -> None:
        """Waits up to ``SHUTDOWN_S`` for requests to end, and then cancels them."""
        for connection in list(self._state.connections):
            connection.shutdown()
        with anyio.move_on_after(SHUTDOWN_S):
            await self._acceptor.wait_unconnected()
            while self._state.tasks:
                await asyncio.wait(self._state.tasks)
            return
        logger.error("requests still run after %g s and are cancelled", SHUTDOWN_S)
        for task in self._state.tasks:
            task.cancel()

    def begin_end(self) -> None:
        """Makes ``run_shielded`` return soon."""
        self._is_ending.set()

    async def end(self) -> None:
        """Stops the server and waits until all connections are closed."""
        self.begin_end()
        with anyio.CancelScope(shield=True):
            await self._has_ended.wait()


async def _reload_keys(service: Service, has_hung_up: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Reads the keys file again at each SIGHUP. An invalid file is logged and changes nothing."""
    while True:
        await has_hung_up()
        try:
            await service.reload_tenants()
            logger.info("the keys file was read again")
        except AgentflowError as error:
            logger.error("the keys file is invalid, and the previous keys stay valid: %s", error)


class Signals:
    """The signal handlers of a server, from before it loads models until its end.

    The first SIGINT or SIGTERM ends ``until_stop``, and the second cancels ``scope``; before the call of
    ``until_stop``, the first cancels it. Then the previous handlers apply. SIGHUP ends ``until_hang_up``.
    """

    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._stop_requested = anyio.Event()
        self._is_end_awaited = False
        self._hang_up = anyio.Event()
        self._previous: dict[int, Any] = {}

    async def until_stop(self) -> None:
        """Waits for the next SIGINT or SIGTERM."""
        self._is_end_awaited = True
        await self._stop_requested.wait()

    async def until_hang_up(self) -> None:
        """Waits for the first SIGHUP since the last call returned."""
        await self._hang_up.wait()
        self._hang_up = anyio.Event()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._is_end_awaited and not self._stop_requested.is_set():
            self._loop.call_soon_threadsafe(self._stop_requested.set)
            return
        self._restore((signal.SIGINT, signal.SIGTERM))
        self._loop.call_soon_threadsafe(self._scope.cancel)

    def _note_hang_up(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(lambda: self._hang_up.set())

    def _restore(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            signal.signal(number, self._previous[number])

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._stop)
        if hasattr(signal, "SIGHUP"):
            self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._note_hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore(self._previous)


def listening_url(listener: socket.socket, scheme: str) -> str:
    """The URL of a server that listens on the socket."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
