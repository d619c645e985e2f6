"""Faults inside the engine: each ends its own request, and every slot comes back."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.counted_lines import counted_lines
from support.engine.stepped_engine import SteppedEngine
from support.examples import examples
from support.fake_engine import TOKENIZER, StepGate
from support.plain_model import PLAIN_IDS, alone, fake_logprob, plain_model_engine
from support.plain_model import runner as plain_runner

from agentflow.engine import engine as engine_module
from agentflow.engine import outputs as outputs_module
from agentflow.engine import request as request_module
from agentflow.engine.adapters import AdapterRead
from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.client import EngineClient
from agentflow.engine.constrained.grammar_builder import BuiltGrammar, GrammarBuilder
from agentflow.engine.constrained.grammar_cache import GrammarCache
from agentflow.engine.engine import Engine
from agentflow.engine.grammar.compiler.messages import CompiledConstraint
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.messages import (
    Abort,
    CloseState,
    Failed,
    Finished,
    FromEngine,
    LoadAdapter,
    UnloadAdapter,
    UpdateHint,
)
from agentflow.engine.request import Objective, Origin, Request, Submit
from agentflow.engine.runner import OutOfMemory, ReadAdapter
from agentflow.engine.scheduling.admission import OutputReserve
from agentflow.engine.scheduling.in_flight import InFlight, InProgressPrefixes
from agentflow.engine.scheduling.kv_memory import KVMemory
from agentflow.engine.scheduling.policies.fair_policy import FairLongestPrefix
from agentflow.engine.scheduling.policies.policy import Preempted
from agentflow.engine.scheduling.policies.tenant_queue import Siblings, TenantQueue
from agentflow.engine.scheduling.policies.waiting_tree import WaitingTree
from agentflow.engine.scheduling.rows import batch_builder
from agentflow.engine.scheduling.rows.batch_builder import SamplingTable
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.scheduling.step_limits import Draft, StepCost
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.text.reasoning import ReasoningFormat
from agentflow.errors import EngineFailed
from agentflow.protocol.sampling import SamplingParams

pytestmark = pytest.mark.anyio

THINKING = ReasoningFormat("<think>", "</think>", True, 2)


@pytest.mark.parametrize("top_logprobs", [0, 3])
async def test_f1_logprobs_of_reasoning_that_reach_their_budget(top_logprobs: int) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=True, top_logprobs=top_logprobs)
    ends = []
    async with plain_model_engine(SchedulerConfig(token_budget=4)) as client:

        async def run() -> None:
            ends.append(await client.generate([5, 6, 7], params, seed=0, reasoning_format=THINKING))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(run)
        for end in ends:
            assert end.reasoning_tokens > 2
            assert end.logprobs == [
                fake_logprob([5, 6, 7, *end.token_ids[:place]], token)
                for place, token in enumerate(end.token_ids)
            ]
            assert len(end.top_logprobs) == (len(end.token_ids) if top_logprobs else 0)


BAD = PLAIN_IDS[7]
"""The first token of requests with a fault, and of no others."""


class Fault(Exception):
    """Raised in place of a step of one request."""


# For each place that works on one request: its owner, its name, and the request in its arguments.
PLACES: list[tuple[object, str, Callable[..., Request]]] = [
    (request_module, "_targets", lambda request, num_tokens: request),
    (Scheduler, "_fits", lambda self, request, *rest: request),
    (Draft, "chunk_size", lambda self, request, *rest: request),
    (Scheduler, "_charge", lambda self, request, *rest: request),
    (SamplingTable, "attach", lambda self, request: request),
    (KVMemory, "commit", lambda self, request, count: request),
    (InProgressPrefixes, "advanced", lambda self, request, *rest: request),
    (InFlight, "_read", lambda self, row, *rest: row.request),
    (outputs_module, "_keep_likelihoods", lambda row: row.request),
]


def failing(owner: object, name: str, request_of: Callable[..., Request], first: int) -> Any:
    """A patch of a place that fails for requests that begin with ``BAD``, from its ``first`` such call on."""
    real = getattr(owner, name)
    count = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if request_of(*args, **kwargs).tokens[0] == BAD:
            count += 1
            if count >= first:
                raise Fault(name)
        return real(*args, **kwargs)

    return patch.object(owner, name, call)


kinds = st.sampled_from(["generate", "generate", "score", "select", "compute"])


@pytest.mark.trio_in_full
@examples(100)
@given(
    jobs=st.lists(
        st.tuples(kinds, st.booleans(), st.lists(st.integers(2, 4), min_size=2, max_size=20)),
        min_size=1,
        max_size=8,
    ),
    faults=st.lists(st.tuples(st.sampled_from(PLACES), st.integers(1, 5)), min_size=1, max_size=2),
    max_running=st.integers(1, 6),
    token_budget=st.integers(1, 40),
    ahead=st.booleans(),
)
async def test_f1_a_fault_in_a_row_fails_its_request_only(
    jobs, faults, max_running, token_budget, ahead
) -> None:
    params = SamplingParams(max_tokens=8, logprobs=True)

    async def ask(client: EngineClient, kind: str, prompt: list[int]) -> None:
        match kind:
            case "generate":
                end = await client.generate(prompt, params, seed=0)
                assert end.token_ids == alone(prompt, params).ids
            case "score":
                end = await client.score(prompt, 1)
                assert end.logprobs == [fake_logprob(prompt[:n], prompt[n]) for n in range(1, len(prompt))]
            case "select":
                end = await client.score_choices(prompt, [[5, 6], [5, 7], [8]])
                assert end.choice_logprobs[2] == [fake_logprob(prompt, 8)]
            case _:
                await client.compute(prompt)

    async def run(client: EngineClient, kind: str, is_bad: bool, prompt: list[int]) -> None:
        if not is_bad:
            await ask(client, kind, prompt)
            return
        with suppress(EngineFailed):
            await ask(client, kind, [BAD, *prompt])

    config = SchedulerConfig(max_running=max_running, token_budget=token_budget)
    async with plain_model_engine(config, num_slots=600, launches_ahead=ahead) as client:
        with ExitStack() as stack:
            for place, first in faults:
                stack.enter_context(failing(*place, first))
            async with anyio.create_task_group() as group:
                for job in jobs:
                    group.start_soon(run, client, *job)
        stats = await client.stats()
        assert stats.free_slots + stats.cached_slots == stats.total_slots
        await ask(client, "generate", [BAD, 5, 6])


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "_decode"),
        (Scheduler, "_prompt_seconds"),
        (batch_builder, "_sampled_rows"),
        (InFlight, "complete"),
        (BatchOutput, "list_logprobs"),
        (BatchOutput, "list_tops"),
    ],
)
async def test_f1_a_fault_of_a_whole_step_ends_its_requests_and_not_the_engine(
    owner: object, name: str, ahead: bool
) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=True, top_logprobs=2)
    errors: list[EngineFailed] = []
    config = SchedulerConfig(max_running=2)
    async with plain_model_engine(config, num_slots=600, launches_ahead=ahead) as client:

        async def run(number: int) -> None:
            try:
                await client.generate([number] * 5, params, seed=0)
            except EngineFailed as error:
                errors.append(error)

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise Fault(name)

        with patch.object(owner, name, fail):
            async with anyio.create_task_group() as group:
                for number in range(10, 15):
                    group.start_soon(run, number)
        assert len(errors) == 5
        end = await client.generate([5, 6], params, seed=0)
        assert end.text == alone([5, 6], params).text


async def test_f37_what_a_step_teaches_about_costs_ends_no_request() -> None:
    def fail(*args: Any) -> None:
        raise Fault("_add")

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    async with plain_model_engine(SchedulerConfig(), num_slots=600) as client:
        with patch.object(StepCost, "_add", fail):
            end = await client.generate([5, 6], params, seed=0)
        assert end.text == alone([5, 6], params).text


class StalledHost(FakeRunner):
    """A device on which a step takes 10 ms, and a host that stalls after the launch of ``STALLED``."""

    STALLED = 50
    now_s = 0.0
    num_launched = 0

    def launch(self, batch: Batch) -> Batch:
        if not self._launched:
            self._ends: deque[float] = deque([self.now_s])
        self.now_s += 1e-4
        self._ends.append(max(self.now_s, self._ends[-1]) + 0.010)
        self.num_launched += 1
        self.now_s += 2.0 if self.num_launched == self.STALLED else 0.0
        return super().launch(batch)

    def collect(self, handle: Batch) -> BatchOutput:
        self._ends.popleft()
        self.now_s = max(self.now_s, self._ends[0])
        return super().collect(handle)


@pytest.mark.parametrize("ahead", [False, True])
def test_f37_a_stall_of_the_host_does_not_make_steps_seem_free(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """With two steps in flight, the second one has ended when the first one is collected."""
    runner = plain_runner(StalledHost, launches_ahead=ahead)
    clock = SimpleNamespace(**vars(time) | {"perf_counter": lambda: runner.now_s})
    monkeypatch.setattr(engine_module, "time", clock)
    engine = SteppedEngine(runner, None).engine
    engine.send(Submit(1, [5, 6], SamplingParams(max_tokens=100, ignore_eos=True)))
    engine.take_messages()
    while engine.step():
        pass
    assert runner.num_launched == 100
    assert engine.scheduler.cost.decode_s(1, 1, 100) == pytest.approx(0.010, rel=0.1)


@pytest.mark.parametrize("name", ["_start_by", "_note_pace"])
async def test_f37_a_place_that_cannot_be_given_ends_its_request_only(name: str) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    async with plain_model_engine(SchedulerConfig(), num_slots=900) as client:

        async def run(number: int, first: int) -> None:
            update = UpdateHint(number, 1, 0, "throughput", ttft_s=1.0)
            prompt, origin = [first, 5, 6], Origin(state=number)
            with suppress(EngineFailed) if first == BAD else ExitStack():
                end = await client.generate(
                    prompt, params, seed=0, origin=origin, on_text=lambda text: client.update_hint(update)
                )
                assert first != BAD
                assert end.text == alone(prompt, params).text

        with failing(Scheduler, name, lambda self, request, *rest: request, first=2):
            async with anyio.create_task_group() as group:
                for number, first in enumerate([5, BAD, 6], start=1):
                    group.start_soon(run, number, first)
        stats = await client.stats()
        assert stats.free_slots + stats.cached_slots == stats.total_slots


def failing_once(owner: object, name: str, nth: int) -> Any:
    """A patch of a place that fails in its ``nth`` call."""
    real, count = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            raise Fault(name)
        return real(*args, **kwargs)

    return patch.object(owner, name, call)


@pytest.mark.trio_in_full
@pytest.mark.parametrize(
    ("owner", "name", "num_requests"),
    [
        (TenantQueue, "take_out", 3),  # so few that the queue makes no trees
        (TenantQueue, "take_out", 9),
        (TenantQueue, "put_in", 3),
        (TenantQueue, "put_in", 9),
        (WaitingTree, "add", 9),
        (Siblings, "add", 9),
    ],
)
async def test_f37_a_fault_while_a_waiting_request_moves_ends_its_state_only(
    owner: object, name: str, num_requests: int
) -> None:
    """It left one place in the queue and did not get the other."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    ends: list[str] = []
    gate = StepGate()
    gate.attach()
    config = SchedulerConfig(max_running=1)
    async with plain_model_engine(config, num_slots=900, on_step=gate) as client:

        async def run(number: int) -> None:
            prompt, origin = [5, 6, number + 10], Origin(state=number + 1, task_group=1)
            try:
                end = await client.generate(prompt, params, seed=0, origin=origin)
            except EngineFailed:
                ends.append("failed")
            else:
                assert end.text == alone(prompt, params).text
                ends.append("done")

        gate.allow(3)
        with ExitStack() as stack, anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for number in range(num_requests):
                    group.start_soon(run, number)
                await gate.held()
                gate.allow(20)
                await gate.held()  # one runs, and the others wait
                stack.enter_context(failing_once(owner, name, 1))
                for number in range(num_requests):
                    client.update_hint(UpdateHint(number + 1, 1, 2, "throughput"))
                gate.open()
        stats = await client.stats()
        assert (stats.waiting, stats.running) == (0, 0)
        assert stats.free_slots + stats.cached_slots == stats.total_slots
    assert sorted(ends) == ["done"] * (num_requests - 1) + ["failed"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Scheduler, "_stop_running"),
        (FairLongestPrefix, "restore"),
        (Preempted, "add"),
        (Scheduler, "_note_pace"),
    ],
)
async def test_f37_a_fault_in_a_preemption_ends_its_request(owner: object, name: str) -> None:
    """Otherwise it would be neither among the running requests nor in the queue, and never end."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    ends: list[str] = []
    async with plain_model_engine(SchedulerConfig(max_running=4), num_slots=130) as client:

        async def run(number: int) -> None:
            prompt = [number + 10, 6]
            try:
                end = await client.generate(prompt, params, seed=0)
            except EngineFailed:
                ends.append("failed")
            else:
                assert end.text == alone(prompt, params).text
                ends.append("done")

        real = Scheduler.preempt
        stack = ExitStack()
        preempted: list[Request] = []

        def preempt(self: Scheduler, request: Request) -> None:
            preempted.append(request)
            if len(preempted) == 1:
                stack.enter_context(failing_once(owner, name, 1))
            real(self, request)

        with stack, patch.object(Scheduler, "preempt", preempt), anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for number in range(4):
                    group.start_soon(run, number)
        stats = await client.stats()
        assert (stats.waiting, stats.running) == (0, 0)
        assert stats.free_slots + stats.cached_slots == stats.total_slots
    assert preempted
    assert sorted(ends) == ["done"] * 3 + ["failed"]


@pytest.mark.parametrize(
    ("owner", "name"), [(Scheduler, "finish"), (FairLongestPrefix, "finish"), (OutputReserve, "finished")]
)
def test_f37_a_request_that_fails_when_it_ends_has_one_end(owner: object, name: str) -> None:
    ends: list[Finished | Failed] = []

    def deliver(messages: list[FromEngine]) -> None:
        ends.extend([one for one in messages if isinstance(one, Finished | Failed)])

    engine = Engine(plain_runner(), TOKENIZER, SchedulerConfig(), deliver)
    with failing_once(owner, name, 1):
        for number in (1, 2):
            engine.send(Submit(number, [5, 6], SamplingParams(max_tokens=2 + number, ignore_eos=True)))
        engine.take_messages()
        while engine.step():
            pass
        engine._deliver_outbox()
    assert [(type(end), end.request_id) for end in ends] == [(Failed, 1), (Finished, 2)]
    engine.scheduler.check_idle()


@pytest.mark.parametrize("error", [Fault("close"), EngineFailed("close")])
async def test_faults_in_messages_about_no_request_are_logged_ever_less_often(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with patch.object(Scheduler, "close_state", fail):
        async with plain_model_engine(SchedulerConfig(), num_slots=600) as client:
            for state in range(1, 6):
                client.close_state(state)
            end = await client.generate([5, 6], SamplingParams(max_tokens=4), seed=0)
    assert end.text == alone([5, 6], SamplingParams(max_tokens=4)).text
    lines = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [line.getMessage() for line in lines] == [
        f"cannot handle a message ({count} so far): CloseState" for count in (1, 2, 4)
    ]
    assert all(line.exc_info and line.exc_info[1] is error for line in lines)


async def test_f1_a_request_that_cannot_be_cached_can_be_aborted() -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    async with plain_model_engine(SchedulerConfig(), num_slots=600) as client:
        with failing(KVMemory, "commit", lambda self, request, count: request, first=2):
            with anyio.CancelScope() as scope:
                await client.generate([BAD, 5, 6], params, seed=0, on_text=lambda text: scope.cancel())
            assert scope.cancelled_caught
            stats = await client.stats()
        assert stats.free_slots + stats.cached_slots == stats.total_slots
        end = await client.generate([5, 6], params, seed=0)
        assert end.text == alone([5, 6], params).text


async def test_a_request_that_could_not_be_released_is_released_again() -> None:
    """Otherwise it would run on, without an end that the engine could see."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    real, num_calls = Scheduler._stop_running, 0

    def fail_once(self: Scheduler, request: Request) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise Fault("_stop_running")
        real(self, request)

    with patch.object(Scheduler, "_stop_running", fail_once):
        async with plain_model_engine(SchedulerConfig(), num_slots=600) as client:
            with anyio.CancelScope() as scope:
                await client.generate([5, 6, 7], params, seed=0, on_text=lambda text: scope.cancel())
            stats = await client.stats()
            end = await client.generate([5, 6], params, seed=0)
    assert num_calls == 3
    assert end.text == alone([5, 6], params).text
    assert stats.free_slots + stats.cached_slots == stats.total_slots


