"""Several engines behind one client: the same texts as one engine alone, also when engines fail."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import holds
from support.engine.adapters import write_plain_adapter
from support.examples import examples
from support.fake_replicas import Died, Replicas
from support.plain_model import alone, plain_token, runner

from agentflow.cluster.replicas.replica_set import ReplicaStatus
from agentflow.cluster.routing.placement import place_together
from agentflow.cluster.routing.router import Router
from agentflow.engine.client import EngineClient
from agentflow.engine.messages import Finished, Progress
from agentflow.engine.request import Origin
from agentflow.errors import BadArgument, BadModelFolder, EngineDown, EngineFailed, Overloaded
from agentflow.protocol.sampling import SamplingParams

pytestmark = pytest.mark.anyio

POISON = 8


@dataclass(eq=False)
class Job:
    """A request and its result."""

    prompt: list[int]
    length: int = 12
    origin: Origin = field(default_factory=Origin)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: Finished | None = None
    error: Exception | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    @property
    def has_ended(self) -> bool:
        return bool(self.end or self.error or self.scope.cancel_called)

    async def run(self, client: EngineClient) -> None:
        params = SamplingParams(max_tokens=self.length)
        with self.scope:
            try:
                self.end = await client.generate(
                    self.prompt, params, seed=0, origin=self.origin, on_progress=self._progress
                )
            except EngineFailed as error:
                self.error = error

    def _progress(self, progress: Progress) -> None:
        assert not progress.num_dropped
        self.ids += progress.token_ids
        self.text += progress.text

    def check(self) -> None:
        """The request gives its reference text, and each token once."""
        expected = alone(self.prompt, SamplingParams(max_tokens=self.length))
        assert self.end is not None
        assert self.end.text == expected.text
        assert self.end.text.startswith(self.text)
        assert self.end.finish_reason == expected.reason
        assert self.ids == expected.ids


def replica(client: EngineClient, number: int):
    return client.engine.replicas[number]


def check_nobody_is_owed(client: EngineClient) -> None:
    """Without requests, none is left in any book."""
    replicas = client.engine
    assert [*client._unfinished, *replicas._waiting, *replicas._of_request, *replicas._left] == []
    assert not replicas._waiting_of_state._entries
    for one in replicas._replicas:
        assert (one.requests, one.supervisor.num_unfinished, one.supervisor.has_suspects) == ({}, 0, False)
        assert not one.supervisor._journal._of_state._entries
    router = replicas._router
    assert not any(edge.running for edge in router.tree.edges())
    for load in router.loads._loads:
        assert (load.num_waiting, load.num_running, load.num_latency, load.queued) == (0, 0, 0, {})
    router.tree.check()


@examples(80)
@given(data=st.data())
def test_texts_are_the_same_whatever_happens_to_replicas(data: st.DataObject) -> None:
    async def run() -> None:
        count = data.draw(st.integers(1, 3), "replicas")
        replicas = Replicas(count)
        replicas.loses = lambda: data.draw(st.booleans(), "a report is lost")
        jobs: list[Job] = []
        async with replicas.open() as client:
            await replicas.settle()
            replicas.is_automatic = False
            async with anyio.create_task_group() as group:
                for _ in range(data.draw(st.integers(5, 40), "events")):
                    number = data.draw(st.integers(0, count - 1), "number")
                    event = data.draw(
                        st.sampled_from(["submit", "step", "step", "step", "die", "hang", "drain", "abort"]),
                        "event",
                    )
                    match event:
                        case "submit":
                            for _ in range(data.draw(st.integers(1, 3), "siblings")):
                                stem = [10] * data.draw(st.sampled_from([3, 70, 130]), "stem")
                                jobs.append(
                                    Job([*stem, 20 + len(jobs)], origin=Origin(task_group=1 + len(jobs) % 2))
                                )
                                group.start_soon(jobs[-1].run, client)
                        case "step":
                            replicas.children[number].step()
                        case "die":
                            replicas.children[number].die()
                        case "hang":
                            replicas.children[number].hangs = True
                        case "abort" if jobs:
                            jobs[data.draw(st.integers(0, len(jobs) - 1), "aborted")].scope.cancel()
                        case "drain":
                            with contextlib.suppress(BadArgument, Overloaded):
                                client.engine.drain(number)
                    await replicas.settle()
                replicas.become_automatic()
                await replicas.ticks.until(lambda: all(job.has_ended for job in jobs))
            for job in jobs:
                if job.scope.cancel_called:
                    continue
                # A request may be blamed for deaths that the test has caused: three while it ran alone.
                if job.error is None:
                    job.check()
                else:
                    assert "died" in str(job.error)
            # A replica that hangs may have only aborted requests, which end with its process.
            await replicas.ticks.until(
                lambda: all((one.state, one.requests) == ("serving", 0) for one in client.engine.replicas)
            )
            for child in replicas.children.values():
                child.engine.scheduler.check_idle()
            await replicas.settle()
            check_nobody_is_owed(client)

    anyio.run(run)


@pytest.fixture
async def two():
    """Two replicas that run by themselves."""
    replicas = Replicas(2)
    async with replicas.open() as client:
        await replicas.settle()
        yield replicas, client


async def run_all(client: EngineClient, *jobs: Job) -> None:
    async with anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(job.run, client)


async def test_siblings_that_come_together_share_a_replica_and_its_cache(two) -> None:
    _, client = two
    jobs = [Job([*[10] * 130, 20 + number], origin=Origin(task_group=7)) for number in range(6)]
    await run_all(client, *jobs)
    for job in jobs:
        job.check()
    # The router may divide the group: each replica then computes the prefix once.
    assert sum(job.end.cached_tokens > 100 for job in jobs) >= 4
    await run_all(client, later := Job([*[10] * 130, 90]))
    assert later.end.cached_tokens > 100  # the router knows where the prefix is


async def test_the_router_knows_all_blocks_again_after_it_missed_a_report(monkeypatch) -> None:
    monkeypatch.setattr("agentflow.engine.engine.MAX_REPORTED_BLOCKS", 2)
    replicas = Replicas(1)
    routers: list[Router] = []

    def new_router(shape, loaded) -> Router:
        routers.append(Router(shape, loaded.info.identity))
        return routers[0]

    async with replicas.open(router=new_router) as client:
        await run_all(client, Job([10] * 320))
        lost = [True, False]
        replicas.loses = lambda: lost.pop(0) if lost else False
        for number in range(3):  # the cache changes while the router asks
            await run_all(client, Job([20 + number] * 70))
        await replicas.settle()
        [follower] = routers[0]._followers.values()
        assert not follower.is_behind
        stored = replicas.children[0].engine.scheduler.memory.cache.stored_blocks()
        digests = {digest for run in stored for digest in run.digests}
        assert len(digests) > 6
        assert routers[0].tree._blocks.keys() == digests


async def test_one_turn_places_few_tokens(monkeypatch) -> None:
    monkeypatch.setattr("agentflow.cluster.replicas.placing_turn.MAX_PLACED_TOKENS", 100)
    replicas = Replicas(2)
    placed: list[list[int]] = []

    def place(waiting, now_s) -> None:
        placed.append([call.num_tokens for _, calls in waiting for call in calls])
        place_together(waiting, now_s)

    monkeypatch.setattr("agentflow.cluster.replicas.placing_turn.place_together", place)
    async with replicas.open() as client:
        jobs = [Job([20 + number] * length) for number, length in enumerate([40, 40, 40, 150, 10, 10])]
        await run_all(client, *jobs)
    assert sum(map(len, placed)) == 6
    assert max(map(len, placed)) > 1
    assert all(sum(turn) <= 100 or len(turn) == 1 for turn in placed)
    for job in jobs:
        job.check()


async def test_a_fault_of_the_router_costs_no_answer() -> None:
    replicas = Replicas(2)

    class Faulty(Router):
        def started(self, call, now_s) -> None:
            super().started(call, now_s)
            raise ValueError

        def ended(self, call, num_output, now_s) -> None:
            super().ended(call, num_output, now_s)
            raise ValueError

        def receive(self, update) -> bool:
            raise ValueError

    async with replicas.open(router=lambda shape, loaded: Faulty(shape, loaded.info.identity)) as client:
        jobs = [Job([20 + number] * 70) for number in range(6)]
        async with anyio.create_task_group() as group:
            for job in jobs:
                group.start_soon(job.run, client)
            await replicas.until(lambda: any(job.ids for job in jobs))
            replicas.children[0].die()
        await replicas.until(lambda: replica(client, 0).state == "serving")
    for job in jobs:
        job.check()


async def test_a_request_that_no_message_can_have_fails_alone(two) -> None:
    replicas, client = two
    replicas.is_automatic = False
    other, unsendable = Job([10, 20]), Job([10, 21], origin=Origin(label="\ud800"))
    async with anyio.create_task_group() as group:
        group.start_soon(other.run, client)
        group.start_soon(unsendable.run, client)
        await replicas.until(lambda: unsendable.error is not None)
        for child in [*replicas.children.values()]:
            child.die()
        replicas.become_automatic()
    assert unsendable.error.code == "engine_failed"
    other.check()
    assert [one.requests for one in client.engine.replicas] == [0, 0]
    assert [one.supervisor.num_unfinished for one in client.engine._replicas] == [0, 0]


async def test_a_poisonous_request_takes_two_replicas_with_it_and_no_other_request() -> None:
    replicas = Replicas(3)

    def next_token(tokens):
        if tokens[0] == POISON:
            raise Died
        return plain_token(tokens)

    replicas.make_runner = lambda number: runner(num_slots=600, next_token=next_token)
    async with replicas.open() as client:
        jobs = [Job([30 + number, 5]) for number in range(8)]
        poison = Job([POISON, 5])
        async with anyio.create_task_group() as group:
            for job in (*jobs[:4], poison, *jobs[4:]):
                group.start_soon(job.run, client)
            await replicas.until(lambda: all(job.end or job.error for job in (*jobs, poison)))
        for job in jobs:
            job.check()
        assert isinstance(poison.error, EngineFailed)
        # Two deaths, and a trial if others were running without progress at both.
        assert sum(one.restarts for one in client.engine.replicas) in (2, 3)
        assert min(one.restarts for one in client.engine.replicas) == 0


async def test_requests_fail_only_when_all_replicas_are_down(two) -> None:
    replicas, client = two
    replicas.fails_to_start = {0}
    replicas.children[0].die()
    await replicas.until(lambda: replica(client, 0).state == "down")
    assert "died" in replica(client, 0).problem
    await run_all(client, job := Job([10, 20]))
    job.check()
    replicas.is_automatic = False
    waiting = Job([10, 21])
    async with anyio.create_task_group() as group:
        group.start_soon(waiting.run, client)
        await replicas.settle()
        replicas.fails_to_start = {0, 1}
        replicas.children[1].die()
        await replicas.until(lambda: waiting.error is not None)
    assert isinstance(waiting.error, EngineDown)
    with pytest.raises(EngineDown):
        await client.compute([1, 2])
    with pytest.raises(EngineDown):
        await client.stats()
    replicas.become_automatic()
    replicas.fails_to_start = set()
    await replicas.until(lambda: all(one.state == "serving" for one in client.engine.replicas))
    await run_all(client, again := Job([10, 20]))
    again.check()


async def test_the_server_ends_when_all_are_down_if_it_is_told_to() -> None:
    replicas = Replicas(2)

    async def lose_all() -> None:
        async with replicas.open(exits_when_down=True):
            replicas.fails_to_start = {0, 1}
            for child in replicas.children.values():
                child.die()
            await replicas.until(lambda: False)

    with pytest.raises(EngineFailed, match="all replicas are down"):
        await lose_all()


async def test_a_drained_replica_gets_a_new_process_and_its_requests_move(two) -> None:
    replicas, client = two
    await run_all(client, Job([10, 20]))
    replicas.is_automatic = False
    jobs = [Job([20 + number, 5], origin=Origin(tenant=str(number))) for number in range(6)]
    async with anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(job.run, client)
        await replicas.settle()
        for _ in range(4):
            await replicas.step_all()
        number = max(client.engine.replicas, key=lambda one: one.requests).number
        before = replicas.children[number]
        client.engine.drain(number, 0.0)
        with pytest.raises(BadArgument):
            client.engine.drain(number)
        with pytest.raises(BadArgument):
            client.engine.drain(2)
        replicas.become_automatic()
        await replicas.until(lambda: all(job.end for job in jobs))
    await replicas.until(lambda: replica(client, number).state == "serving")
    for job in jobs:
        job.check()
    assert before.is_dead
    assert [one.restarts for one in client.engine.replicas] == [int(n == number) for n in range(2)]
    for one in range(2):
        client.engine.drain(one)  # one after the other
    await replicas.until(lambda: sum(one.restarts for one in client.engine.replicas) == 3)
    await replicas.until(lambda: all(one.state == "serving" for one in client.engine.replicas))


async def test_the_last_replica_that_serves_is_not_drained(two) -> None:
    replicas, client = two
    replicas.fails_to_start = {1}
    replicas.children[1].die()
    await replicas.settle()
    with pytest.raises(Overloaded):
        client.engine.drain(0)


async def test_f37_drains_after_a_replica_that_does_not_serve_again_are_dropped() -> None:
    replicas = Replicas(3)
    async with replicas.open() as client:
        await replicas.settle()
        for number in (2, 0, 1):
            client.engine.drain(number)
        replicas.fails_to_start = {0}
        replicas.children[0].die()
        await replicas.until(lambda: replica(client, 2).restarts == 1)
        await replicas.until(lambda: replica(client, 2).state == "serving")
        await replicas.until(lambda: replica(client, 0).state == "down")
        await replicas.settle()
        assert (replica(client, 1).restarts, replica(client, 1).state) == (0, "serving")
        replicas.fails_to_start = set()
        await replicas.until(lambda: replica(client, 0).state == "serving")
        client.engine.drain(1)
        await replicas.until(lambda: replica(client, 1).restarts == 1)


async def test_a_drained_replica_serves_again_if_the_others_are_lost() -> None:
    replicas = Replicas(2)
    routers: list[Router] = []

    def new_router(shape, loaded) -> Router:
        routers.append(Router(shape, loaded.info.identity))
        return routers[0]

    async with replicas.open(router=new_router) as client:
        await replicas.settle()
        replicas.is_automatic = False
        jobs = [Job([20 + number] * 70) for number in range(4)]
        async with anyio.create_task_group() as group:
            for job in jobs:
                group.start_soon(job.run, client)
            await replicas.settle()
            client.engine.drain(0, 1e9)
            await replicas.until(lambda: replica(client, 0).state == "draining")
            replicas.fails_to_start = {1}
            replicas.children[1].die()
            replicas.become_automatic()
        assert replica(client, 0).restarts == 0
        for job in jobs:
            job.check()
        await run_all(client, again := Job([20] * 70))
        assert again.end.cached_tokens >= 64
        assert routers[0].tree.num_blocks  # it reports its cache again


async def test_f37_a_replica_reports_its_cache_again_after_a_trial() -> None:
    """Also if it was asked for its blocks before, and they came while the router did not count it."""
    replicas = Replicas(2)
    routers: list[Router] = []
    kills = [6, 7]

    def next_token(tokens):
        if tokens[0] in kills:
            raise Died
        return plain_token(tokens)

    def new_router(shape, loaded) -> Router:
        routers.append(Router(shape, loaded.info.identity, divides_groups=False))
        return routers[0]

    replicas.make_runner = lambda number: runner(num_slots=600, next_token=next_token)
    async with replicas.open(router=new_router) as client:
        await replicas.settle()
        replicas.is_automatic = False
        jobs = [Job([token, 30], origin=Origin(task_group=1)) for token in kills]
        async with anyio.create_task_group() as group:
            for job in jobs:
                group.start_soon(job.run, client)
            await replicas.settle()
            first = max(client.engine.replicas, key=lambda one: one.requests).number
            replicas.children[first].step()  # both requests are running when it dies
            await replicas.until(lambda: replica(client, 1 - first).requests == 2)
            await replicas.until(lambda: replica(client, first).state == "serving")
            jobs.append(Job([40] * 200, length=2))
            group.start_soon(jobs[-1].run, client)
            await replicas.settle()
            lost = [True]
            replicas.loses = lambda: lost.pop() if lost else False
            while not client.engine._replicas[first].has_asked:
                replicas.children[first].step()
                await replicas.settle()
            replicas.fails_to_start = {1 - first}
            replicas.children[1 - first].step()  # both die with it again, and it is down
            await replicas.until(lambda: replica(client, first).state == "trial")
            kills.clear()
            replicas.become_automatic()
        for job in jobs:
            job.check()
        await run_all(client, Job([50] * 70))
        await replicas.settle()
        assert not routers[0]._followers[first].is_behind
        assert routers[0].tree.num_blocks


async def test_replicas_of_different_models_are_rejected_and_none_is_left() -> None:
    replicas = Replicas(2)
    replicas.make_runner = lambda number: runner(num_slots=600, max_context=500 + number)
    with pytest.raises(BadModelFolder, match="replica 1"):
        async with replicas.open():
            pass
    assert all(child.is_dead for child in replicas.children.values())


async def test_an_adapter_is_loaded_by_replicas_that_are_restarting_too(two, tmp_path) -> None:
    replicas, client = two
    folder = write_plain_adapter(tmp_path / "one", {"q_proj.lora_A": torch.ones(4, 8)})

    async def until(is_so) -> None:
        def is_so_when_awake() -> bool:
            replicas.become_automatic()  # the thread that reads adapters does not wake a fake engine
            return is_so()

        await holds.until(is_so_when_awake)

    async def lose(number: int) -> None:
        replicas.fails_to_start = {number}
        replicas.children[number].die()
        await until(lambda: replica(client, number).state == "down")

    async def text() -> str:
        job = Job([10, 20], origin=Origin(adapter="one"))
        async with anyio.create_task_group() as group:
            group.start_soon(job.run, client)
            await until(lambda: job.end or job.error)
        assert job.end is not None
        return job.end.text

    await lose(1)
    async with anyio.create_task_group() as group:
        group.start_soon(client.load_adapter, "one", folder)
        await until(lambda: client.adapters)
    identity = client.adapters["one"].identity
    before = await text()
    replicas.fails_to_start = set()
    await until(lambda: replica(client, 1).state == "serving")
    await lose(0)
    assert await text() == before
    replicas.fails_to_start = set()
    await until(lambda: all(identity in one.engine._runner.adapters for one in replicas.children.values()))
    client.unload_adapter("one")
    await until(lambda: not any(one.engine._runner.adapters for one in replicas.children.values()))


async def test_each_replica_charges_a_tenant_for_its_use_of_the_others(monkeypatch) -> None:
    for module in ("agentflow.engine.engine", "agentflow.cluster.replicas.replica_set"):
        monkeypatch.setattr(f"{module}.CHARGES_EVERY_S", 0.0)
    replicas = Replicas(3)
    own: dict[int, Counter] = {number: Counter() for number in range(3)}
    others: dict[int, Counter] = {number: Counter() for number in range(3)}

    def watch(number: int) -> None:
        """Counts the charges of a replica for its requests, and for other replicas' requests."""
        policy = replicas.children[number].engine.scheduler.waiting
        charge, elsewhere, of_program = policy.charge, policy.charge_elsewhere, policy.program_elsewhere

        def charged(request, num_tokens: int) -> None:
            tenant, program = request.cache_key.tenant, request.origin.program
            own[number][tenant] += num_tokens / request.origin.weight
            own[number][tenant, program] += num_tokens
            charge(request, num_tokens)

        def charged_elsewhere(tenant: str, used: float) -> None:
            others[number][tenant] += used
            elsewhere(tenant, used)

        def charged_program(tenant: str, program: int, num_tokens: int) -> None:
            others[number][tenant, program] += num_tokens
            of_program(tenant, program, num_tokens)

        monkeypatch.setattr(policy, "charge", charged)
        monkeypatch.setattr(policy, "charge_elsewhere", charged_elsewhere)
        monkeypatch.setattr(policy, "program_elsewhere", charged_program)

    async with replicas.open() as client:
        await replicas.settle()
        for number in range(3):
            watch(number)
        origins = [Origin(tenant=name, weight=weight, program=5) for name, weight in (("a", 1.0), ("b", 2.0))]
        jobs = [Job([20 + n] * 40, origin=origins[n % 2]) for n in range(12)]
        await run_all(client, *jobs)
        assert all(own.values())

        def expected(number: int) -> Counter:
            return sum((own[other] for other in own if other != number), Counter())

        await replicas.until(lambda: all(sum(others[n].values()) >= sum(expected(n).values()) for n in own))
        assert others == {number: expected(number) for number in own}


