"""Accepts connections on the listening socket, within limits for the server and for each address.

asyncio accepts connections without a limit. When the process runs out of file descriptors, it retries in a
busy loop and logs a traceback each time. It also does not count a connection before the TLS handshake. Here a
connection counts from its acceptance until it closes. At the limit, or without descriptors, accepting pauses:
clients wait in the kernel's backlog, and a warning is logged at most once a minute.

``with_descriptors`` adapts the limit of open files and the limit of connections to each other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from agentflow.runtime.task_group import open_task_group
from agentflow.server.addresses import client_network
from agentflow.server.config.limits import ServerLimits

logger = logging.getLogger(__name__)

# Descriptors for everything but connections: files, and the pipes of engines and compilers, also while one
# restarts.
RESERVED = 256
# Room for connections over the limit, which are rejected with an answer.
REJECTED_CONNECTIONS = 64


def max_open_connections(limits: ServerLimits) -> int:
    """The limit of open connections: websockets, as many HTTP connections, and some that are being
    rejected."""
    return 2 * limits.max_connections + REJECTED_CONNECTIONS


def with_descriptors(limits: ServerLimits) -> ServerLimits:
    """Raises the process's soft limit of open files as far as ``limits`` require and the hard limit allows.
    If it is still too low, returns limits with fewer connections, and logs a warning."""
    if sys.platform == "win32":
        return limits
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_open_connections(limits) + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
        except (OSError, ValueError) as error:  # some systems allow less than the hard limit
            logger.warning("the limit of %d open files cannot be raised to %d: %s", soft, allowed, error)
    if soft >= needed:
        return limits
    reserved = min(RESERVED, soft // 2)
    most = max(1, (soft - reserved - REJECTED_CONNECTIONS) // 2)
    logger.warning(
        "the limit of %d open files allows only %d connections of each kind instead of %d (max_connections): "
        "raise it with `ulimit -Hn`",
        soft,
        most,
        limits.max_connections,
    )
    per_address = limits.max_connections_per_address
    if per_address < 2 * limits.max_connections:  # otherwise one address may have all connections
        per_address = min(per_address, most)
    return msgspec.structs.replace(limits, max_connections=most, max_connections_per_address=per_address)


MakeProtocol = Callable[[Callable[[], None]], asyncio.Protocol]
"""Creates the protocol of one connection, which calls the argument when the connection has closed."""

# Time between attempts to accept while there is no free descriptor and no connection closes.
RETRY_S = 1.0
# Waiting connections that are accepted before other tasks run.
ACCEPTS_PER_TURN = 16
# Each cause of pauses or rejections is logged at most once in this interval.
LOG_S = 60.0
_REASON = b"This address has too many open connections."
TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\n%b" % (len(_REASON), _REASON)
)


class Acceptor:
    """Accepts the connections of one socket, and closes it at the end. ``run`` returns after ``close``.

    Args:
        listener: the listening socket.
        make_protocol: creates the protocol of a connection.
        max_connections: the limit of open connections.
        max_per_address: the limit for one client, as ``client_network`` identifies it. Further connections
            are closed immediately, after an answer with status 429 if there is no TLS.
        tls: the server's certificate, for TLS.
        handshake_timeout_s: the time limit of a TLS handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: MakeProtocol,
        *,
        max_connections: int,
        max_per_address: int,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 20.0,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._num_by_client: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}
        self._one_closed = anyio.Event()
        self._scope = anyio.CancelScope()
        self.num_connections = 0
        """The open connections, including those in a TLS handshake."""

    async def run(self) -> None:
        """Accepts connections until ``close``. Open connections stay open."""
        try:
            with self._scope:
                async with open_task_group() as handshakes:
                    for number in count():
                        connection, client = await self._next()
                        if client is not None and self._num_by_client[client] >= self._max_per_address:
                            self._reject(connection, client)
                        else:
                            handshakes.start_soon(self._open, connection, self._counted(client))
                        if number % ACCEPTS_PER_TURN == 0:
                            await anyio.lowlevel.checkpoint()  # other tasks run, however fast clients connect
        finally:
            self._listener.close()

    def close(self) -> None:
        """Stops accepting connections."""
        self._scope.cancel()

    async def wait_unconnected(self) -> None:
        """Waits until no connection is open."""
        while self.num_connections:
            await self._one_closed.wait()

    async def _next(self) -> tuple[socket.socket, str | None]:
        """Accepts the next connection. Returns it, and the client for which it counts."""
        while True:
            while self.num_connections >= self._max_connections:
                self._log(
                    "full",
                    "%d connections are open, which is the limit: new connections wait",
                    self._max_connections,
                )
                await self._one_closed.wait()
            one_closed = self._one_closed
            try:
                # Not ``loop.sock_accept``: if cancelled while a connection arrives, it drops the connection.
                connection, address = self._listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(self._listener)
                continue
            except ConnectionAbortedError:  # the client has closed it already
                continue
            except OSError as error:
                if self._listener.fileno() < 0:
                    raise
                self._log(
                    "accept", "new connections wait, because they cannot be accepted: %s", error.strerror
                )
                with anyio.move_on_after(RETRY_S):
                    await one_closed.wait()
                continue
            connection.setblocking(False)
            return connection, client_network(address[0]) if isinstance(address, tuple) else None

    def _counted(self, client: str | None) -> Callable[[], None]:
        """Counts one connection. Call the result when it has closed; further calls have no effect."""
        is_closed = False

        def release() -> None:
            nonlocal is_closed
            if is_closed:
                return
            is_closed = True
            self.num_connections -= 1
            if client is not None:
                self._num_by_client[client] -= 1
                if not self._num_by_client[client]:
                    del self._num_by_client[client]
            self._one_closed.set()
            self._one_closed = anyio.Event()

        self.num_connections += 1
        if client is not None:
            self._num_by_client[client] += 1
        return release

    async def _open(self, connection: socket.socket, release: Callable[[], None]) -> None:
        """Passes the connection to a protocol, after the TLS handshake if there is TLS."""
        tls_options: dict[str, Any] = {}
        if self._tls is not None:
            tls_options = {"ssl": self._tls, "ssl_handshake_timeout": self._handshake_timeout_s}
        try:
            # Without a handshake, this takes one iteration of the loop; the connection is closed as usual.
            with anyio.CancelScope(shield=self._tls is None):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make_protocol(release), connection, **tls_options
                )
        except OSError as error:  # ssl.SSLError is one
            release()
            logger.debug("a connection failed during the TLS handshake: %s", error)
        except Exception:
            release()
            connection.close()
            logger.exception("a connection could not be opened")
        except BaseException:
            release()
            connection.close()
            raise

    def _reject(self, connection: socket.socket, client: str) -> None:
        self._log(
            "address",
            "%s has %d open connections: further connections are rejected",
            client,
            self._max_per_address,
        )
        try:
            if self._tls is None:
                connection.send(TOO_MANY)
        except OSError:
            pass  # the client has closed it
        finally:
            connection.close()

    def _log(self, cause: str, message: str, *arguments: object) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s.get(cause, -LOG_S) >= LOG_S:
            self._logged_s[cause] = now_s
            logger.warning(message, *arguments)
