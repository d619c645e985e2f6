"""The limits of watching: shared snapshots, pauses by cost, numbers of watches, and a restart of the
engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from support.fake_engine import TEMPLATE, TOKENIZER, FakeEngine
from support.holds import Hold
from support.observed_backends import settle
from support.process_engine import generate, kill, process_engine

from agentflow.engine.cache.nodes import Node
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.messages import (
    EngineAnswer,
    EngineSnapshot,
    EngineStats,
    NodeTokens,
    Query,
    SnapshotRequest,
)
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.tenant import Tenant
from agentflow.engine.watching import shared_watches
from agentflow.engine.watching import snapshot as snapshot_module
from agentflow.engine.watching.shared_watches import ENGINE_PART, LOOP_PART, SharedWatches
from agentflow.errors import EngineDown, Overloaded
from agentflow.protocol import ops
from agentflow.protocol.events import Event, Watched
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.interpreter.interpreter import Interpreter

pytestmark = pytest.mark.anyio


class Engine:
    """Answers each query when the test says so. ``took_s``: the duration of each snapshot."""

    def __init__(self) -> None:
        self.queries: list[Query] = []
        self.took_s = 0.0
        self.answers = anyio.Semaphore(0)
        self.error: EngineDown | None = None

    async def send(self, make: Callable[[int], Query]) -> EngineAnswer:
        query = make(len(self.queries) + 1)
        self.queries.append(query)
        await self.answers.acquire()
        if self.error is not None:
            raise self.error
        if not isinstance(query, SnapshotRequest):
            return NodeTokens(query.ticket, [], 0)
        stats = EngineStats(query.ticket, "m", *[0] * 15)
        return EngineSnapshot(query.ticket, 1, 0.0, [], [], [], [], 0, stats, self.took_s)


async def test_watches_that_wait_share_one_snapshot_of_what_all_need() -> None:
    engine = Engine()
    hub = SharedWatches(engine.send)
    async with anyio.create_task_group() as group:
        group.start_soon(hub.snapshot, None, 1, 0)  # is being taken when the others come
        await settle()
        for most, after in ((10, 7), (50, 9), (20, 5)):
            group.start_soon(hub.snapshot, None, most, after)
        await settle()  # trio starts tasks in any order
        group.start_soon(hub.snapshot, "ann", 30, 8)
        for _ in range(3):
            await settle()
            engine.answers.release()
    asked = [(one.tenant, one.max_nodes, one.steps_after) for one in engine.queries]
    assert asked == [(None, 1, 0), (None, 50, 5), ("ann", 30, 8)]


async def test_watches_of_a_snapshot_continue_when_one_is_cancelled() -> None:
    engine = Engine()
    hub = SharedWatches(engine.send)
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as cancelled:
                cancelled.start_soon(hub.snapshot, None, 1, 0)
                await settle()
                group.start_soon(hub.snapshot, None, 2, 0)
                await settle()
                scope.cancel()
        await settle()
        engine.answers.release()
    assert len(engine.queries) == 2


async def test_f37_nothing_is_kept_of_watches_that_were_cancelled_while_they_waited() -> None:
    engine = Engine()
    engine.took_s = 1000 * ENGINE_PART
    engine.answers = anyio.Semaphore(9)
    hub = SharedWatches(engine.send)
    await hub.snapshot("bob", 0, 0)  # the next one must wait
    with anyio.move_on_after(0):
        await hub.snapshot("ann", 500, 1)
    hub._next_s = 0.0
    await hub.snapshot("ann", 2, 7)
    asked = engine.queries[-1]
    assert isinstance(asked, SnapshotRequest)
    assert (asked.max_nodes, asked.steps_after) == (2, 7)


async def test_an_error_is_for_all_that_waited_and_the_next_is_asked_again() -> None:
    engine = Engine()
    engine.error = EngineDown("it restarts")
    hub = SharedWatches(engine.send)
    engine.answers = anyio.Semaphore(9)
    for _ in range(2):
        with pytest.raises(EngineDown):
            await hub.snapshot(None, 1, 0)
    engine.error = None
    assert (await hub.snapshot(None, 1, 0)).epoch == 1


async def test_the_next_snapshot_comes_when_the_last_ones_have_cost_little() -> None:
    engine = Engine()
    engine.answers = anyio.Semaphore(9)
    engine.took_s = 1000 * ENGINE_PART
    hub = SharedWatches(engine.send)
    hub.spent(500 * LOOP_PART)
    await hub.snapshot(None, 1, 0)
    assert hub._next_s == pytest.approx(anyio.current_time() + 1500, abs=20)
    with anyio.move_on_after(0) as scope:
        await hub.snapshot(None, 1, 0)
    assert scope.cancelled_caught
    await hub.peek("ann", 1)  # does not wait for it
    assert len(engine.queries) == 2


async def test_a_tenant_has_half_of_all_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_watches, "MAX_WATCHES", 4)
    hub = SharedWatches(Engine().send)
    with ExitStack() as stack:
        for tenant in ("ann", "ann", "bob", "carl"):
            stack.enter_context(hub.watching(tenant))
            for refused in ("ann", "ann") if tenant == "ann" and hub._num_of["ann"] == 2 else ():
                with pytest.raises(Overloaded):
                    stack.enter_context(hub.watching(refused))
        with pytest.raises(Overloaded):
            stack.enter_context(hub.watching("dora"))
    for _ in range(3):
        with hub.watching("ann"):
            pass


@pytest.mark.trio_in_full
async def test_a_watch_goes_on_after_a_restart_of_the_engine(tmp_path: Path) -> None:
    in_step, in_load = Hold(tmp_path / "step"), tmp_path / "load"
    options = {"hold_at": {"3": in_step.path}, "hold_load": str(in_load)}
    async with process_engine(**options) as client, anyio.create_task_group() as group:
        interpreter = Interpreter(EngineGenerator(client, TEMPLATE, tenant=Tenant(sees_metrics=True)), group)
        events: list[Watched] = []

        async def watched(is_wanted: Callable[[Watched], bool]) -> Watched:
            with anyio.fail_after(30):
                while not any(map(is_wanted, events)):
                    drained: list[Event] = await interpreter.events.next()
                    events.extend(event for event in drained if isinstance(event, Watched))
            found = next(filter(is_wanted, events))
            events.clear()
            return found

        interpreter.submit(ops.Watch(1, interval_s=0.1))
        first = await watched(lambda event: event.tree is not None)
        assert first.tree is not None
        assert first.tree.reset
        group.start_soon(generate, client)
        await in_step.reached()
        second_load = Hold(in_load)
        kill(client, in_step)
        await second_load.reached()
        down = await watched(lambda event: event.error is not None)
        assert down.error is not None
        assert down.error.code == "engine_down"
        second_load.release()
        again = await watched(lambda event: event.tree is not None and event.tree.reset)
        assert again.stats is not None
        assert again.stats.restarts == 1
        await client.until_idle()
        group.cancel_scope.cancel()


async def test_skipped_steps_are_counted_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_STEPS", 4)
    async with FakeEngine().open_client() as client, anyio.create_task_group() as group:
        interpreter = Interpreter(EngineGenerator(client, TEMPLATE), group)
        interpreter.submit(ops.Watch(1, interval_s=0.1))
        await interpreter.events.wait()
        for _ in range(3):  # meanwhile nothing is read
            await client.generate([1, 2, 3], SamplingParams(max_tokens=20, ignore_eos=True), seed=0)
        num_steps = (await client.stats()).steps
        numbers: list[int] = []
        num_skipped = 0
        with anyio.fail_after(30):
            while not numbers or numbers[-1] < num_steps:
                for event in await interpreter.events.next():
                    assert isinstance(event, Watched)
                    num_skipped += event.steps_skipped
                    numbers += [step.number for step in event.steps]
                    assert len(event.steps) <= 4
        assert num_skipped + len(numbers) == num_steps
        assert numbers == sorted(set(numbers))
        group.cancel_scope.cancel()


async def test_nodes_that_left_the_cache_are_not_kept() -> None:
    runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, num_slots=64, max_context=64)
    engine = FakeEngine(runner=runner)
    num_before = num_nodes()
    async with engine.open_client() as client:
        for number in range(100):
            await client.compute([number, *[7] * 30])
            snapshot = await client.watches.snapshot(None, 100, 0)
            assert snapshot.nodes
        await engine.assert_idle()
        assert num_nodes() - num_before < 20


def num_nodes() -> int:
    gc.collect()
    return sum(isinstance(one, Node) for one in gc.get_objects())
