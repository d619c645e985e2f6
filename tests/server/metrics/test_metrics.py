"""GET /metrics: the engine's counters across restarts, and the waiting times of requests."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.clocks import ClockS
from support.compile_loaders import LOADER
from support.fake_engine import TEMPLATE, StepGate
from support.holds import Hold, until
from support.plain_model import plain_model_engine
from support.process_engine import PLAIN, generate, kill, process_engine
from support.processes import signal_child
from support.wire_server import open_generator

from agentflow.engine.client import EngineClient
from agentflow.engine.generator.generator import EngineGenerator
from agentflow.engine.grammar.compiler.compiler import constraint_compiler
from agentflow.engine.grammar.compiler.messages import CompiledConstraint, CompileLimits
from agentflow.engine.grammar.dfa import build_dfa
from agentflow.engine.grammar.regex import parse_regex
from agentflow.engine.messages import (
    PHASES,
    STEP_BOUNDS_S,
    BucketCounts,
    EngineStats,
    Failed,
    Finished,
    Progress,
    Started,
)
from agentflow.engine.request import Origin, Submit
from agentflow.errors import EngineDown, RequestRefused
from agentflow.protocol.constraint import Constraint
from agentflow.protocol.events import Stats, Usage
from agentflow.protocol.sampling import SamplingParams
from agentflow.runtime.generator import Generator
from agentflow.server.app import create_app
from agentflow.server.metrics import metrics as metrics_module
from agentflow.server.metrics.api_calls import ApiCallTimes
from agentflow.server.metrics.metrics import EngineTotals, ServerMetrics
from agentflow.server.metrics.request_times import (
    MAX_TENANTS,
    OTHER_TENANTS,
    WAIT_BOUNDS_S,
    RequestTimes,
    TokenUse,
)
from agentflow.server.models.models import EngineModel, Models, one_model

pytestmark = pytest.mark.anyio

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
Samples = Mapping[tuple[str, ...], float]


def samples(text: bytes) -> Samples:
    """Values by name and the values of labels other than the model's."""
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def get_metrics(app: Any) -> tuple[dict[str, Any], Samples]:
    """The first message of the response to GET /metrics, and the metrics."""
    start, body = await get_text(app)
    return start, samples(body.encode())


async def get_text(app: Any) -> tuple[dict[str, Any], str]:
    """The first message of the answer to GET /metrics, and the body."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return sent[0], sent[1]["body"].decode()


@asynccontextmanager
async def serving(client: EngineClient) -> AsyncIterator[Any]:
    """An application whose model is this engine's."""

    @asynccontextmanager
    async def open_generator() -> AsyncIterator[Generator[Any]]:
        yield EngineGenerator(client, TEMPLATE)

    app = create_app(one_model(open_generator))
    async with app.router.lifespan_context(app):
        yield app


# The application


async def test_the_metrics_include_those_of_the_engine():
    async with plain_model_engine() as client:
        async with serving(client) as app:
            await generate(client, [5, 6, 7])
            await generate(client, [5, 6, 7, *PLAIN.ids[:4], 9])
            start, told = await get_metrics(app)
        stats = await client.stats()
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"].startswith(b"text/plain; version=")
    assert told["agentflow_engine_up",] == 1
    assert told["agentflow_kernels", "none"] == 1
    assert told["agentflow_prompt_tokens_total", "prompt_cache"] == 3
    assert told["agentflow_prompt_tokens_total", "output_cache"] == 4
    assert told["agentflow_prompt_tokens_total", "computed"] == 4
    assert told["agentflow_generated_tokens_total",] == stats.generated_tokens == 40
    assert told["agentflow_computed_tokens_total",] == stats.computed_tokens
    assert told["agentflow_steps_total",] == stats.steps
    assert (told["agentflow_running_requests",], told["agentflow_waiting_requests",]) == (0, 0)
    slots = [told["agentflow_kv_tokens", state] for state in ("free", "cached", "in_use")]
    assert slots == [stats.free_slots, stats.cached_slots, 0]
    assert sum(slots) == 4096
    assert told["agentflow_ttft_seconds_count",] == told["agentflow_tpot_seconds_count",] == 2
    assert told["agentflow_queue_wait_seconds_count", "default"] == 2
    for phase in ("schedule", "run", "complete"):
        assert told["agentflow_step_seconds_count", phase] == stats.steps
        assert told["agentflow_step_seconds_bucket", "+Inf", phase] == stats.steps


