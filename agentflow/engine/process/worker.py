"""The engine in a process of its own: what runs in that process.

``python -m agentflow.engine.process.worker FD``, where FD is a socket that the server left open for
it. The first frame says what to load; then the engine runs until the socket ends, be it that the
server closed it or that the server is gone. Signals to end are left to the server: it drains first.

Nobody can block anybody for ever: a thread of its own reads the socket whatever the engine does, and
the other end does the same; so a full socket is emptied, and a slow reader slows only the engine.

The server's handle on one engine process.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

from agentflow.engine.engine import Engine, EngineBroken
from agentflow.engine.process.child import READ_BYTES, FrameBuffer, to_frame
from agentflow.engine.process.ipc import (
    FromEngine,
    Loaded,
    LoadEngine,
    LoadFailed,
    Start,
    Stop,
    start_decoder,
    to_engine_decoder,
)
from agentflow.errors import AgentflowError, EngineFailed

logger = logging.getLogger(__name__)

# How long a step may still take when the socket has ended. The server waits a little longer than this
# before it kills the process.
LAST_STEP_S = 4.0


class _ServerGone(Exception):
    """Nobody reads what the engine says any more."""


class EngineProcess:
    """This end of the socket, and the engine behind it once it is loaded."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = self._receive()
        self._engine: Engine | None = None

    def run(self) -> int:
        """Loads and runs the engine; the exit code."""
        first = next(self._frames, None)
        if first is None:
            return 0
        start = start_decoder.decode(first)
        threading.Thread(target=self._read, name="engine-inbox", daemon=True).start()
        try:
            self._engine, answer = self._load(start)
            self._send(answer)
            if self._engine is None:
                return 1
            collect_garbage_rarely()
            self._engine.run()
        except _ServerGone:
            return 0
        except EngineBroken as error:  # logged, with its cause
            logger.critical("%s: this process ends, and another one takes its requests", error)
            return 1
        return 0

    def _load(self, start: Start) -> tuple[Engine | None, Loaded | LoadFailed]:
        try:
            module, _, name = start.loader.partition(":")
            load: LoadEngine = getattr(importlib.import_module(module), name)
            runner, tokenizer, config = load(**start.options)
            answer = Loaded(runner.info, tokenizer.fingerprint)
            return Engine(runner, tokenizer, config, self._deliver), answer
        except AgentflowError as error:
            return None, LoadFailed(error.code, str(error))
        except ModuleNotFoundError as error:
            return None, LoadFailed(EngineFailed.code, str(error), missing_package=error.name)
        except Exception as error:
            logger.exception("the engine cannot be loaded")
            return None, LoadFailed(EngineFailed.code, f"the engine cannot be loaded: {error!r}")

    def _deliver(self, messages: list[FromEngine]) -> None:
        self._send(messages)

    def _send(self, content: object) -> None:
        try:
            self._connection.sendall(to_frame(content))
        except OSError as error:
            raise _ServerGone from error

    def _receive(self) -> Iterator[bytes]:
        buffer = FrameBuffer()
        while True:
            try:
                piece = self._connection.recv(READ_BYTES)
            except OSError:  # the server ended with frames unread
                return
            if not piece:
                return
            yield from buffer.push(piece)

    def _read(self) -> None:
        """Reads messages until the socket ends, and ends the process then."""
        try:
            for frame in self._frames:
                assert self._engine is not None  # nothing is sent before Loaded
                self._engine.send(to_engine_decoder.decode(frame))
            if self._engine is not None:
                self._engine.send(Stop())
                threading.Event().wait(LAST_STEP_S)  # the process ends in here, unless a step hangs
        except Exception:
            logger.exception("what the server sends cannot be read")
        finally:
            os._exit(1)


def collect_garbage_rarely() -> None:
    """What is loaded now is there for good: looking through it again and again would stop the engine for
    tens of milliseconds each time. What a step leaves behind has next to no cycles and goes by itself."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def main() -> int:
    """Runs the engine on the socket whose number is the first argument. A thread waits for its end, and
    no lifeline is needed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # so that the socket ends with this process, whatever it starts
    with connection:
        return EngineProcess(connection).run()


if __name__ == "__main__":
    sys.exit(main())
