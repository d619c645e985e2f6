"""An engine process in a Ray actor, as its supervisor sees it (``engine.process.child``).

A model that is divided over nodes has an actor for each rank. The process of rank 0 is the engine: the server
tells it where the others listen, and watches all actors.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from msgspec.structs import replace

from agentflow.cluster.ray.divided import LOADER, Peer
from agentflow.cluster.ray.host import (
    BEAT_S,
    CONNECT_S,
    ENGINE,
    ENGINE_MODULE,
    LOST_S,
    PID,
    TOKEN_BYTES,
    WATCH,
    EngineHost,
    connect_actor,
)
from agentflow.engine.machine.child_process import FrameConnection, to_frame
from agentflow.engine.messages import Start
from agentflow.engine.models.tensor_parallel.rank_group import RANK_MODULE

ReadOptions = Callable[[], dict[str, Any]]
"""Returns where an actor runs: the arguments of Ray's ``options``."""

START_S = 60.0
"""The time for an actor to start, and for Ray to find another place for it if its node is gone."""
END_S = 2.0
"""The time that an actor may take to answer in addition to the grace of its engine."""


class RayChild:
    """An engine process on a node, from ``start_in_actor`` to ``end``.

    Args:
        host: The actor of the process.
        engine: The connection to the process.
        watch: The connection to the actor.
        pid: The process id.
        node: The address of its node.
        ranks: The actors of the model's other ranks, with the connections to them.
    """

    def __init__(
        self,
        host: Any,
        engine: socket.socket,
        watch: socket.socket,
        pid: int,
        node: str,
        ranks: Sequence[tuple[Any, socket.socket]] = (),
    ) -> None:
        self._host = host
        self._engine = FrameConnection(engine)
        self._told_at = time.monotonic()
        self._watch = Heartbeat(watch, self._told_at)
        self._rank_hosts = [rank for rank, _ in ranks]
        # An actor sends beats from the time on when rank 0 has connected to it.
        self._rank_watches = [Heartbeat(one, self._told_at + CONNECT_S) for _, one in ranks]
        self._pid = pid
        self._node = node
        self.on_end: Callable[[], object] = lambda: None
        """Called when it has ended."""

    @property
    def pid(self) -> int | None:
        """The process id on its node."""
        return self._pid

    @property
    def node(self) -> str:
        """The address of its node."""
        return self._node

    async def send(self, frame: bytes) -> None:
        """Sends a frame; waits while the socket is full. Raises ``OSError`` if the process has ended."""
        await self._engine.send(frame)

    async def receive(self) -> list[bytes]:
        """Waits for frames. Raises ``EOFError`` if the process has ended, or if its node or the node of
        another rank is silent."""
        while True:
            if (now := time.monotonic()) - self._told_at >= BEAT_S:
                self._exchange_beats(now)
            with anyio.move_on_after(BEAT_S):
                return await self._engine.receive()

    def _exchange_beats(self, now: float) -> None:
        self._told_at = now
        is_heard = [watch.exchange(now) for watch in (self._watch, *self._rank_watches)]
        if not all(is_heard):
            raise EOFError

    async def end(self, grace_s: float = 0.0) -> str:
        """Ends the process, by force if it does not end by itself within ``grace_s``, and the actor. Returns
        how it ended, for messages. Cannot be cancelled."""
        self._engine.close()
        with anyio.CancelScope(shield=True):
            how: str = await anyio.to_thread.run_sync(
                partial(_end, self._host, self._rank_hosts, self._watch, grace_s),
                limiter=anyio.CapacityLimiter(1),
            )
        for watch in (self._watch, *self._rank_watches):
            watch.close()
        self.on_end()
        return how


class Heartbeat:
    """The server's end of the connection for beats. ``heard_at``: the time in seconds from when on the actor
    must not be silent for longer than ``LOST_S``."""

    def __init__(self, connection: socket.socket, heard_at: float) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._heard_at = heard_at

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


def _end(host: Any, ranks: Sequence[Any], watch: Heartbeat, grace_s: float) -> str:
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
    for one in (host, *ranks):
        with contextlib.suppress(Exception):  # Ray itself may have ended
            ray.kill(one)
    return how


class _Attempt:
    """Starts the actors of an engine, in a thread that may be left behind."""

    def __init__(self, options: Sequence[ReadOptions]) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._hosts: list[Any] = []
        self._is_given_up = False

    def run(self) -> tuple[RayChild, Sequence[Peer]]:
        """Returns the child, and where the other ranks listen."""
        import ray

        tokens = [secrets.token_bytes(TOKEN_BYTES) for _ in self._options]
        try:
            for number, options in enumerate(self._options):
                actor = ray.remote(EngineHost).options(max_restarts=0, **options())
                module = RANK_MODULE if number else ENGINE_MODULE
                with self._lock:
                    if self._is_given_up:
                        raise ConnectionAbortedError
                    self._hosts.append(actor.remote(tokens[number], module))
            with contextlib.ExitStack() as opened:
                listening = [host.listen.remote() for host in self._hosts]
                addresses: list[tuple[str, int]] = ray.get(listening, timeout=START_S)
                engine = opened.enter_context(connect_actor(addresses[0], tokens[0] + ENGINE))
                watches = [
                    opened.enter_context(connect_actor(address, token + WATCH))
                    for address, token in zip(addresses, tokens, strict=True)
                ]
                received = watches[0].recv(PID.size, socket.MSG_WAITALL)
                if len(received) < PID.size:
                    raise ConnectionAbortedError("its actor ended")
                with self._lock:
                    if self._is_given_up:  # no caller is left to close the connections
                        raise ConnectionAbortedError
                    opened.pop_all()
            ranks = [*zip(self._hosts[1:], watches[1:], strict=True)]
            [pid] = PID.unpack(received)
            child = RayChild(self._hosts[0], engine, watches[0], pid, addresses[0][0], ranks)
            peers = [
                Peer(*address, token + ENGINE)
                for address, token in zip(addresses[1:], tokens[1:], strict=True)
            ]
            return child, peers
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        import ray

        with self._lock:
            self._is_given_up = True
            for host in self._hosts:
                with contextlib.suppress(Exception):
                    ray.kill(host)


async def start_in_actor(start: Start, places: Sequence[ReadOptions]) -> RayChild:
    """Starts a process in an actor, which begins to load its engine. Raises ``OSError`` if that fails. If it
    is cancelled, no process is left.

    Args:
        start: How to load the engine.
        places: Where the actor of each rank of the model runs.
    """
    from ray.exceptions import GetTimeoutError, RayError

    attempt = _Attempt(places)
    try:
        child, peers = await anyio.to_thread.run_sync(
            attempt.run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
        )
    except GetTimeoutError:
        raise OSError(f"Ray has found no place for it within {START_S:g} s") from None
    except RayError as error:
        raise OSError(f"its actor failed: {str(error).strip().splitlines()[0]}") from error
    except anyio.get_cancelled_exc_class():
        attempt.give_up()
        raise
    if peers:
        options = {"engine": start.options, "host": child.node, "peers": peers}
        start = replace(start, loader=LOADER, options=options)
    try:
        await child.send(to_frame(start))
    except BaseException:
        await child.end()
        raise
    return child