async def test_tasks_are_counted():
    async with plain_model_engine() as client, serving(client) as app, anyio.create_task_group() as group:
        _, before = await get_metrics(app)
        assert before["agentflow_tasks",] == len(anyio.get_running_tasks())
        group.start_soon(anyio.sleep_forever)
        _, more = await get_metrics(app)
        assert more["agentflow_tasks",] == before["agentflow_tasks",] + 1
        group.cancel_scope.cancel()


async def test_forced_tokens_have_a_counter_of_their_own():
    machine = build_dfa(parse_regex("The capital of France is Paris")).to_bytes()
    async with plain_model_engine() as client, serving(client) as app:
        await generate(client)
        end = await client.generate(
            [5, 6],
            SamplingParams(),
            seed=0,
            on_text=lambda text: None,
            constraint=CompiledConstraint("capital", "dfa", machine),
        )
        _, told = await get_metrics(app)
    assert told["agentflow_forced_tokens_total",] == len(end.token_ids) > 5
    assert told["agentflow_generated_tokens_total",] == 20 + len(end.token_ids)


async def test_each_application_has_its_own_metrics():
    async with (
        plain_model_engine() as client,
        plain_model_engine() as other_client,
        serving(client) as app,
        serving(other_client) as other,
    ):
        await generate(client)
        _, told = await get_metrics(app)
        _, told_by_other = await get_metrics(other)
    assert told["agentflow_ttft_seconds_count",] == 1
    assert told_by_other["agentflow_ttft_seconds_count",] == 0
    assert told_by_other["agentflow_steps_total",] == 0


async def test_counters_go_on_when_the_application_starts_again():
    clients: list[EngineClient] = []

    @asynccontextmanager
    async def open_generator() -> AsyncIterator[Generator[Any]]:
        async with plain_model_engine() as client:
            clients.append(client)
            yield EngineGenerator(client, TEMPLATE)

    app = create_app(one_model(open_generator))
    for times in (1, 2):
        async with app.router.lifespan_context(app):
            await generate(clients[-1])
            _, told = await get_metrics(app)
            assert told["agentflow_generated_tokens_total",] == 20 * times
            assert told["agentflow_ttft_seconds_count",] == times
    _, told = await get_metrics(app)
    assert told["agentflow_engine_up",] == 0
    assert told["agentflow_generated_tokens_total",] == 40


async def test_counts_of_compilers_add_up():
    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        limits = CompileLimits(cpu_s=0.1, cpu_share=1.0, wall_s=100.0)  # however busy the processors are
        opening = constraint_compiler(limits, loader=LOADER)
        async with plain_model_engine() as client, opening as compiler:
            for source in ("pid", "pid", "abort", "spin"):
                with contextlib.suppress(RequestRefused):
                    await compiler.compile(Constraint("regex", source), tenant="ann")
            yield Models([EngineModel("plain", client, TEMPLATE, compiler=compiler)], compiler)

    app = create_app(open_models)
    names = (
        "constraints_compiled",
        "constraints_refused",
        "constraint_cache_hits",
        "compile_processes_killed",
    )
    for times in (1, 2):
        async with app.router.lifespan_context(app):
            _, told = await get_metrics(app)
            values = [told[f"agentflow_{name}_total",] for name in names]
            assert values == [times, 2 * times, times, times]


async def test_each_model_has_its_own_counters():
    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        async with plain_model_engine() as client, plain_model_engine() as other:
            await generate(client)
            yield Models([EngineModel("one", client, TEMPLATE), EngineModel("other", other, TEMPLATE)])

    app = create_app(open_models)
    async with app.router.lifespan_context(app):
        _, body = await get_text(app)
    lines = body.splitlines()
    assert 'agentflow_generated_tokens_total{model="one"} 20.0' in lines
    assert 'agentflow_generated_tokens_total{model="other"} 0.0' in lines
    assert 'agentflow_engine_up{model="other"} 1.0' in lines