async def test_stats_add_up_and_each_replica_keeps_its_own(two) -> None:
    _, client = two
    before = (await client.stats()).prompt_tokens
    jobs = [Job([20 + number] * 40, origin=Origin(tenant=str(number))) for number in range(8)]
    await run_all(client, *jobs)
    stats = await client.stats()
    assert stats.prompt_tokens - before == 8 * 40
    assert stats.total_slots == 1200
    parts = [one.stats for one in client.engine.replicas]
    assert sum(part.prompt_tokens for part in parts) == stats.prompt_tokens
    assert all(part.generated_tokens for part in parts)  # both had requests
    snapshot = await client.watches.snapshot(None, 100, 0)
    nodes = {row[0] for row in snapshot.nodes}
    assert len(nodes) == len(snapshot.nodes)
    assert all(row[1] in nodes or row[1] == 0 or row[2] for row in snapshot.nodes)
    numbers = [step.number for step in snapshot.steps]
    assert numbers == sorted(set(numbers))
    later = await client.watches.snapshot(None, 100, numbers[-1])
    assert not later.steps
    leaf = next(row for row in snapshot.nodes if row[2] > 40)
    found = await client.watches.peek(snapshot.tenants[leaf[7]], leaf[0])
    assert found.token_ids[:40] == [int(snapshot.tenants[leaf[7]]) + 20] * 40


