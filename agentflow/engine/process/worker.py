"""The main module of an engine process.

``python -m agentflow.engine.process.worker FD``, where FD is an inherited socket to the server. The first
frame is ``Start``. Then the engine runs until the socket closes, because the server closed it or died. The
process ignores SIGINT and SIGTERM: the server handles them, and drains first.

The socket cannot deadlock: both ends always read it, this one in a separate thread. A slow reader only slows
down the engine.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from agentflow.engine.engine import Engine, EngineBroken
from agentflow.engine.machine.child_process import received_frames, to_frame
from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.engine.messages import (
    FromEngine,
    KeepMedium,
    Loaded,
    LoadEngine,
    LoadFailed,
    Logged,
    MediumPart,
    Start,
    Stop,
    start_decoder,
    to_engine_decoder,
)
from agentflow.engine.process.medium_parts import MediumAssembly
from agentflow.errors import AgentflowError, EngineFailed
from agentflow.version import __version__

logger = logging.getLogger(__name__)

# The time for the last step after the socket has closed. The server waits a little longer before it kills the
# process.
LAST_STEP_S = 4.0


class _ServerGone(Exception):
    """The server no longer reads the socket."""


class _ServerLog(logging.Handler):
    """Sends agentflow's log messages to the server, whose log the operator reads."""

    def __init__(self, send: Callable[[object], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).encode("utf-8", "backslashreplace").decode()
        with contextlib.suppress(_ServerGone):
            self._send([Logged(record.levelno, record.name, text)])


class EngineProcess:
    """Runs the engine, at the process's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()  # any thread may log
        self._frames = received_frames(self._connection)
        self._engine: Engine | None = None

    def run(self) -> int:
        """Loads and runs the engine. Returns the exit code."""
        first = next(self._frames, None)
        if first is None:
            return 0
        start = start_decoder.decode(first)
        ours = logging.getLogger("agentflow")
        ours.addHandler(_ServerLog(self._send))
        ours.setLevel(start.log_level)
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
        except EngineBroken as error:  # already logged with its cause
            logger.critical("%s: this process exits, and its requests continue in another one", error)
            return 1
        return 0

    def _load(self, start: Start) -> tuple[Engine | None, Loaded | LoadFailed]:
        if start.version != __version__:  # installed while the server runs, or on another node
            why = f"its process has agentflow {__version__}, and the server {start.version}"
            return None, LoadFailed(EngineFailed.code, f"{why}: restart the server")
        try:
            module, _, name = start.loader.partition(":")
            load: LoadEngine = getattr(importlib.import_module(module), name)
            runner, tokenizer, config = load(**start.options)
            answer = Loaded(runner.info, tokenizer.identity)
            return Engine(runner, tokenizer, config, self._deliver, reports=start.reports), answer
        except AgentflowError as error:
            return None, LoadFailed(error.code, str(error))
        except ModuleNotFoundError as error:
            return None, LoadFailed(EngineFailed.code, str(error), missing_package=error.name)
        except Exception as error:
            logger.exception("cannot load the engine")
            return None, LoadFailed(EngineFailed.code, f"cannot load the engine: {error!r}")

    def _deliver(self, messages: list[FromEngine]) -> None:
        self._send(messages)

    def _send(self, content: object) -> None:
        frame = to_frame(content)
        try:
            with self._sending:
                self._connection.sendall(frame)
        except OSError as error:
            raise _ServerGone from error

    def _read(self) -> None:
        """Reads messages until the socket closes, then ends the process."""
        media = MediumAssembly()
        try:
            for frame in self._frames:
                assert self._engine is not None  # the server sends nothing before Loaded
                message = to_engine_decoder.decode(frame)
                if not isinstance(message, MediumPart):
                    self._engine.send(message)
                elif (medium := media.push(message)) is not None:
                    self._engine.send(KeepMedium(medium))
            if self._engine is not None:
                self._engine.send(Stop())
                threading.Event().wait(LAST_STEP_S)  # the process ends meanwhile, unless a step hangs
        except Exception:
            logger.exception("cannot read the messages of the server")
        finally:
            os._exit(1)


def main() -> int:
    """Runs the engine with the socket in the first argument. Needs no lifeline: a thread waits for the socket
    to close."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # so that no child process keeps the socket open
    with connection:
        return EngineProcess(connection).run()


if __name__ == "__main__":
    sys.exit(main())