@pytest.mark.parametrize(("owner", "name"), [(GrammarBuilder, "build"), (GrammarCache, "put")])
async def test_a_grammar_that_cannot_be_built_or_kept_fails_the_requests_that_wait_for_it(
    owner: type, name: str
) -> None:
    """And no later ones."""
    constraint = CompiledConstraint("yes", "dfa", build_dfa(parse_regex("(?:yes)+")).to_bytes())
    params = SamplingParams(max_tokens=3)
    real, has_failed = getattr(owner, name), False

    def fail_once(*args: Any) -> Any:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            raise Fault(name)
        return real(*args)

    with patch.object(owner, name, fail_once), anyio.fail_after(30):
        async with plain_model_engine(SchedulerConfig(), num_slots=600) as client:
            with pytest.raises(EngineFailed):
                await client.generate([5, 6], params, seed=0, constraint=constraint)
            end = await client.generate([5, 6], params, seed=0, constraint=constraint)
    assert set(end.text) <= set("yes")


@pytest.mark.parametrize("waits_for_grammar", [False, True])
def test_requests_that_run_go_on_while_thousands_of_others_come(waits_for_grammar: bool) -> None:
    """The messages of a burst are read in turns between steps. So are requests whose grammar was built."""
    engine = SteppedEngine(plain_runner(), None).engine
    engine.send(Submit(1, [5, 6], SamplingParams(max_tokens=1_000, ignore_eos=True)))
    constraint = CompiledConstraint("yes", "dfa", build_dfa(parse_regex("(?:yes)+")).to_bytes())
    params = SamplingParams(max_tokens=5)
    for number in range(2, 3_002):
        engine.send(Submit(number, [7] * 50, params, constraint=constraint if waits_for_grammar else None))
    if waits_for_grammar:
        engine._builder._thread = threading.current_thread()  # it builds nothing
        while not engine._inbox.empty():
            engine.take_messages()
        engine.send(BuiltGrammar("yes", engine._grammars.make(constraint)))
    num_turns = 0
    while not engine._inbox.empty() or engine._ready:
        engine.take_messages()
        assert engine.step()
        num_turns += 1
    assert num_turns > 2