async def test_a_generator_without_an_engine_has_the_metrics_of_the_server():
    app = create_app(one_model(open_generator))
    async with app.router.lifespan_context(app):
        start, told = await get_metrics(app)
    assert start["status"] == 200
    assert told["agentflow_engine_up",] == 1
    assert told["agentflow_ttft_seconds_count",] == 0


# An engine that does not answer


async def test_no_counter_goes_back_when_the_engine_process_is_started_again(tmp_path):
    hold = Hold(tmp_path / "hold")  # the first request takes twenty steps
    async with process_engine(hold_at={"22": hold.path}) as client, serving(client) as app:
        async with anyio.create_task_group() as group:
            await generate(client)
            _, before = await get_metrics(app)
            group.start_soon(generate, client, [30, 31])
            await hold.reached()
            kill(client, hold)
            with pytest.raises(EngineDown):
                await client.stats()  # answered when the process is known to be dead
            _, meanwhile = await get_metrics(app)
        _, after = await get_metrics(app)
    assert (before["agentflow_steps_total",], before["agentflow_engine_up",]) == (20, 1)
    counters = [key for key in before if key[0].endswith(("_total", "_count", "_bucket"))]
    assert meanwhile["agentflow_engine_up",] == 0
    assert all(meanwhile[key] >= before[key] for key in counters)
    assert all(after[key] >= meanwhile[key] for key in counters)
    assert (after["agentflow_engine_up",], after["agentflow_engine_restarts_total",]) == (1, 1)
    # The process that died had generated one more token, and had not reported it.
    assert after["agentflow_generated_tokens_total",] == 20 + 19
    assert after["agentflow_ttft_seconds_count",] == after["agentflow_tpot_seconds_count",] == 2
    assert after["agentflow_queue_wait_seconds_count", "default"] == 2


async def test_f37_restarts_are_counted_while_the_engine_is_down():
    @asynccontextmanager
    async def open_models() -> AsyncIterator[Models]:
        yield Models([EngineModel("one", client, TEMPLATE)])

    async with process_engine() as client:
        app = create_app(open_models)
        async with app.router.lifespan_context(app):
            signal_child(client.engine.pid, signal.SIGKILL)
            await until(lambda: client.engine.restarts == 1)
            _, meanwhile = await get_metrics(app)
            await until(lambda: client.engine.is_ready)
            _, after = await get_metrics(app)
    restarts = ("agentflow_engine_restarts_total",)
    assert (meanwhile[restarts], after[restarts]) == (1, 1)


async def test_a_scrape_does_not_wait_for_a_step_for_ever(monkeypatch):
    monkeypatch.setattr(metrics_module, "SCRAPE_TIMEOUT_S", 0)
    gate = StepGate()
    gate.attach()
    gate.allow(0)
    async with (
        plain_model_engine(on_step=gate) as client,
        serving(client) as app,
        anyio.create_task_group() as group,
    ):
        group.start_soon(generate, client)
        await gate.held()
        start, told = await get_metrics(app)
        gate.open()
    assert start["status"] == 200
    assert told["agentflow_engine_up",] == 0


# Counters of several engines


def engine_stats(*, restarts: int = 0, **counters: int) -> EngineStats:
    fields = dict.fromkeys((name for name in EngineStats.__struct_fields__), 0)
    step_times = [BucketCounts.empty(STEP_BOUNDS_S) for _ in PHASES]
    for phase in step_times:
        phase.counts[0] = counters["steps"]
        phase.total = float(counters["steps"])
    return EngineStats(**(fields | counters | {"restarts": restarts, "step_times": step_times}))


