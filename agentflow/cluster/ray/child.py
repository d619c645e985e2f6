"""An engine process in a Ray actor, as its supervisor sees it (``engine.process.child``)."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from agentflow.cluster.ray.host import (
    BEAT_S,
    CONNECT_S,
    ENGINE,
    LOST_S,
    PID,
    TOKEN_BYTES,
    WATCH,
    EngineHost,
)
from agentflow.engine.child_process import FrameConnection, to_frame
from agentflow.engine.messages import Start

Options = Callable[[], dict[str, Any]]
"""Returns where an actor runs: the arguments of Ray's ``options``."""

START_S = 60.0
"""The time for an actor to start, and for Ray to find another place for it if its node is gone."""
END_S = 2.0
"""The time that an actor may take to answer in addition to the grace of its engine."""


class RayChild:
    """An engine process on a node, from ``start_in_actor`` to ``end``. ``host``: the actor."""

    def __init__(self, host: Any, engine: socket.socket, watch: socket.socket, pid: int) -> None:
        self._host = host
        self._engine = FrameConnection(engine)
        self._told_at = time.monotonic()
        self._watch = Watch(watch, self._told_at)
        self._pid = pid
        self.on_end: Callable[[], object] = lambda: None
        """Called when it has ended."""

    @property
    def pid(self) -> int | None:
        """The process id on its node."""
        return self._pid

    async def send(self, frame: bytes) -> None:
        """Sends a frame; waits while the socket is full. Raises ``OSError`` if the process has ended."""
        await self._engine.send(frame)

    async def receive(self) -> list[bytes]:
        """Waits for frames. Raises ``EOFError`` if the process has ended, or its node is silent."""
        while True:
            if (now := time.monotonic()) - self._told_at >= BEAT_S:
                self._exchange_beats(now)
            with anyio.move_on_after(BEAT_S):
                return await self._engine.receive()

    def _exchange_beats(self, now: float) -> None:
        self._told_at = now
        if not self._watch.exchange(now):
            raise EOFError

    async def end(self, grace_s: float = 0.0) -> str:
        """Ends the process, by force if it does not end by itself within ``grace_s``, and the actor. Returns
        how it ended, for messages. Cannot be cancelled."""
        self._engine.close()
        with anyio.CancelScope(shield=True):
            how: str = await anyio.to_thread.run_sync(
                partial(_end, self._host, self._watch, grace_s), limiter=anyio.CapacityLimiter(1)
            )
        self._watch.close()
        self.on_end()
        return how


class Watch:
    """The server's end of the connection for beats. ``now``: the time in seconds."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._heard_at = now

    def exchange(self, now: float) -> bool:
        """Sends a beat. Returns False if the actor is gone or silent. Reads all beats that have come before
        it looks at the time: the server may have been stopped."""
        try:
            with contextlib.suppress(BlockingIOError):
                while self._connection.recv(4096):
                    self._heard_at = now
                return False
            with contextlib.suppress(BlockingIOError):
                self._connection.send(b".")
        except OSError:
            return False
        return now - self._heard_at <= LOST_S

    def close(self) -> None:
        """Closes the connection, at which the actor ends."""
        self._connection.close()


def _end(host: Any, watch: Watch, grace_s: float) -> str:
    import ray
    from ray.exceptions import RayError

    how = "was lost with its node"
    ends_at = time.monotonic() + grace_s + END_S
    try:
        answer = host.wait.remote(grace_s)
        while watch.exchange(now := time.monotonic()) and now < ends_at:
            if ray.wait([answer], timeout=BEAT_S / 4)[0]:
                how = ray.get(answer)
                break
    except RayError:
        pass
    with contextlib.suppress(Exception):  # Ray itself may have ended
        ray.kill(host)
    return how


class _Attempt:
    """Starts one actor, in a thread that may be left behind."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._host: Any = None
        self._is_given_up = False

    def run(self) -> tuple[Any, socket.socket, socket.socket, int]:
        import ray

        token = secrets.token_bytes(TOKEN_BYTES)
        actor = ray.remote(EngineHost).options(max_restarts=0, **self._options())
        with self._lock:
            if self._is_given_up:
                raise ConnectionAbortedError
            self._host = actor.remote(token)
        try:
            with contextlib.ExitStack() as opened:
                address = ray.get(self._host.listen.remote(), timeout=START_S)
                engine = opened.enter_context(_connect(address, token + ENGINE))
                watch = opened.enter_context(_connect(address, token + WATCH))
                pid = watch.recv(PID.size, socket.MSG_WAITALL)
                if len(pid) < PID.size:
                    raise ConnectionAbortedError("its actor ended")
                with self._lock:
                    if self._is_given_up:  # no caller is left to close the connections
                        raise ConnectionAbortedError
                    opened.pop_all()
                return self._host, engine, watch, *PID.unpack(pid)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        import ray

        with self._lock:
            self._is_given_up = True
            if self._host is not None:
                with contextlib.suppress(Exception):
                    ray.kill(self._host)


def _connect(address: tuple[str, int], head: bytes) -> socket.socket:
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(socket.create_connection(address, CONNECT_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        opened.pop_all()
    return connection


async def start_in_actor(start: Start, options: Options) -> RayChild:
    """Starts a process in an actor, which begins to load its engine. Raises ``OSError`` if that fails. If it
    is cancelled, no process is left.

    Args:
        start: how to load the engine.
        options: where the actor runs.
    """
    from ray.exceptions import GetTimeoutError, RayError

    attempt = _Attempt(options)
    try:
        found = await anyio.to_thread.run_sync(
            attempt.run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )
    except GetTimeoutError:
        raise OSError(f"Ray has found no place for it within {START_S:g} s") from None
    except RayError as error:
        raise OSError(f"its actor failed: {str(error).strip().splitlines()[0]}") from error
    except anyio.get_cancelled_exc_class():
        attempt.give_up()
        raise
    child = RayChild(*found)
    try:
        await child.send(to_frame(start))
    except BaseException:
        await child.end()
        raise
    return child
