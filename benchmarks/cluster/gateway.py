"""The gateway (``agentflow route``): the time that it adds, and the prefixes that its servers find cached.

The times are measured alternately, directly and through a gateway in a separate process, with a server that
writes words without a model. The hits are simulated: the text router learns caches and costs from its
requests, and is compared with the router that reads the replicas' reports, and with round robin.
``gateway_real_hits`` is measured on two servers with the default model.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager

import anyio
import httpx2
import msgspec
import psutil
from rich.console import Console

from agentflow.backends.apis.http.connections import Connections
from agentflow.cluster.routing.feed import Update
from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.prefix_tree import ReplicaNumber
from agentflow.cluster.routing.text_router import TextRouter
from agentflow.cluster.simulated.published import RoundRobin
from benchmarks.apis.chat_server import chat_server
from benchmarks.cluster.workloads import CASES, LOAD
from benchmarks.report import Report
from benchmarks.server.costs import busy_s
from benchmarks.serving import serving

NUM_REPLICAS = 4
SECONDS = {"small": 3.0, "full": 10.0}
ROUNDS = {"small": 5, "full": 9}
CALLS = {"small": 100, "full": 400}
STREAMED = {"small": 1_000, "full": 3_000}
TOKENS_PER_S = 1000.0
"""Slow enough that each token is forwarded separately, like the tokens of a model."""
PROMPT = "Where does the river go, and what does it do when it arrives there? " * 20
CONVERSATIONS, TURNS = 7, 4
"""An odd number of conversations, so that round robin does not keep them on one server."""


def measure_gateway(report: Report, console: Console, only: str, served: Mapping[str, float]) -> None:
    """Measures the figures whose id contains ``only``. ``served``: the programs that a replica serves per
    second, for the workloads for which this is known."""
    is_timed = any(only in f"cluster.{name}" for name in ("gateway_overhead_ms", "gateway_token_us"))
    if is_timed and not report.is_exact:
        console.print("the gateway before a server without a model", style="dim")
        anyio.run(_overhead, report)
    if only in "cluster.gateway_hit_gap":
        _simulated_hits(report, console, served)
    if only in "cluster.gateway_real_hits" and not report.is_exact:
        console.print("the gateway before two servers with the default model", style="dim")
        anyio.run(_real_hits, report)


# Times


@asynccontextmanager
async def _client(url: str) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=url, timeout=120, transport=Connections(None, 60.0)) as http:
        yield http


async def _call(http: httpx2.AsyncClient, num_tokens: int) -> None:
    body = {
        "model": "words",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "max_tokens": num_tokens,
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for _ in response.aiter_raw():
            pass


async def _median_ms(http: httpx2.AsyncClient, count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        await _call(http, 1)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


async def _overhead(report: Report) -> None:
    count, rounds, num_tokens = CALLS[report.scale], ROUNDS[report.scale], STREAMED[report.scale]
    added, direct, busy, spent = [], [], [], []
    with ExitStack() as stack:
        fast, slow = (
            stack.enter_context(chat_server(rate)).removesuffix("/v1") for rate in (0, TOKENS_PER_S)
        )
        options = ("--port", "0", "--log-level", "error")
        url, pid = stack.enter_context(serving("agentflow", "route", "--to", fast, *options))
        slow_url, slow_pid = stack.enter_context(serving("agentflow", "route", "--to", slow, *options))
        gateway, slow_gateway = [psutil.Process(pid)], [psutil.Process(slow_pid)]
        async with _client(fast) as plain, _client(url) as routed, _client(slow_url) as streamed:
            for http in (plain, routed):
                await _median_ms(http, 20)
            for _ in range(rounds):
                direct.append(await _median_ms(plain, count))
                before_s = busy_s(gateway)
                added.append(await _median_ms(routed, count) - direct[-1])
                busy.append(1e3 * (busy_s(gateway) - before_s) / count)
                before_s = busy_s(slow_gateway)
                await _call(streamed, num_tokens)
                spent.append(1e6 * (busy_s(slow_gateway) - before_s) / num_tokens)
    note = (
        f"the median of {count} streamed calls, one after the other, above the "
        f"{statistics.median(direct):.2f} ms without the gateway; processor time of the gateway "
        f"{statistics.median(busy):.2f} ms a call; a prompt of {len(PROMPT):,} characters"
    )
    report.median("cluster.gateway_overhead_ms", added, "ms", note=note)
    note = f"processor time of the gateway for each token of a stream of {TOKENS_PER_S:.0f} a second"
    report.median("cluster.gateway_token_us", spent, "us", note=note)


# Hits


class _Text:
    """The text router as a policy of the simulator. It reads no reports, and does not know the costs."""

    reads_feed = True  # otherwise the simulator tells it the length of outputs

    def __init__(self, num_replicas: int, cache_tokens: int) -> None:
        self._router = TextRouter(dict.fromkeys(range(num_replicas), cache_tokens))

    def add(self, replica: ReplicaNumber) -> None:
        pass

    def lose(self, replica: ReplicaNumber) -> None:
        self._router.forget(replica)

    def receive(self, update: Update) -> bool:
        return True

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        self._router.place(calls, now_s)

    def started(self, call: RoutedRequest, now_s: float) -> None:
        call.has_started = False  # the simulator sets it before
        self._router.started(call, now_s)

    def ended(self, call: RoutedRequest, num_output: int, now_s: float) -> None:
        self._router.ended(call, num_output or None, now_s)


def _hit_rates(name: str, seconds: float, served_per_s: float | None) -> list[float]:
    """The hit rates of a workload with the router that reads reports, the one over text, and in turns."""
    case = next(case for case in CASES if case.name == name)
    workload = case.workload(NUM_REPLICAS, LOAD * (served_per_s or case.programs_per_s()), seconds)
    policies = (case.router(), _Text(NUM_REPLICAS, case.kv_tokens), RoundRobin())
    return [case.run(workload, NUM_REPLICAS, policy).hit_rate for policy in policies]


def _simulated_hits(report: Report, console: Console, served: Mapping[str, float]) -> None:
    gaps, notes = [], []
    console.print("the gateway's router, simulated", style="dim")
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        seconds = SECONDS[report.scale]
        running = [pool.submit(_hit_rates, one.name, seconds, served.get(one.name)) for one in CASES]
        rates = [future.result() for future in running]
    for case, (fed, text, turns) in zip(CASES, rates, strict=True):
        gaps.append(100 * (fed - text))
        notes.append(f"{case.name} {text:.3f} ({fed:.3f}, round robin {turns:.3f})")
    note = (
        f"the largest of {len(CASES)} workloads on {NUM_REPLICAS} replicas: the hit rate of the gateway's "
        f"router, which reads no reports, below the router that does: {'; '.join(notes)}"
    )
    report.add("cluster.gateway_hit_gap", round(max(gaps), 2), "points", note=note)


async def _real_hits(report: Report) -> None:
    shares: dict[str, float] = {}
    options = ("--port", "0", "--log-level", "error")
    serve = ("agentflow", "serve", "--kv-tokens", "16384", *options)
    for name in ("gateway", "round robin"):
        with ExitStack() as servers:
            urls = [servers.enter_context(serving(*serve))[0].replace("ws", "http", 1) for _ in range(2)]
            if name == "gateway":
                targets = [text for url in urls for text in ("--to", url)]
                urls = [servers.enter_context(serving("agentflow", "route", *targets, *options))[0]]
            shares[name] = await _share(urls)
    note = (
        f"cached tokens by prompt tokens of {CONVERSATIONS} conversations of {TURNS} turns on two servers; "
        f"in turns {shares['round robin']:.3f}"
    )
    report.add("cluster.gateway_real_hits", round(shares["gateway"], 3), "of the tokens", note=note)


async def _share(urls: Sequence[str]) -> float:
    """The cached part of the prompts of conversations, whose requests go to the addresses in turn."""
    cached = total = number = 0
    async with httpx2.AsyncClient(timeout=300) as http:
        models = (await http.get(f"{urls[0]}/v1/models")).raise_for_status().json()
        model = models["data"][0]["id"]
        histories = [
            [{"role": "user", "content": f"Story {index}: {PROMPT}"}] for index in range(CONVERSATIONS)
        ]
        for _ in range(TURNS):
            for history in histories:
                body = {"model": model, "messages": history, "max_tokens": 4, "temperature": 0}
                got = await http.post(f"{urls[number % len(urls)]}/v1/chat/completions", json=body)
                answer = msgspec.json.decode(got.raise_for_status().content)
                number += 1
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                total += answer["usage"]["prompt_tokens"]
                said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""}
                history += [said, {"role": "user", "content": PROMPT[:200]}]
    return cached / total