def test_counters_of_engines_one_after_the_other_add_up():
    totals = EngineTotals()
    for stats, total, restarts in (
        (engine_stats(steps=3, evicted_tokens=7), (3, 7), 0),
        (engine_stats(steps=5, evicted_tokens=7), (5, 7), 0),
        (engine_stats(steps=4, evicted_tokens=7), (5, 7), 0),  # an answer that was overtaken
        (engine_stats(steps=1, evicted_tokens=2, restarts=1), (6, 9), 1),
        (engine_stats(steps=0, restarts=3), (6, 9), 3),
        (engine_stats(steps=2, restarts=3), (8, 9), 3),
    ):
        totals.update(stats)
        assert (totals.count("steps"), totals.count("evicted_tokens")) == total
        assert [phase.counts[0] for phase in totals.phases()] == [total[0]] * len(PHASES)
        assert [phase.total for phase in totals.phases()] == [total[0]] * len(PHASES)
        assert totals.restarts == restarts
    totals.next_engine()
    assert (totals.count("steps"), totals.restarts) == (8, 3)
    totals.update(engine_stats(steps=1, restarts=1))
    assert (totals.count("steps"), totals.restarts) == (9, 4)
    totals.next_engine()
    totals.update(Stats(model="scripted", steps=5))  # without times
    assert totals.count("steps") == 14
    assert [phase.counts[0] for phase in totals.phases()] == [9] * len(PHASES)


# Times of requests


def submit(
    request_id: int,
    *,
    tenant: str = "",
    score_from: int = 0,
    generates: bool = True,
    is_extra: bool = False,
) -> Submit:
    params = SamplingParams() if generates else None
    origin = Origin(tenant, is_extra=is_extra)
    return Submit(request_id, [1, 2, 3], params, origin=origin, score_from=score_from)


def finished(request_id: int, output_tokens: int) -> Finished:
    return Finished(request_id, [], "", "length", 3, 0, output_tokens, [])


def progress(request_id: int) -> Progress:
    return Progress(request_id, "", (1,), ())


def filled(counts: BucketCounts, bounds: Iterable[float]) -> dict[float, int]:
    """The buckets that are not empty, by their upper bound."""
    edges = [*bounds, float("inf")]
    return {edge: count for edge, count in zip(edges, counts.counts, strict=True) if count}


def test_times_of_a_request_are_measured_from_when_it_was_accepted():
    clock = ClockS()
    times = RequestTimes(clock)
    for at_s, happens in (
        (0.0, lambda: times.sent(submit(1, tenant="ann"))),
        (2.0, lambda: times.received([Started([1])])),
        (6.0, lambda: times.received([progress(1)])),
        (7.0, lambda: times.received([Started([1])])),  # again, after a restart
        (8.0, lambda: times.received([progress(1)])),
        (9.0, lambda: times.received([progress(1), finished(1, 4)])),
        (9.0, lambda: times.received([finished(1, 4), progress(1), Started([1])])),  # unknown by now
    ):
        clock.now_s = 100.0 + at_s
        happens()
    assert times.queue_wait.keys() == {"ann"}
    assert (filled(times.queue_wait["ann"], WAIT_BOUNDS_S), times.queue_wait["ann"].total) == ({3.0: 1}, 2.0)
    assert (filled(times.ttft, WAIT_BOUNDS_S), times.ttft.total) == ({10.0: 1}, 6.0)
    assert (sum(times.tpot.counts), times.tpot.total) == (1, 1.0)


def test_the_tokens_of_tenants_are_counted():
    times = RequestTimes(ClockS())
    for request_id, tenant, cached, output in ((1, "ann", 1, 4), (2, "ann", 0, 2), (3, "", 3, 1)):
        times.sent(submit(request_id, tenant=tenant))
        times.received([Started([request_id])])
        times.received([Finished(request_id, [], "", "length", 3, cached, output, [])])
    assert times.tokens == {"ann": TokenUse(6, 1, 6), "default": TokenUse(3, 3, 1)}


def test_f37_requests_whose_prompt_no_client_sent_are_not_counted():
    times = RequestTimes(ClockS())
    times.sent(submit(1, tenant="ann", generates=False, is_extra=True))
    times.received([Started([1])])
    times.received([Finished(1, [], "", "length", 1000, 0, 0, [], miss_reason="first_seen")])
    assert (times.tokens, times.missed_tokens, times.queue_wait) == ({}, {}, {})


def test_missed_tokens_are_counted_by_reason():
    times = RequestTimes(ClockS())
    for request_id, cached, reason in ((1, 100, "salt"), (2, 0, "salt"), (3, 990, ""), (4, 1, "evicted")):
        times.sent(submit(request_id))
        times.received([Finished(request_id, [], "", "length", 1000, cached, 1, [], miss_reason=reason)])
    assert times.missed_tokens == {"salt": 1900, "evicted": 999}


