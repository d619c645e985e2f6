"""A session that is cancelled or interrupted in each phase of its life: it ends, and nothing is kept."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from support.fake_engine import TEMPLATE, TOKENIZER, FakeEngine
from support.language.interrupted_session import PHASES
from support.process_template import start_python

import agentflow as af
from agentflow.backends.local import interpreted
from agentflow.engine import client as engine_client
from agentflow.engine.client import running_engine
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.protocol.backend import Connection, Deliver, Lost

pytestmark = [pytest.mark.on_trio, pytest.mark.timeout(60)]
TESTS = Path(__file__).parent.parent


class ClosingRunner(FakeRunner):
    """Sets an event when it is closed."""

    def __init__(self) -> None:
        super().__init__(vocab_size=TOKENIZER.vocab_size)
        self.is_closed = threading.Event()

    def close(self) -> None:
        self.is_closed.set()


class LoadingEngine:
    """An engine in this process whose load goes on until ``may_go_on`` is set."""

    def __init__(self) -> None:
        self.is_loading = threading.Event()
        self.may_go_on = threading.Event()
        self.runner = ClosingRunner()

    def _load(self) -> tuple[FakeRunner, object, SchedulerConfig]:
        self.is_loading.set()
        assert self.may_go_on.wait(30)
        return self.runner, TOKENIZER, SchedulerConfig()

    @asynccontextmanager
    async def connect(self, deliver: Deliver, lost: Lost) -> AsyncIterator[Connection]:
        async with (
            running_engine(self._load) as client,
            interpreted(EngineGenerator(client, TEMPLATE), deliver) as connection,
        ):
            yield connection


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "END_S", 0.01)


async def enter(backend: LoadingEngine) -> None:
    async with af.session(backend=backend):
        raise AssertionError("it has loaded")


@pytest.mark.anyio
async def test_a_session_that_loads_can_be_cancelled(no_patience: None) -> None:
    engine = LoadingEngine()
    async with anyio.create_task_group() as group:
        group.start_soon(enter, engine)
        assert await anyio.to_thread.run_sync(engine.is_loading.wait, 30)
        group.cancel_scope.cancel()
    assert not engine.runner.is_closed.is_set()
    engine.may_go_on.set()  # the abandoned thread closes the engine that it has loaded
    assert await anyio.to_thread.run_sync(engine.runner.is_closed.wait, 30)


@pytest.mark.parametrize("num_cancels", [1, 2])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_a_native_cancel_while_a_session_loads_ends_it(num_cancels: int, no_patience: None) -> None:
    """It passes every shield, and comes again while the session is being left."""
    engine = LoadingEngine()
    task = asyncio.get_running_loop().create_task(enter(engine))
    assert await anyio.to_thread.run_sync(engine.is_loading.wait, 30)
    for _ in range(num_cancels):
        task.cancel()
        await asyncio.wait([task], timeout=0)
    await asyncio.wait([task])
    assert task.cancelled()
    engine.may_go_on.set()
    assert await anyio.to_thread.run_sync(engine.runner.is_closed.wait, 30)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_a_native_cancel_while_a_step_runs_ends_the_session(no_patience: None) -> None:
    engine = FakeEngine()
    engine.gate.attach()
    engine.gate.allow(0)
    has_entered = anyio.Event()

    async def use() -> None:
        async with af.session(backend=engine) as flow, flow.state() as s:
            s += "a" + af.gen("x")
            has_entered.set()
            await s["x"]

    task = asyncio.get_running_loop().create_task(use())
    await has_entered.wait()
    await engine.gate.held()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
@pytest.mark.trio_in_full
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
@pytest.mark.parametrize(
    ("phase", "num_interrupts"),
    [
        *[(phase, 1) for phase in PHASES],
        *[pytest.param(phase, 2, marks=pytest.mark.full) for phase in PHASES[:-1]],
        (PHASES[-1], 2),
    ],
)
def test_ctrl_c_ends_a_script_in_each_phase_of_its_session(
    phase: str, loop: str, num_interrupts: int
) -> None:
    # A second interrupt may come while asyncio ends its loop, whose own coroutine is not awaited then.
    quiet = ["-W", "ignore:coroutine 'BaseEventLoop.:RuntimeWarning"]
    with start_python(
        *quiet,
        TESTS / "support" / "language" / "interrupted_session.py",
        phase,
        loop,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"{phase}\n"
        for _ in range(num_interrupts):
            child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=50)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert child.returncode in (-signal.SIGINT, 130)