async def test_refreshed_stats_are_present_ones_and_a_lost_process_has_none(
    two, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentflow.cluster.replicas.replica_set.STATS_S", 60.0)
    replicas, client = two
    caplog.set_level("INFO")
    replicas.is_automatic = False
    job = Job([10, 20])
    async with anyio.create_task_group() as group:
        group.start_soon(job.run, client)
        await replicas.settle()
        await replicas.step_all()
        found: list[ReplicaStatus] = []

        async def refresh() -> None:
            found[:] = await client.engine.refreshed()

        replicas.is_automatic = True
        await refresh()
        replicas.is_automatic = False
        assert sorted(one.stats.running for one in found) == [0, 1]
        number = next(one.number for one in found if one.stats.running)
        hung = replicas.children[number]
        hung.hangs = True
        monkeypatch.setattr("agentflow.cluster.replicas.replica_set.STATS_S", 0.3)
        for _ in range(2):
            found.clear()
            group.start_soon(refresh)
            await replicas.settle()
            await replicas.step_all()
            await replicas.until(lambda: len(found) == 2)
            assert [one.is_silent for one in found] == [one.number == number for one in found]
            assert found[number].stats.running == 1  # the last known ones
        assert hung.engine._inbox.qsize() == 1  # a silent one is asked once
        caplog.clear()
        hung.die()
        await replicas.until(lambda: replica(client, number).restarts == 1)
        assert replica(client, number).stats is None
        replicas.become_automatic()
        await replicas.until(lambda: job.end is not None)
    job.check()
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"replica {number}" in line and "with 1 unfinished request" in line for line in lines)
    assert any(line.startswith(f"replica {number}:") and line.endswith(": 1") for line in lines)
    [one] = [one for one in await client.engine.refreshed() if one.number == number]
    assert one.stats is not None
    assert not one.is_silent
