"""Replicas on the fake model without processes: the real engine, set and messages, in one thread.

A test decides when each replica runs a step, dies, or hangs, and which of its reports are lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
from anyio.lowlevel import checkpoint
from support.fake_engine import TOKENIZER
from support.holds import until
from support.plain_model import runner
from support.process_engine import Ticks

from agentflow.cluster.replicas.open_replicas import replicated_engine
from agentflow.engine.client import EngineClient
from agentflow.engine.engine import Engine
from agentflow.engine.messages import BlocksUpdate, FromEngine, Loaded, Start, to_engine_decoder
from agentflow.engine.scheduling.scheduler import SchedulerConfig
from agentflow.engine.simulator.fake_runner import FakeRunner

_LENGTH_BYTES = 4


class FakeChild:
    """An engine process of a fake replica. ``poison``: the first token of prompts that kill it."""

    node = ""

    def __init__(self, world: Replicas, number: int) -> None:
        self.number = number
        self.is_dead = self.hangs = False
        self._world = world
        fake = world.make_runner(number)
        self.engine = Engine(fake, TOKENIZER, world.config, self._deliver, reports=True)
        self.engine._grammars.prepare()
        self._frames = [msgspec.msgpack.encode(Loaded(fake.info, TOKENIZER.identity))]
        self._woken = anyio.Event()

    @property
    def pid(self) -> int | None:
        return None

    async def send(self, frame: bytes) -> None:
        await checkpoint()
        if self.is_dead:
            raise OSError("gone")
        self.engine.send(to_engine_decoder.decode(frame[_LENGTH_BYTES:]))
        if self._world.is_automatic:
            self.wake()
        elif self._world.steps_on_message:
            self.step()

    async def receive(self) -> list[bytes]:
        while not self._frames and not self.is_dead:
            if self._world.is_automatic and self.step():
                await checkpoint()
                continue
            self._woken = anyio.Event()
            await self._woken.wait()
        if not self._frames:
            raise EOFError
        await checkpoint()
        frames, self._frames = self._frames, []
        return frames

    async def end(self, grace_s: float = 0.0) -> str:
        self.is_dead = True
        return "was ended"

    def die(self) -> None:
        self.is_dead = True
        self.wake()

    def wake(self) -> None:
        """Lets the supervisor look for frames, or for the end."""
        self._woken.set()

    def step(self) -> bool:
        """One step, unless it hangs. Returns whether there was anything to do."""
        if self.is_dead or self.hangs:
            return False
        engine = self.engine
        has_work = engine.scheduler.running or len(engine.scheduler.waiting) or engine._in_flight
        has_read = engine._inbox.empty() and not engine._ready
        if not has_work and has_read and not engine._outbox and not engine._blocks.changes:
            return False
        try:
            engine.take_messages()
            if not engine.step():
                engine._deliver_outbox()
        except Died:
            engine._deliver_outbox()
            self.die()
        return True

    def _deliver(self, messages: list[FromEngine]) -> None:
        kept = [one for one in messages if not isinstance(one, BlocksUpdate) or not self._world.loses()]
        self._frames.append(msgspec.msgpack.encode(kept))
        self.wake()


class Died(BaseException):
    """The process dies in this forward pass: the engine must not handle it."""


class _Ticks(Ticks):
    """Without processes, no other work needs this processor."""

    async def tick(self) -> None:
        before, self._next = self._next, anyio.Event()
        before.set()
        await checkpoint()


class Replicas:
    """The fake replicas of a test. ``loses``: whether the next report of a cache is lost."""

    def __init__(self, count: int, config: SchedulerConfig | None = None) -> None:
        self.children: dict[int, FakeChild] = {}
        self.config = config or SchedulerConfig(max_running=4, token_budget=16)
        self.is_automatic = True
        self.steps_on_message = False  # one step, while not automatic
        self.loses: Callable[[], bool] = lambda: False
        self.make_runner: Callable[[int], FakeRunner] = lambda number: runner(num_slots=600)
        self.fails_to_start: set[int] = set()
        self.num_started = 0
        self.ticks = _Ticks()
        self._count = count

    async def _start(self, start: Start) -> FakeChild:
        await checkpoint()
        number = start.options["number"]
        if number in self.fails_to_start:
            raise OSError("no memory")
        self.num_started += 1
        child = self.children[number] = FakeChild(self, number)
        return child

    @asynccontextmanager
    async def open(self, **options) -> AsyncIterator[EngineClient]:
        starts = [Start("", {"number": number}) for number in range(self._count)]
        opening = replicated_engine(
            starts,
            lambda: TOKENIZER,
            deadlines=self.ticks.deadlines,
            start_child=self._start,
            **options,
        )
        async with opening as client:
            yield client

    async def settle(self) -> None:
        """Lets every task read the events that have arrived. Most events take fewer turns of the loop."""
        for _ in range(20):
            await checkpoint()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Waits for a condition while no time passes for the deadlines."""
        await until(is_so)

    def become_automatic(self) -> None:
        self.is_automatic = True
        for child in self.children.values():
            child.wake()

    async def step_all(self) -> bool:
        """One step of each replica. Returns whether one of them had anything to do."""
        stepped = [child.step() for child in self.children.values()]
        await self.settle()
        return any(stepped)