def test_f37_a_hint_costs_the_same_however_many_requests_wait_for_a_grammar() -> None:
    constraint = CompiledConstraint("yes", "dfa", build_dfa(parse_regex("(?:yes)+")).to_bytes())
    num_lines = {}
    for num_waiting in (100, 400):
        engine = SteppedEngine(plain_runner(), None).engine
        engine._builder._thread = threading.current_thread()  # it builds nothing
        for number in range(1, num_waiting + 1):
            origin = Origin(state=number)
            engine.send(
                Submit(number, [7], SamplingParams(max_tokens=1), origin=origin, constraint=constraint)
            )
        engine.send(UpdateHint(5, 6, 7, "throughput"))
        engine.send(Abort(6))
        engine.take_messages()
        while not engine._inbox.empty():
            engine.take_messages()
        assert engine._requests[5].origin.program == 6
        assert engine._awaiting.keys() == engine._awaited.keys() == engine._requests.keys()
        with counted_lines() as lines:
            engine._update_hint(UpdateHint(8, 6, 7, "throughput"))
        num_lines[num_waiting] = lines.num
        engine.send(BuiltGrammar("yes", engine._grammars.make(constraint)))
        while not engine._inbox.empty() or engine._ready:
            engine.take_messages()
        assert not engine._awaiting
    assert num_lines[400] == num_lines[100]