def test_a_request_whose_first_token_ends_it_has_a_ttft_and_no_tpot():
    clock = ClockS()
    times = RequestTimes(clock)
    times.sent(submit(1))
    clock.now_s += 0.5
    times.received([Started([1]), finished(1, 1)])
    assert times.ttft.total == 0.5
    assert sum(times.tpot.counts) == 0


@pytest.mark.parametrize("how", [{"generates": False}, {"generates": False, "score_from": 1}])
def test_a_request_without_output_has_a_wait_only(how):
    times = RequestTimes(ClockS())
    times.sent(submit(1, **how))
    times.received([Started([1]), finished(1, 0)])
    assert sum(times.ttft.counts) == sum(times.tpot.counts) == 0
    assert sum(times.queue_wait["default"].counts) == 1


def test_nothing_is_kept_of_requests_that_ended():
    times = RequestTimes(ClockS())
    for request_id in range(4):
        times.sent(submit(request_id))
    times.received([Started([1]), finished(0, 1), Failed(1, "cancelled", ""), Failed(2, "engine_failed", "")])
    assert times._pending.keys() == {3}
    times.forget_pending()
    times.received([Started([3])])
    assert sum(times.queue_wait["default"].counts) == 1


def test_tenants_are_bounded_in_number_and_length_and_are_always_shown():
    metrics = ServerMetrics()
    requests = metrics.of("model").requests
    names = [OTHER_TENANTS, "\ud800", '"\n', "x" * 1000, *map(str, range(2 * MAX_TENANTS))]
    for request_id, name in enumerate(names):
        requests.sent(submit(request_id, tenant=name))
        requests.received([Started([request_id])])
    waits = requests.queue_wait
    assert len(waits) == MAX_TENANTS + 1
    assert max(map(len, waits)) <= 64
    assert sum(sum(counts.counts) for counts in waits.values()) == len(names)
    told = samples(metrics.text())
    assert told["agentflow_queue_wait_seconds_count", OTHER_TENANTS] == sum(waits[OTHER_TENANTS].counts)
    assert told["agentflow_queue_wait_seconds_count", '"\n'] == 1


# Buckets


@pytest.mark.parametrize("bound", STEP_BOUNDS_S)
def test_a_bucket_holds_its_upper_bound(bound):
    times = BucketCounts.empty(STEP_BOUNDS_S)
    times.count(STEP_BOUNDS_S, bound)
    times.count(STEP_BOUNDS_S, bound * 1.01)
    index = STEP_BOUNDS_S.index(bound)
    assert times.counts[index : index + 2] == [1, 1]
    assert sum(times.counts) == 2


def test_buckets_are_cumulative():
    metrics = ServerMetrics()
    for value in (0.001, 0.05, 0.05, 1000.0):
        metrics.of("model").requests.ttft.count(WAIT_BOUNDS_S, value)
    told = samples(metrics.text())
    buckets = [told["agentflow_ttft_seconds_bucket", le] for le in ("0.003", "0.03", "0.1", "300.0", "+Inf")]
    assert buckets == [1, 1, 3, 3, 4]
    assert told["agentflow_ttft_seconds_sum",] == pytest.approx(1000.101)


# The page


def test_the_page_lists_what_there_is():
    metrics = ServerMetrics()
    metrics.of("model").requests.sent(submit(1))
    metrics.of("model").requests.received([Started([1]), finished(1, 1)])
    metrics.answers["/v1/models", 0] += 1
    calls = metrics.of("behind an API").calls = ApiCallTimes()
    for call_id in (1, 2):
        calls.call_begun(call_id, "")
    calls.call_ended(1, Usage(10, output_tokens=2, cost=0.5))
    calls.call_failed(2, "cancelled")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", PAGE, flags=re.MULTILINE)
    documented = [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows]
    assert documented == [
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            tuple(name for name in family.samples[0].labels if name != "le"),
        )
        for family in metrics.registry.collect()
    ]
    for family in metrics.registry.collect():
        names = {name for sample in family.samples for name in sample.labels}
        for label in names - {"le", "tenant", "model", "route"}:
            for value in {sample.labels[label] for sample in family.samples}:
                assert f"`{value}`" in PAGE
