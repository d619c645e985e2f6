"""Accepts connections on the listening socket, as many as there may be, and as many from one address.

asyncio's own accepting has no bound. Where the process runs out of file descriptors it logs a traceback and
tries again, for each connection and as fast as it can; and it counts no connection before its TLS handshake.
Here a connection counts from its acceptance to its end. At the bound, and without descriptors, accepting
pauses: clients wait in the kernel's backlog, and the log says so once a minute at most.

File descriptors: as many as a server's connections need, or as many connections as there are
descriptors.
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
from agentflow.server.config.limits import ServerLimits
from agentflow.server.http.addresses import client_of

logger = logging.getLogger(__name__)

# Beside connections: engines and compilers with their pipes, files, and what a restarted engine needs.
RESERVED = 256
# Connections over the limit, while they are answered that there are too many.
REFUSED_CONNECTIONS = 64


def most_connections(limits: ServerLimits) -> int:
    """How many connections may be open at once: websockets, as many of HTTP, and some that are being
    refused."""
    return 2 * limits.max_connections + REFUSED_CONNECTIONS


def with_descriptors(limits: ServerLimits) -> ServerLimits:
    """Raises this process's soft limit of open files as far as ``limits`` need and the hard limit allows.
    Where that is not enough, gives limits with as many connections as there are descriptors, and logs a
    warning."""
    if sys.platform == "win32":
        return limits
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most_connections(limits) + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
        except (OSError, ValueError) as error:  # some systems allow less than the hard limit says
            logger.warning("the limit of %d open files cannot be raised to %d: %s", soft, allowed, error)
    if soft >= needed:
        return limits
    reserved = min(RESERVED, soft // 2)
    most = max(1, (soft - reserved - REFUSED_CONNECTIONS) // 2)
    logger.warning(
        "this process may have %d files open: it takes %d connections of each kind at once instead of %d "
        "(max_connections); raise the limit with `ulimit -Hn`",
        soft,
        most,
        limits.max_connections,
    )
    per_address = limits.max_connections_per_address
    if per_address < 2 * limits.max_connections:  # else one address may have all
        per_address = min(per_address, most)
    return msgspec.structs.replace(limits, max_connections=most, max_connections_per_address=per_address)


MakeProtocol = Callable[[Callable[[], None]], asyncio.Protocol]
"""Makes the protocol of one connection; it calls what it is given when the connection is over."""

# How long to wait for a descriptor when no connection of this server ends.
RETRY_S = 1.0
# Connections that wait already are accepted so many at a time.
ACCEPTS_PER_TURN = 16
# A cause of pauses and refusals is logged once in so long.
LOG_S = 60.0
_REASON = b"This address has too many connections open."
TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
    b"retry-after: 1\r\nconnection: close\r\n\r\n%b" % (len(_REASON), _REASON)
)


class Acceptor:
    """Serves one socket, which it closes at the end. Returns from ``run`` once ``close`` was called.

    ``most``: connections at once. ``most_per_address``: of them from one client as ``client_of`` counts them;
    more are closed at once, without TLS after an answer of 429. ``handshake_timeout_s``: of TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: MakeProtocol,
        *,
        most: int,
        most_per_address: int,
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 20.0,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._most = most
        self._most_per_address = most_per_address
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._num_of: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}
        self._one_over = anyio.Event()
        self._scope = anyio.CancelScope()
        self.num_connections = 0
        """Open now, those in a TLS handshake included."""

    async def run(self) -> None:
        """Accepts until ``close``. What is open then goes on."""
        try:
            with self._scope:
                async with open_task_group() as handshakes:
                    for number in count():
                        connection, client = await self._next()
                        if client is not None and self._num_of[client] >= self._most_per_address:
                            self._turn_away(connection, client)
                        else:
                            handshakes.start_soon(self._open, connection, self._counted(client))
                        if number % ACCEPTS_PER_TURN == 0:
                            await anyio.lowlevel.checkpoint()  # others run, however fast clients connect
        finally:
            self._listener.close()

    def close(self) -> None:
        """Accepts no more."""
        self._scope.cancel()

    async def wait_unconnected(self) -> None:
        """Returns when no connection is open."""
        while self.num_connections:
            await self._one_over.wait()

    async def _next(self) -> tuple[socket.socket, str | None]:
        """The next connection, and the client that it counts for."""
        while True:
            while self.num_connections >= self._most:
                self._log("full", "%d connections are open, which is the limit: others wait", self._most)
                await self._one_over.wait()
            one_over = self._one_over
            try:
                # Not ``loop.sock_accept``, which loses a connection that arrives while it is cancelled.
                connection, address = self._listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(self._listener)
                continue
            except ConnectionAbortedError:  # the client has left already
                continue
            except OSError as error:
                if self._listener.fileno() < 0:
                    raise
                self._log("accept", "connections cannot be accepted now, and wait: %s", error.strerror)
                with anyio.move_on_after(RETRY_S):
                    await one_over.wait()
                continue
            connection.setblocking(False)
            return connection, client_of(address[0]) if isinstance(address, tuple) else None

    def _counted(self, client: str | None) -> Callable[[], None]:
        """Counts one connection, until what it returns is called, the first time."""
        is_over = False

        def end() -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            self.num_connections -= 1
            if client is not None:
                self._num_of[client] -= 1
                if not self._num_of[client]:
                    del self._num_of[client]
            self._one_over.set()
            self._one_over = anyio.Event()

        self.num_connections += 1
        if client is not None:
            self._num_of[client] += 1
        return end

    async def _open(self, connection: socket.socket, end: Callable[[], None]) -> None:
        """Hands the connection to its protocol, after the TLS handshake where there is one."""
        of_tls: dict[str, Any] = {}
        if self._tls is not None:
            of_tls = {"ssl": self._tls, "ssl_handshake_timeout": self._handshake_timeout_s}
        try:
            # Without a handshake it takes one turn of the loop; the connection is then closed like others.
            with anyio.CancelScope(shield=self._tls is None):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make_protocol(end), connection, **of_tls
                )
        except OSError as error:  # what is wrong with a TLS handshake is one
            end()
            logger.debug("a connection failed before it was open: %s", error)
        except Exception:
            end()
            connection.close()
            logger.exception("a connection could not be opened")
        except BaseException:
            end()
            connection.close()
            raise

    def _turn_away(self, connection: socket.socket, client: str) -> None:
        self._log(
            "address", "%s has %d connections open, and more are refused", client, self._most_per_address
        )
        try:
            if self._tls is None:
                connection.send(TOO_MANY)
        except OSError:
            pass  # it needs no answer any more
        finally:
            connection.close()

    def _log(self, cause: str, message: str, *arguments: object) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s.get(cause, -LOG_S) >= LOG_S:
            self._logged_s[cause] = now_s
            logger.warning(message, *arguments)