OPS = ["submit", "submit", "abort", "hint", "close", "load", "unload", "preempt", "step", "step", "step"]


@examples(100)
@given(
    plan=st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 2**16)), min_size=50, max_size=90),
    num_slots=st.sampled_from([90, 400]),
    tpot_target_ms=st.sampled_from([None, 1]),
    ahead=st.booleans(),
    memory_fails=st.floats(0.0, 0.5),
)
def test_nothing_is_left_of_requests_that_ended_in_any_way(
    plan, num_slots, tpot_target_ms, ahead, memory_fails
) -> None:
    chances = random.Random(plan[0][1])

    def on_step(batch: Batch) -> None:
        if len(batch.token_ids) > 1 and chances.random() < memory_fails:
            raise OutOfMemory("the step")

    ended: Counter[int] = Counter()

    def deliver(messages: list[FromEngine]) -> None:
        ended.update([one.request_id for one in messages if isinstance(one, Finished | Failed)])

    config = SchedulerConfig(max_running=3, token_budget=12, tpot_target_ms=tpot_target_ms)
    runner = plain_runner(num_slots=num_slots, max_context=80, launches_ahead=ahead, on_step=on_step)
    engine, scheduler = (made := Engine(runner, TOKENIZER, config, deliver)), made.scheduler
    loaded: list[str] = []

    def pump() -> bool:
        while not engine._inbox.empty():
            engine.take_messages()
        has_run = engine.step()
        if not has_run:
            engine._deliver_outbox()
        return has_run

    num_sent = 0
    for op, number in plan:
        match op:
            case "submit":
                num_sent += 1
                objective: Objective = "latency" if number % 3 else "throughput"
                adapter = loaded[number % len(loaded)] if loaded and not number % 4 else ""
                origin = Origin(
                    str(number % 2),
                    "",
                    objective,
                    number % 5,
                    number % 3,
                    program=number % 4,
                    adapter=adapter,
                )
                params = SamplingParams(max_tokens=1 + number % 20, ignore_eos=True) if number % 5 else None
                prompt = [5 + number % 2] * (1 + number % 40)
                choices = [[5, 6], [7]] if not number % 10 else ()
                engine.send(Submit(num_sent, prompt, params, origin=origin, adapter=adapter, choices=choices))
            case "abort":
                engine.send(Abort(1 + number % (num_sent + 1)))
            case "hint":
                engine.send(UpdateHint(number % 5, number % 4, number % 3, "latency", tpot_s=0.01))
            case "close":
                engine.send(CloseState(number % 5, is_dropped=number % 2 > 0))
            case "load":
                loaded.append(f"id {number % 2}")
                message = LoadAdapter(10**6 + number, "name", "folder")
                engine._inbox.put(AdapterRead(message, ReadAdapter(loaded[-1], None)))
            case "unload" if loaded:
                engine.send(UnloadAdapter(loaded.pop(number % len(loaded))))
            case "preempt" if scheduler.running and not scheduler._in_flight.launched:
                scheduler.preempt([*scheduler.running.values()][number % len(scheduler.running)])
            case "step":
                pump()
    for adapter in loaded:
        engine.send(UnloadAdapter(adapter))
    while pump():
        pass
    for number in engine._requests:  # of paused programs, whose time is long
        engine.send(Abort(number))
    pump()
    for state in range(5):
        engine.send(CloseState(state))
    pump()
    assert ended.keys() - {*range(10**6, 2 * 10**6)} == {*range(1, num_sent + 1)}
    assert set(ended.values()) <= {1}
    scheduler.check_idle()
    pace = scheduler._pace
    left = [
        (engine._requests, engine._started, engine._in_flight, engine._adapters._num_uses, runner.adapters),
        (engine._outputs._texts, engine._outputs._constrained),
        (scheduler.waiting._tenants, scheduler._in_flight.launched, scheduler._prefills._at),
        (scheduler._prefills.awaited, scheduler._sampling._with_logprobs, scheduler._sampling.adapted),
        (scheduler.memory.liveness._arrivals, scheduler.memory.liveness._gaps),
        (scheduler.memory.liveness.programs, len(scheduler.memory.liveness)),
        (pace and pace._urgent_waiting, pace and pace._held_back_from),
    ]
    assert not any(itertools.chain(*left))
    assert not any(node.needs for node in scheduler.memory.cache.nodes())


class ClosedRunner(FakeRunner):
    """Counts the batches that were in flight when it was closed."""

    num_in_flight = -1

    def close(self) -> None:
        self.num_in_flight = len(self._launched)


def test_an_engine_that_stops_collects_its_batches_first() -> None:
    runner = plain_runner(ClosedRunner, launches_ahead=True)
    engine = SteppedEngine(runner, num_deliveries=3)
    engine.run(Submit(1, [5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)))
    assert runner.num_in_flight == 0


def test_an_engine_whose_requests_wait_for_a_paused_program_does_not_seem_to_hang(monkeypatch):
    """A process that is silent while it owes answers is replaced after ``Deadlines.step_s``; a program may
    be paused for longer."""
    monkeypatch.setattr(engine_module, "SIGN_OF_LIFE_S", 0.001)
    monkeypatch.setattr(Scheduler, "resumes_in_s", 3600.0)
    by_hand = SteppedEngine(plain_runner(), 2)
    by_hand.engine.scheduler.waiting.pause("", 7)
    waiting = Submit(1, [5, 6], SamplingParams(), origin=Origin(program=7))
    assert by_hand.run(waiting) == [[], []]
