"""Several simulated engines behind a router.

Each engine is the real scheduler and cache, and its steps take the time of a cost model, as in
``engine.simulator``. Several engines add: messages that take time, are lost or
overtake each other, engines that die, and connections that break. The front sends the requests of a lost
replica to others, with the tokens that it has received, as the supervisor of an engine process does.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agentflow.cluster.routing.feed import Feed, Update
from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.prefix_tree import ReplicaNumber
from agentflow.cluster.routing.router import RoutingPolicy
from agentflow.engine.batch import Batch, BatchOutput
from agentflow.engine.cache.token_run import TokenArray, token_run
from agentflow.engine.request import CacheKey, Request, Row, Submit
from agentflow.engine.runner import run_batch
from agentflow.engine.scheduling.in_flight import Counters
from agentflow.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from agentflow.engine.simulator.cost_model import CostModel, features
from agentflow.engine.simulator.counting_scheduler import CountingScheduler
from agentflow.engine.simulator.fake_runner import FakeRunner
from agentflow.engine.simulator.program_graphs import HintedState
from agentflow.engine.simulator.simulation import Origins, Served, Simulated, tell_hints
from agentflow.engine.simulator.workload import Workload
from agentflow.protocol.sampling import SamplingParams

MODEL = "simulated"
_PARAMS = SamplingParams()
# The events of one moment, in their order.
STEP_ENDS, _ARRIVES, _STEP_BEGINS, _REPORT, _ASK, _LOSE, _RETURN = range(7)

MakePrompt = Callable[[int, Mapping[int, Sequence[int]]], TokenArray]
"""Makes the prompt of a request of the workload from its index and the outputs of earlier ones."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A replica is lost. ``dies``: its engine is replaced by an empty one; otherwise it goes on, out of
    reach."""

    at_s: float
    replica: ReplicaNumber
    away_s: float  # how long
    dies: bool = True


@dataclass(frozen=True, slots=True)
class Network:
    """The way of the replicas' reports to the router. Other messages take no time."""

    delay_s: float = 0.0  # at least
    jitter_s: float = 0.0  # at most in addition: later messages may overtake
    lost: float = 0.0  # the part of the messages that is lost
    seed: int = 0


@dataclass(slots=True)
class SimulatedEngine:
    """One engine, and the batch that it runs, if its scheduler makes batches."""

    number: ReplicaNumber
    scheduler: Scheduler
    feed: Feed
    runner: FakeRunner | None
    batch: Batch | None = None
    took_s: float = 0.0
    is_busy: bool = False  # a batch ends, or begins at this moment
    wakes: int = 0  # counts; an older event to begin a batch is void
    is_reachable: bool = True


@dataclass(slots=True, eq=False)
class Live:
    """An unfinished request at the front."""

    index: int  # in the workload
    served: Served
    prompt: TokenArray
    tokens: list[int]  # its output, as the workload has it
    output: list[int] = field(default_factory=list)  # received
    attempt: int = 0  # the id of the request in the engine
    request: Request | None = None
    call: RoutedRequest | None = None


