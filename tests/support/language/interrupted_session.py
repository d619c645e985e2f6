"""A script that blocks in one phase of a session until it is interrupted.

``interrupted_session.py PHASE LOOP``

It prints the phase when it has reached it. The call that it blocks in never returns by itself.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from support.fake_engine import TEMPLATE, TOKENIZER

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.engine import client as engine_client
from agentflow.engine.batch import Batch
from agentflow.engine.client import running_engine
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.backend import Backend, Connection, Deliver, Lost
from agentflow.runtime.task_group import loop_caller

PHASES = ("connecting", "loading", "running", "closing")


def block(phase: str) -> None:
    print(phase, flush=True)
    threading.Event().wait()


class BlockingEngine:
    """An engine in this process that blocks while it loads, or in its first step."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._call_in_loop = loop_caller()
        self.has_begun = anyio.Event()

    def _load(self) -> tuple[FakeRunner, object, SchedulerConfig]:
        if self._phase == "loading":
            block("loading")
        runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, on_step=self._step)
        return runner, TOKENIZER, SchedulerConfig()

    def _step(self, batch: Batch) -> None:
        if self._phase == "running":
            block("running")
        self._call_in_loop(self.has_begun.set)
        threading.Event().wait()

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with running_engine(self._load) as client:
            async with interpreted(EngineGenerator(client, TEMPLATE), deliver) as connection:
                yield connection
            if self._phase == "closing":
                print("closing", flush=True)  # the step goes on, and the engine's scope waits for it


def silent_server() -> Backend:
    """Accepts a connection and never sends anything."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(1)
        block("connecting")

    threading.Thread(target=serve, daemon=True).start()
    return af.Remote(f"ws://127.0.0.1:{listener.getsockname()[1]}")


async def main(phase: str) -> None:
    engine = BlockingEngine(phase)
    backend = silent_server() if phase == "connecting" else engine
    async with af.session(backend=backend) as flow:
        s = await flow.state().__aenter__()
        s += "a" + af.gen("x")
        if phase == "running":
            await s["x"]
        await engine.has_begun.wait()


if __name__ == "__main__":
    engine_client.END_S = 0.05  # the step never ends
    try:
        anyio.run(main, sys.argv[1], backend=sys.argv[2])
    finally:
        # A second interrupt after the end of the session would cut off the traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
