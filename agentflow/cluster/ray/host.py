"""The Ray actor that runs an engine process, or a rank of a model that is divided over nodes, on its node.

It listens on the node's address and takes two TCP connections, each of which begins with the actor's one-time
token. The first becomes the socket of the process: frames travel between server and engine, or between rank 0
and this rank, without the actor. (Measured on one machine: 16 µs for a frame and its answer, 650 µs for a
call of an actor.) On the second, actor and server send each other a byte every ``BEAT_S``. So the server
notices within ``LOST_S`` that the node is gone, which Ray finds out much later, and the actor ends if the
server is gone.

Whatever ends first takes the rest along: the engine ends with the actor (its lifeline closes), and the actor
with the server (the connection closes, or is silent for ``SERVER_LOST_S``).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import NoReturn

from agentflow.engine.machine.child_process import KILL_S, exit_phrase, import_path

logger = logging.getLogger(__name__)

BEAT_S = 0.4
LOST_S = 1.6
"""Without a byte for this time, the node is lost."""
SILENT_S = 2 * BEAT_S
"""Without a byte from the server for this time, the actor sends none either, so that the server notices: a
network may lose messages of one direction only."""
SERVER_LOST_S = 15.0
"""The server's event loop may be busy, and its process may be stopped for a moment."""
CONNECT_S = 30.0
LINGER_S = 2.0
"""A server that ends its engine kills the actor by Ray, which reports actors that exit as failures."""
TOKEN_BYTES = 32
MAX_HEADS = 64
"""Connections whose token has not arrived. With one more, the oldest is closed."""
ENGINE, WATCH = b"E", b"W"
"""Which connection it is: follows the token."""
PID = struct.Struct("!I")


ENGINE_MODULE = "agentflow.cluster.ray.engine"


class EngineHost:
    """Runs one process.

    Args:
        token: The token with which the server and rank 0 may connect.
        module: The main module of the process.
    """

    def __init__(self, token: bytes, module: str = ENGINE_MODULE) -> None:
        self._token = token
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def listen(self) -> tuple[str, int]:
        """Returns the address for the two connections. The actor ends if they do not come."""
        import ray.util

        listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        threading.Thread(target=self._serve, args=(listener,), name="engine host", daemon=True).start()
        host, port = listener.getsockname()[:2]
        return host, port

    def wait(self, grace_s: float) -> str:
        """Waits for the end of the process, and kills it after ``grace_s``. Returns how it ended."""
        process = self._process
        if process is None:
            return "was not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return exit_phrase(process.wait(grace_s))
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return exit_phrase(process.wait(KILL_S))
        return exit_phrase(None)

    def _serve(self, listener: socket.socket) -> NoReturn:
        try:
            with listener:
                engine, watch = self._accept(listener)
            with engine:
                self._lifeline = self._start(engine)
            assert self._process is not None
            watch.sendall(PID.pack(self._process.pid))
            exchange_beats(watch)
        except Exception:
            logger.exception("cannot run the engine")
        finally:
            if self._process is not None:
                self._process.kill()
            threading.Event().wait(LINGER_S)
            os._exit(0)

    def _accept(self, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        """Returns the connections for the engine and for the beats. Anybody may connect, so all connections
        are read at the same time. Raises ``TimeoutError``."""
        ends_at = time.monotonic() + CONNECT_S
        heads: dict[socket.socket, bytes] = {}  # of connections without a whole head, oldest first
        found: dict[bytes, socket.socket] = {}
        listener.setblocking(False)
        with contextlib.ExitStack() as strangers, contextlib.ExitStack() as opened:
            strangers.callback(lambda: [*map(socket.socket.close, heads)])
            selector = strangers.enter_context(selectors.DefaultSelector())
            selector.register(listener, selectors.EVENT_READ)
            while len(found) < 2:
                if (left_s := ends_at - time.monotonic()) <= 0:
                    raise TimeoutError("the server has not connected")
                for key, _ in selector.select(left_s):
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is listener:
                        with contextlib.suppress(OSError):  # it is closed already
                            connection, _ = listener.accept()
                            connection.setblocking(False)
                            selector.register(connection, selectors.EVENT_READ)
                            heads[connection] = b""
                    elif ready in heads and self._read_head(ready, heads):
                        selector.unregister(ready)
                        kind = self._kind(heads.pop(ready))
                        if kind and kind not in found:
                            found[kind] = opened.enter_context(ready)
                        else:
                            ready.close()
                    if len(heads) > MAX_HEADS:
                        oldest = next(iter(heads))
                        selector.unregister(oldest)
                        del heads[oldest]
                        oldest.close()
            opened.pop_all()
        for connection in found.values():
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found[ENGINE], found[WATCH]

    def _kind(self, head: bytes) -> bytes:
        """Returns which connection it is; empty without the token."""
        is_ours = hmac.compare_digest(head[:TOKEN_BYTES], self._token)
        return head[TOKEN_BYTES:] if is_ours and head[TOKEN_BYTES:] in (ENGINE, WATCH) else b""

    def _read_head(self, connection: socket.socket, heads: dict[socket.socket, bytes]) -> bool:
        """Reads from a connection. Returns whether its head is whole, or will never be."""
        try:
            piece = connection.recv(TOKEN_BYTES + 1 - len(heads[connection]))
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        heads[connection] += piece
        return not piece or len(heads[connection]) > TOKEN_BYTES

    def _start(self, engine: socket.socket) -> int:
        """Starts the process. Returns the actor's end of the lifeline."""
        read_end, write_end = os.pipe()
        numbers = [engine.fileno(), read_end]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": import_path()},
            process_group=0,
        )
        os.close(read_end)
        return write_end


def connect_actor(address: tuple[str, int], head: bytes) -> socket.socket:
    """Connects to an actor. ``head``: its token, and which connection it is. Raises ``OSError``."""
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(socket.create_connection(address, CONNECT_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        opened.pop_all()
    return connection


def exchange_beats(watch: socket.socket) -> None:
    """Sends a byte every ``BEAT_S``. Returns when the server is gone."""
    heard_at = beats_at = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while (now := time.monotonic()) - heard_at < SERVER_LOST_S:
            if now >= beats_at:
                if now - heard_at <= SILENT_S:
                    watch.sendall(b".")
                beats_at = now + BEAT_S
            watch.settimeout(max(0.001, beats_at - now))
            with contextlib.suppress(TimeoutError):
                if not watch.recv(4096):
                    return
                heard_at = time.monotonic()