class SimulatedCluster:
    """One replay.

    Args:
        workload: The requests.
        config: The options of the schedulers.
        policy: Chooses replicas.
        num_engines: The replicas at the start, each with a pool of the workload's size.
        cost: The time of steps.
        max_context: The longest sequence in tokens.
        knows_programs: The schedulers and the router learn the programs.
        network: The way of reports.
        losses: Replicas that are lost.
        new_runner: Makes a model for each engine, which then decides the outputs; None: the workload does.
        make_prompt: Makes prompts from outputs; None: the prompts of the workload.
    """

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        policy: RoutingPolicy,
        *,
        num_engines: int,
        cost: CostModel,
        max_context: int,
        knows_programs: bool = True,
        network: Network | None = None,
        losses: Sequence[Loss] = (),
        new_runner: Callable[[], FakeRunner] | None = None,
        make_prompt: MakePrompt | None = None,
    ) -> None:
        self.workload, self.config, self.policy, self.cost = workload, config, policy, cost
        self.now_s = 0.0
        self.served: list[Served] = []
        self.outputs: dict[int, list[int]] = {}
        """With a model: the output of each request, by its index."""
        self.counters = Counters()
        self.num_moved = 0
        """Requests that were sent to another replica, because theirs was lost."""
        self._max_context, self._knows_programs = max_context, knows_programs
        self._network = network or Network()
        self._random = random.Random(self._network.seed)
        self._new_runner, self._make_prompt = new_runner, make_prompt
        self._events: list[tuple[float, int, int, object]] = []
        self._ties, self._attempts = itertools.count(), itertools.count()
        self._origins = Origins(workload.arrivals, knows_programs=knows_programs)
        self._live: dict[int, Live] = {}  # by attempt
        self._homeless: list[Live] = []  # no replica is there
        self._followers: dict[int, list[int]] = {}
        self._num_missing: dict[int, int] = {}
        self._epochs: Counter[ReplicaNumber] = Counter()
        # The outputs of counted requests are known, and they do not move.
        self._counts = new_runner is None and not losses
        self._engines_with: dict[int, set[ReplicaNumber]] = {}  # by state: the engines that may have it
        self._engines: dict[ReplicaNumber, SimulatedEngine] = {}
        for number in range(num_engines):
            self._engines[number] = self._new_engine(number)
            policy.add(number)
        for loss in losses:
            self._push(loss.at_s, _LOSE, loss)
        for index, arrival in enumerate(workload.arrivals):
            if arrival.after is None:
                self._push(arrival.at_s, _ARRIVES, index)
                continue
            before = {arrival.after, *arrival.joins}
            self._num_missing[index] = len(before)
            for earlier in before:
                self._followers.setdefault(earlier, []).append(index)

    def run(self, until_s: float = math.inf) -> Simulated:
        """Runs the workload to its end, or until ``until_s``. Requests that have not ended then end at
        infinity, and so do first tokens that have not come."""
        start = time.perf_counter()
        events = self._events
        while events and events[0][0] <= until_s:
            self.now_s, kind, _, what = heapq.heappop(events)
            if kind == _ARRIVES:
                together = [what]
                while events and events[0][:2] == (self.now_s, _ARRIVES):
                    together.append(heapq.heappop(events)[3])
                self._arrive([index for index in together if isinstance(index, int)])
            elif kind == _STEP_BEGINS and isinstance(what, tuple):
                self._begin(*what)
            elif kind == STEP_ENDS:
                self._step_ends(what)
            elif kind == _REPORT and isinstance(what, Update):
                self._report(what)
            elif kind == _ASK and isinstance(what, int):
                self._send_snapshot(what)
            elif kind == _LOSE and isinstance(what, Loss):
                self._lose(what)
            elif kind == _RETURN and isinstance(what, Loss):
                self._return(what)
        for engine in self._engines.values():
            if not events:
                engine.scheduler.check_idle()
            self._count(engine)
        assert events or not self._live
        ended_s = max([served.ended_s for served in self.served], default=0.0)
        for live in [*self._live.values(), *self._homeless]:
            live.served.first_s = live.served.first_s or math.inf
            live.served.ended_s = math.inf
        real_s = time.perf_counter() - start
        return Simulated(self.workload.name, self.config, self.served, self.counters, ended_s, real_s)

    def _push(self, at_s: float, kind: int, what: object) -> None:
        heapq.heappush(self._events, (at_s, kind, next(self._ties), what))

    def _new_engine(self, number: ReplicaNumber) -> SimulatedEngine:
        feed = Feed(number, self._epochs[number])
        self._epochs[number] += 1
        config, kv_tokens = self._shape(number)
        scheduler = (CountingScheduler if self._counts else Scheduler)(
            num_slots=kv_tokens,
            max_context=self._max_context,
            config=config,
            model=MODEL,
            on_blocks=feed.on_blocks if self.policy.reads_feed else None,
            clock=lambda: self.now_s,
        )
        return SimulatedEngine(
            number, scheduler, feed, None if self._new_runner is None else self._new_runner()
        )

    def _shape(self, number: ReplicaNumber) -> tuple[SchedulerConfig, int]:
        """The scheduler's configuration and the pool of an engine."""
        return self.config, self.workload.kv_tokens

    def _count(self, engine: SimulatedEngine) -> None:
        counters = engine.scheduler.counters
        self.counters.prompt_tokens += counters.prompt_tokens
        self.counters.cached_tokens += counters.cached_tokens
        self.counters.computed_tokens += counters.computed_tokens
        self.counters.generated_tokens += counters.generated_tokens
        self.counters.evicted_tokens += counters.evicted_tokens
        self.counters.preemptions += counters.preemptions
        self.counters.steps += counters.steps

    # Requests.

    def _arrive(self, indices: Sequence[int]) -> None:
        lives = []
        for index in indices:
            arrival = self.workload.arrivals[index]
            served = Served(arrival, self.now_s)
            self.served.append(served)
            self._tell_hints(self._origins.arrived(index, self.now_s))
            prompt = arrival.prompt if self._make_prompt is None else self._make_prompt(index, self.outputs)
            lives.append(Live(index, served, prompt, arrival.output.tolist()))
        self._send(lives)

    def _send(self, lives: Sequence[Live]) -> None:
        """Places requests, and sends them."""
        if not any(engine.is_reachable for engine in self._engines.values()):
            self._homeless += lives
            return
        for live in lives:
            arrival = live.served.arrival
            tokens = live.prompt
            if live.output:
                tokens = np.concatenate((tokens, np.array(live.output, dtype=np.int32)))
            origin = self._origins.origin(live.index)
            knows = self._knows_programs
            live.call = RoutedRequest(
                live.attempt,
                CacheKey(arrival.tenant, arrival.salt),
                token_run(tokens),
                objective=origin.objective if knows else "latency",
                tenant=arrival.tenant,
                task_group=(origin.task_group or None) if knows else None,
                program=(origin.program or None) if knows else None,
            )
            if not self.policy.reads_feed:
                live.call.output_tokens = len(arrival.output)
        self._place(lives)
        for live in lives:
            self._submit(live)

    def _place(self, lives: Sequence[Live]) -> None:
        self.policy.place([live.call for live in lives if live.call is not None], self.now_s)

    def _submit(self, live: Live) -> None:
        assert live.call is not None
        arrival, engine = live.served.arrival, self._engines[live.call.replica]
        live.attempt = live.call.id = next(self._attempts)
        self._live[live.attempt] = live
        submit = Submit(live.attempt, [], _PARAMS, origin=self._origins.origin(live.index))
        tokens = np.frombuffer(live.call.run, dtype=np.int32)
        request = live.request = Request.of(submit, tokens, arrival.max_new_tokens - len(live.output))
        self._engines_with.setdefault(request.origin.state, set()).add(engine.number)
        if isinstance(engine.scheduler, CountingScheduler):
            engine.scheduler.add_known(request, live.tokens)
        else:
            engine.scheduler.add(request)
        self._wake(engine)

    def _advance(self, engine: SimulatedEngine, row: Row) -> None:
        request = row.request
        live = self._live.get(request.id)
        if live is None:  # it was moved while the replica was out of reach, which goes on with it
            if engine.is_reachable or request.num_generated == request.max_new_tokens:
                engine.scheduler.release(request)
            return
        if not engine.is_reachable or not row.token_ids:
            return
        num_output = request.num_tokens - len(live.prompt)
        if engine.runner is None:
            live.output += live.tokens[len(live.output) : num_output]
            request.tokens[request.num_tokens - 1] = live.output[-1]
        else:
            live.output.append(int(request.tokens[request.num_tokens - 1]))
        call = live.call
        assert call is not None
        if not call.has_started:
            call.has_started = True
            live.served.first_s = live.served.first_s or self.now_s
            self.policy.started(call, self.now_s)
        if num_output < len(live.tokens):
            return
        live.served.num_cached, live.served.ended_s = request.num_cached, self.now_s
        engine.scheduler.finish(request)
        self._end(live)

    def _end(self, live: Live) -> None:
        del self._live[live.attempt]
        assert live.call is not None
        self.policy.ended(live.call, len(live.output), self.now_s)
        if self._new_runner is not None:
            self.outputs[live.index] = live.output
        hints, closed = self._origins.ended(live.index, self.now_s)
        self._tell_hints(hints)
        if closed:
            for number in self._engines_with.pop(closed, ()):
                self._engines[number].scheduler.close_state(closed)
        for follower in self._followers.get(live.index, ()):
            self._num_missing[follower] -= 1
            if not self._num_missing[follower]:
                self._push(self.now_s + self.workload.arrivals[follower].at_s, _ARRIVES, follower)

    def _tell_hints(self, hints: Sequence[HintedState]) -> None:
        for hint in hints:
            for number in self._engines_with.get(hint[0], ()):
                tell_hints(self._engines[number].scheduler, (hint,))

    # Steps.

    def _wake(self, engine: SimulatedEngine) -> None:
        """The engine has work: its next batch begins now, unless one runs."""
        if not engine.is_busy:
            engine.is_busy = True
            engine.wakes += 1
            self._push(self.now_s, _STEP_BEGINS, (engine, engine.wakes))

    def _begin(self, engine: SimulatedEngine, wake: int) -> None:
        """The engine's next batch begins, if it has any work."""
        if engine is not self._engines[engine.number] or wake != engine.wakes:
            return
        scheduler = engine.scheduler
        if isinstance(scheduler, CountingScheduler):
            amounts = scheduler.next_step()
        else:
            engine.batch = scheduler.schedule()
            amounts = None if engine.batch is None else features(engine.batch)
        engine.is_busy = amounts is not None
        if amounts is not None:
            engine.took_s = self._cost(engine).seconds(*amounts)
            self._run_step(engine)
        elif len(scheduler.waiting) and scheduler.resumes_in_s < math.inf:
            engine.wakes += 1
            self._push(self.now_s + scheduler.resumes_in_s, _STEP_BEGINS, (engine, engine.wakes))

    def _cost(self, engine: SimulatedEngine) -> CostModel:
        return self.cost

    def _run_step(self, engine: SimulatedEngine) -> None:
        """A step begins that takes ``took_s`` if the engine has its device alone."""
        self._push(self.now_s + engine.took_s, STEP_ENDS, engine)

    def _step_ends(self, what: object) -> None:
        assert isinstance(what, SimulatedEngine)
        self._end_step(what)

    def _end_step(self, engine: SimulatedEngine) -> None:
        """The engine's batch ends."""
        if engine is not self._engines[engine.number]:
            return
        for row in self._complete(engine):
            self._advance(engine, row)
        update = engine.feed.flush()
        if update is not None and engine.is_reachable:
            self._transmit(update)
        engine.wakes += 1
        self._push(self.now_s, _STEP_BEGINS, (engine, engine.wakes))

    def _complete(self, engine: SimulatedEngine) -> Sequence[Row]:
        if isinstance(engine.scheduler, CountingScheduler):
            return engine.scheduler.complete_step(engine.took_s)
        assert engine.batch is not None
        if engine.runner is None:
            output = BatchOutput(np.zeros(len(engine.batch.sampled.rows), dtype=np.int64), None)
        else:
            output = run_batch(engine.runner, engine.batch)
        return engine.scheduler.complete(output, engine.took_s)

    # Reports.

    def _transmit(self, update: Update) -> None:
        network = self._network
        if network.lost and self._random.random() < network.lost:
            return
        if network.delay_s or network.jitter_s:
            delay_s = network.delay_s + network.jitter_s * self._random.random()
            self._push(self.now_s + delay_s, _REPORT, update)
        else:
            self._report(update)

    def _report(self, update: Update) -> None:
        if not self.policy.receive(update):
            self._push(self.now_s + self._network.delay_s, _ASK, update.replica)

    def _send_snapshot(self, number: ReplicaNumber) -> None:
        engine = self._engines[number]
        if engine.is_reachable:
            self._transmit(engine.feed.snapshot(engine.scheduler.memory.cache.stored_blocks()))

    # Losses.

    def _lose(self, loss: Loss) -> None:
        engine = self._engines.get(loss.replica)
        if engine is None or not engine.is_reachable:
            return
        engine.is_reachable = False
        moved = [live for live in self._live.values() if live.call and live.call.replica == loss.replica]
        for live in moved:
            assert live.call is not None
            del self._live[live.attempt]
            self.policy.ended(live.call, 0, self.now_s)
        self.policy.lose(loss.replica)
        if loss.dies:
            self._count(engine)
            self._engines[loss.replica] = self._new_engine(loss.replica)
            self._engines[loss.replica].is_reachable = False
        self._push(self.now_s + loss.away_s, _RETURN, loss)
        self.num_moved += len(moved)
        if moved:
            self._send(moved)

    def _return(self, loss: Loss) -> None:
        engine = self._engines[loss.replica]
        if not loss.dies:
            engine.feed = self._new_feed(engine)
        engine.is_reachable = True
        self.policy.add(loss.replica)
        if not loss.dies:
            self._send_snapshot(loss.replica)
        homeless, self._homeless = self._homeless, []
        if homeless:
            self._send(homeless)

    def _new_feed(self, engine: SimulatedEngine) -> Feed:
        feed = Feed(engine.number, self._epochs[engine.number])
        self._epochs[engine.number] += 1
        return feed
