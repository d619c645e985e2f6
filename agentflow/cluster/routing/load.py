"""The cost of a request on each replica, in seconds that it and others wait.

The cost of a request of n tokens, of which a replica holds h, and of an expected output of o tokens:

- *its own time*: the prompts that wait there, then n - h tokens, both stretched because prompts share the
  steps with requests that decode (``share``), then o steps of the replica's present length. If the batch or
  the memory is full, also the time until there is room.
- *the time of others*: each request that decodes there waits for the n - h tokens, and its steps take longer
  by one row and the KV that this row reads. While it waits for the tokens, other prompts come and take a part
  p of the time, as in the last PROMPTS_S, so it waits 1 / (1 - p) times as long. Without this factor, long
  prompts gather on few replicas: those where few requests decode, slowly, between other long prompts. A
  request of the objective ``throughput`` counts THROUGHPUT of one whose reader waits.
- *capacity*: computing takes the time of all requests that come later, which wait longer the busier the
  replicas are: COMPUTED times the n - h tokens, for each request that runs on the average replica. A prefix
  that other requests in progress share does not count, because its next copy will be used again.
- *memory*: n - h tokens enter a cache. As far as it is full, other tokens leave it, and a part REUSE of them
  is computed again.
- *a mixed batch*: with a bound on the time per output token, a batch with a reader holds fewer
  tokens (Lin et al., "Parrot", OSDI 2024, section 5.4: 2,000 instead of 64,000). The first request of the
  objective ``latency`` on a replica stops the part of its batch that is above; a request for throughput on a
  replica with readers waits if there is no room.
- *a bound that replicas keep* (``keeps_tpot``): next to a reader, prompts have only the part of a step that
  the bound leaves; without one they have nearly all. While work for throughput comes, a request of the
  objective ``latency`` costs MIXED times the prompts' time that it takes from a replica. Of k readers, one
  more keeps the replica bounded longer by a (k + 1)th of its time. So readers share few replicas, and the
  others compute prompts at full speed. Prompts delay a reader within the bound only, which counts THROUGHPUT.
- *tenants*: a replica is fair, so a tenant waits there at most as long as its own queue, once for each tenant
  that waits.
- *adapters*: the time to load an adapter where it is missing.
- *other models* (``devices``): engines that share a device take turns on it. While another engine there has
  work for w seconds, a request that takes t seconds alone takes min(t, w) longer. It keeps its own engine at
  work for e seconds more, in which each request of the other engine waits min(e, w).

The figures of a replica change when a request is placed, has its first token, or ends. All that does not
depend on the request is computed then, for the one replica. A decision is arithmetic on a few arrays.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentflow.cluster.routing.prefix_tree import ReplicaNumber
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun
from agentflow.engine.request import Objective
from agentflow.engine.scheduling.step_limits import MAX_STRETCH, MIN_STEP_S, PROMPT_STEP_S
from agentflow.engine.simulator.cost_model import CostModel

SecondsArray = NDArray[np.float64]

THROUGHPUT = 0.2
REUSE = 0.5
COMPUTED = 2.0
MIXED = 2.0
MIN_STRETCH = 1.1  # as in ``engine.scheduling.pace``
PROMPTS_S = 2.0
"""The part of a replica's time that prompts take is a mean over about this time."""
FULL = 0.95
"""Part of a pool that is in use when the next request has to wait."""
_NOBODY = (0, 0.0)
KEPT_S = 10.0
"""After this time without a request for throughput, no more are expected."""
FIRST_OUTPUT = 400
"""The expected length of an output before any has ended. If it is too short, the first requests share few
replicas, where each other's steps seem to cost little."""
LEARNED_PART = 0.02
"""How much of the mean output length the latest request decides. Few, as short outputs end first."""
LEARNED_OF_KIND = 0.1
"""``LEARNED_PART`` for requests of one kind, from the tenth on."""
KIND_TOKENS = 64
"""Requests that share so long a beginning are of one kind."""
MAX_KINDS = 4096


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The router's knowledge of an engine before it runs."""

    cost: CostModel
    max_running: int  # requests in one batch
    kv_tokens: int  # its pool
    tpot_s: float = math.inf  # the bound of readers on the time per output token
    keeps_tpot: bool = False  # steps with readers are bounded by it (``SchedulerConfig.tpot_target_ms``)
    latency_tokens: float = math.inf  # KV tokens of a batch that keeps this bound


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """One request, as the router sees it."""

    id: int
    key: Hashable  # of the tree of its tokens
    run: TokenRun  # its prompt
    output_tokens: int = 0  # expected; 0: unknown
    objective: Objective = "latency"
    tenant: str = ""
    adapter: str = ""
    task_group: Hashable = None  # siblings that one consumer waits for
    program: Hashable = None
    rank: int = 0  # requests of its program that run before it
    barred: Sequence[ReplicaNumber] = ()  # replicas that it must not run on
    # Set by a router:
    replica: ReplicaNumber = -1
    placed_s: float = 0.0  # when
    num_hit: int = 0  # tokens that the replica was expected to hold
    prompt_s: float = 0.0  # the time of the others
    expected_tokens: int = 0  # of output
    has_started: bool = False  # it has its first token
    load: _Load | None = None  # of the replica, which may have been lost and have joined again since
    _kind: Hashable = None

    @property
    def kind(self) -> Hashable:
        """Its first tokens, which others may have in common with it."""
        if self._kind is None:
            self._kind = self.key, self.run[: KIND_TOKENS * TOKEN_BYTES]
        return self._kind

    @property
    def num_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.run) // TOKEN_BYTES


class Terms(NamedTuple):
    """Two parts of a cost, for each replica: the time of a request, and the time of the other requests."""

    own: SecondsArray
    others: SecondsArray


@dataclass(slots=True)
class _Load:
    """The requests of one replica."""

    num_waiting: int = 0
    num_running: int = 0
    num_latency: int = 0  # of both
    queue_s: float = 0.0  # to compute the prompts of those that wait
    since: float = 0.0  # the first of them began at this time at the latest
    prompts: float = 0.0  # the part of its time that prompts took, at ``prompts_at``
    prompts_at: float = 0.0
    read_tokens: float = 0.0  # KV that a step reads
    used_tokens: float = 0.0  # slots that only these requests need
    throughput_tokens: float = 0.0
    num_throughput: int = 0
    cached_tokens: float = 0.0  # reported
    others: float = 0.0  # that decode, by their weight
    until_s: float = 0.0  # the last of them ends then, if no other engine takes the device
    # By tenant: the requests that wait, and their part of ``queue_s``.
    queued: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """The requests that wait or run."""
        return self.num_waiting + self.num_running

    def add_prompt(self, seconds: float, now_s: float) -> None:
        """Adds a prompt that takes this long. Earlier prompts count less."""
        self.prompts *= math.exp((self.prompts_at - now_s) / PROMPTS_S)
        self.prompts += seconds / PROMPTS_S
        self.prompts_at = now_s


class _Work:
    """The arrays in which a decision computes.

    An operation takes as long for several rows as for one, and longer for an array and a number than for two
    arrays. So the numbers of a request are first written into rows, and then added to the rows of the
    replicas.

    Args:
        times: Rows of times for each replica. The first two are of ``_ready`` and ``_until``.
        factors: The rows ``_token_s``, ``_step_s``, ``_others_token_s`` and ``_others``.
    """

    def __init__(self, times: SecondsArray, factors: SecondsArray) -> None:
        self.times = times
        self.least, self.left = np.zeros_like(times), np.empty_like(times)  # from now on
        self.wait, self.longer, *self.others_left = self.left
        # (factors + ``before``) * ``multiplier`` + ``after``
        self.factors = factors
        self.before, self.multiplier, self.after, self.terms = np.zeros((4, *factors.shape))
        missing, self.output, missing_too, self.rows = self.multiplier
        pairs, self.rows_too, lasting, _ = self.after
        self.squares = self.before[0]
        self.by_replica = missing, missing_too, pairs, lasting
        self.term_rows = [*self.terms]


class Loads:
    """The loads of all replicas. ``shape``: of each engine."""

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._loads: list[_Load] = []
        self._present: set[ReplicaNumber] = set()
        self._output, self._mean_output = float(FIRST_OUTPUT), FIRST_OUTPUT  # the mean length
        self._kinds: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()  # outputs and mean of each kind
        self._sum_others = 0.0  # of all replicas
        self._throughput_at = -math.inf  # when a request for throughput came last
        self._num_tenants: dict[str, int] = {}  # requests in the queues, by tenant
        self._missing: dict[str, SecondsArray] = {}  # by adapter: the time to load it
        self._is_uneven = False
        self.on_load: Callable[[ReplicaNumber, float, float], None] | None = None
        """Called when the requests of a replica change, with the time until which they last and how many they
        are, by their weight."""
        self._over: set[ReplicaNumber] = set()  # of which steps are above the bound
        # Of engines of other models on the device of each replica, two arrays each, as ``on_load`` has it.
        self._others_on_devices: list[tuple[SecondsArray, SecondsArray]] = []
        self._resize(8)

    def _resize(self, size: int) -> None:
        old = len(self._loads)
        self._loads += [_Load() for _ in range(size - old)]

        def grown(value: float, *names: str) -> SecondsArray:
            rows = np.full((len(names), size), value)
            for row, name in zip(rows, names, strict=True):
                row[:old] = getattr(self, name, ())
            return rows

        # Own time for each token to compute, a step that decodes, the time of others for each token to
        # compute, and requests that decode, by their weight.
        factors = grown(0.0, "_token_s", "_step_s", "_others_token_s", "_others")
        self._token_s, self._step_s, self._others_token_s, self._others = factors
        # When its queue is done if it makes progress as expected; infinite for numbers that no replica has.
        [self._ready] = grown(math.inf, "_ready")
        # The least that is left of it, whatever the time; ``_Load.until_s``.
        self._floor, self._until = grown(0.0, "_floor", "_until")
        [self._over_s] = grown(0.0, "_over_s")  # the time of others for each token, above the bound on steps
        [self._stall] = grown(0.0, "_stall")  # the same for a reader next to work for throughput
        [self._mixed] = grown(0.0, "_mixed")  # the time that a reader takes from throughput, for each token
        [self._closed_s] = grown(0.0, "_closed_s")  # how long a request for throughput waits for readers
        [self._slowness] = grown(1.0, "_slowness")  # its times, divided by the times of the shape
        room = 0, size - old
        self._others_on_devices = [
            (np.pad(until, room), np.pad(weight, room)) for until, weight in self._others_on_devices
        ]
        for adapter, seconds in self._missing.items():
            self._missing[adapter] = np.pad(seconds, room)
        self._stack(factors)

    def _stack(self, factors: SecondsArray) -> None:
        """Puts the times from which a decision subtracts the present into one array. ``factors``: as of
        ``_Work``."""
        ends = [until for until, _ in self._others_on_devices]
        weights = [weight for _, weight in self._others_on_devices]
        self._work = work = _Work(np.stack((self._ready, self._until, *ends)), factors)
        work.least[0] = self._floor
        self._floor = work.least[0]
        self._ready, self._until, *ends = work.times
        self._others_on_devices = [*zip(ends, weights, strict=True)]

    @property
    def num_replicas(self) -> int:
        """How many there are."""
        return len(self._present)

    def add(self, replica: ReplicaNumber) -> None:
        """A replica without requests joins."""
        if replica >= len(self._loads):
            self._resize(max(replica + 1, 2 * len(self._loads)))
        self._loads[replica] = _Load()
        self._until[replica] = 0.0
        self._present.add(replica)
        self._refresh(replica)

    def remove(self, replica: ReplicaNumber) -> None:
        """A replica is gone. Its requests are removed by ``ended``, before or later."""
        self._present.remove(replica)
        self._over.discard(replica)
        self._over_s[replica] = 0.0
        if self.on_load is not None:
            self.on_load(replica, 0.0, 0.0)
        self._sum_others -= self._loads[replica].others
        self._ready[replica], self._others[replica], self._loads[replica].others = math.inf, 0.0, 0.0

    def set_adapters(self, times: Mapping[str, Mapping[ReplicaNumber, float]]) -> None:
        """Sets the time to load each adapter on the replicas that do not have it. Other adapters take as long
        on all replicas."""
        self._missing = {adapter: np.zeros(len(self._loads)) for adapter in times}
        for adapter, seconds in times.items():
            self._missing[adapter][list(seconds)] = [*seconds.values()]

    def set_shape(self, shape: EngineShape) -> None:
        """Replaces the knowledge of the engines."""
        self._shape = shape
        for replica in self._present:
            self._refresh(replica)

    def set_slowness(self, replica: ReplicaNumber, factor: float) -> None:
        """Sets the replica's time relative to an engine of the shape. The replica may join later."""
        if replica >= len(self._loads):
            self._resize(max(replica + 1, 2 * len(self._loads)))
        self._slowness[replica] = factor
        self._is_uneven = bool((self._slowness != 1.0).any())

    def cached(self, replica: ReplicaNumber, num_tokens: float) -> None:
        """The replica reports this many tokens in its cache."""
        self._loads[replica].cached_tokens = num_tokens
        self._refresh(replica)

    def set_other(self, replica: ReplicaNumber, number: int, until_s: float, weight: float) -> None:
        """Another engine on the device of the replica has requests until this time, this many by their
        weight. ``number``: of this engine among those on the device."""
        if replica >= len(self._loads):
            self._resize(max(replica + 1, 2 * len(self._loads)))
        while number >= len(self._others_on_devices):
            self._others_on_devices.append((np.zeros(len(self._loads)), np.zeros(len(self._loads))))
            self._stack(self._work.factors)
        until, weights = self._others_on_devices[number]
        until[replica], weights[replica] = until_s, weight

    # Decisions.

    def terms(
        self,
        call: RoutedRequest,
        hits: Mapping[ReplicaNumber, int],
        now_s: float,
        *,
        num_popular: int = 0,
        count: int = 1,
        num_common: int = 0,
    ) -> Terms:
        """The cost of a request on each replica, infinite where there is none. With ``count``: of this many
        requests of its length that share their first ``num_common`` tokens and run next to each other on one
        replica; ``own`` is then the time of the last.

        Args:
            call: The request.
            hits: How many of its tokens each replica holds.
            now_s: The time.
            num_popular: How many of its tokens others share now.
            count: The requests.
            num_common: The tokens that all of them share.
        """
        cost, n, output = self._shape.cost, call.num_tokens, self.expected_output(call)
        lasting_s = cost.row_s * (1.0 + self._sum_others / max(1, len(self._present))) * COMPUTED
        pairs_s = cost.pair_s / (2 * count)
        rows_s = output * count * (cost.row_s + cost.logits_s + cost.read_s * n)
        work = self._work
        left, terms = work.left, work.terms
        left.fill(now_s)
        work.squares.fill(cost.pair_s * n)
        work.output.fill(output)
        work.rows.fill(rows_s)
        work.rows_too.fill(rows_s)
        missing, missing_too, pairs, lasting = work.by_replica
        num, num_lasting = _to_compute(n, 0, num_popular, count, num_common)
        missing.fill(num)
        missing_too.fill(num)
        pairs.fill(-(num * num * pairs_s))
        lasting.fill(num_lasting * lasting_s)
        known = 0
        for replica, held in hits.items():
            if held != known:
                known = held
                num, num_lasting = _to_compute(n, held, num_popular, count, num_common)
            missing[replica] = missing_too[replica] = num
            pairs[replica] = -(num * num * pairs_s)
            lasting[replica] = num_lasting * lasting_s
        np.subtract(work.times, left, out=left)
        np.maximum(left, work.least, out=left)
        np.add(work.factors, work.before, out=terms)
        terms *= work.multiplier
        terms += work.after
        prompts, steps, others, rows = work.term_rows
        wait = work.wait
        if len(self._num_tenants) > 1:
            np.minimum(wait, self._fair_wait(call.tenant, prompts), out=wait)
        own = wait + prompts
        own += steps
        others = others + rows
        if self._over:
            others += output * self._over_s
        if self._others_on_devices:
            longer = work.longer
            np.subtract(own, longer, out=longer)
            np.maximum(longer, work.least[1], out=longer)
            alone = own
            for until, (_, weight) in zip(work.others_left, self._others_on_devices, strict=True):
                np.minimum(longer, until, out=wait)
                wait *= weight
                others += wait
                np.minimum(alone, until, out=until)
                own = own + until
        if call.objective == "throughput":
            own *= THROUGHPUT
        if self._shape.latency_tokens < math.inf:
            if call.objective == "latency":
                others += self._stall * output
            else:
                own += self._closed_s
        if self._shape.keeps_tpot and call.objective == "latency" and now_s - self._throughput_at <= KEPT_S:
            others += self._mixed * output
        if call.adapter in self._missing:
            own += self._missing[call.adapter]
        if self._is_uneven:
            own *= self._slowness
            others *= self._slowness
        if call.barred:
            own[list(call.barred)] = math.inf
        return Terms(own, others)

    def work_s(self, call: RoutedRequest, num_output: int) -> float:
        """How much longer the steps of the replica were because of a request that was placed there."""
        cost = self._shape.cost
        return call.prompt_s + num_output * (cost.row_s + cost.logits_s + cost.read_s * call.num_tokens)

    def expected_output(self, call: RoutedRequest) -> int:
        """The length of its output if it is not known: the mean of others of its kind, or of all. An
        application's prompts begin alike, and so do the turns of a session."""
        if call.output_tokens:
            return call.output_tokens
        known = self._kinds.get(call.kind)
        return self._mean_output if known is None else max(1, round(known[1]))

    def _fair_wait(self, tenant: str, prompts: SecondsArray) -> SecondsArray:
        """The longest wait of a tenant on each replica: its own queue, once for each tenant in the queue."""
        own_s = np.array([load.queued.get(tenant, _NOBODY)[1] for load in self._loads])
        num_tenants = np.array([len(load.queued) + (tenant not in load.queued) for load in self._loads])
        fair: SecondsArray = num_tenants * (own_s + prompts)
        fair[np.isinf(self._ready)] = math.inf  # no replica is there
        return fair

    # Changes.

    def placed(self, call: RoutedRequest, replica: ReplicaNumber, num_hit: int, now_s: float) -> None:
        """The request is sent to the replica, which is expected to hold this many of its tokens."""
        load, cost = self._loads[replica], self._shape.cost
        missing = call.num_tokens - num_hit
        call.replica, call.placed_s, call.num_hit, call.load = replica, now_s, num_hit, load
        call.expected_tokens, call.has_started = self.expected_output(call), False
        call.prompt_s = cost.row_s * missing + cost.pair_s * missing * (num_hit + missing / 2)
        load.add_prompt(call.prompt_s, now_s)
        if not load.num_waiting:
            load.since = now_s
        load.num_waiting += 1
        load.queue_s += call.prompt_s
        count, seconds = load.queued.get(call.tenant, (0, 0.0))
        load.queued[call.tenant] = count + 1, seconds + call.prompt_s
        self._num_tenants[call.tenant] = self._num_tenants.get(call.tenant, 0) + 1
        load.used_tokens += missing + call.expected_tokens
        if call.objective == "latency":
            load.num_latency += 1
        else:
            self._throughput_at = now_s
            load.num_throughput += 1
            load.throughput_tokens += call.num_tokens + call.expected_tokens
        self._refresh(replica)
        if self.on_load is not None:
            ends_s = max(now_s, float(self._ready[replica])) + call.expected_tokens * self._step_s[replica]
            self._set_until(replica, max(load.until_s, float(ends_s)))

    def started(self, call: RoutedRequest, now_s: float) -> None:
        """The request has its first token."""
        load = call.load
        assert load is not None
        call.has_started = True
        load.add_prompt(0.0, now_s)
        self._left_queue(load, call, now_s)
        load.num_running += 1
        load.read_tokens += call.num_tokens + call.expected_tokens / 2
        self._refresh(call.replica)

    def ended(self, call: RoutedRequest, num_output: int, now_s: float) -> None:
        """The request left its replica. ``num_output``: the tokens that it generated; 0: it did not end by
        itself, and nothing is learned."""
        load = call.load
        assert load is not None
        load.add_prompt(0.0, now_s)
        if call.has_started:
            load.num_running -= 1
            load.read_tokens -= call.num_tokens + call.expected_tokens / 2
        else:
            self._left_queue(load, call, now_s)
        load.used_tokens -= call.num_tokens - call.num_hit + call.expected_tokens
        if call.objective == "latency":
            load.num_latency -= 1
        else:
            load.num_throughput -= 1
            load.throughput_tokens -= call.num_tokens + call.expected_tokens
        if num_output:
            self._output += LEARNED_PART * (num_output - self._output)
            self._mean_output = round(self._output)
            self._learn(call.kind, num_output)
        self._refresh(call.replica)
        if self.on_load is not None and load is self._loads[call.replica] and call.replica in self._present:
            self._set_until(call.replica, load.until_s if load.num_requests else 0.0)

    def _set_until(self, replica: ReplicaNumber, until_s: float) -> None:
        load = self._loads[replica]
        load.until_s = self._until[replica] = until_s
        if self.on_load is not None:
            self.on_load(replica, until_s, load.num_latency + THROUGHPUT * load.num_throughput)

    def _learn(self, kind: Hashable, num_output: int) -> None:
        count, mean = self._kinds.pop(kind, (0, 0.0))
        part = max(LEARNED_OF_KIND, 1 / (count + 1))
        self._kinds[kind] = count + 1, mean + part * (num_output - mean)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def _left_queue(self, load: _Load, call: RoutedRequest, now_s: float) -> None:
        load.num_waiting -= 1
        load.since = now_s
        load.queue_s = load.queue_s - call.prompt_s if load.num_waiting else 0.0
        count, seconds = load.queued[call.tenant]
        if count > 1:
            load.queued[call.tenant] = count - 1, seconds - call.prompt_s
        else:
            del load.queued[call.tenant]
        self._num_tenants[call.tenant] -= 1
        if not self._num_tenants[call.tenant]:
            del self._num_tenants[call.tenant]

    def _refresh(self, replica: ReplicaNumber) -> None:
        """Computes the figures of one replica."""
        if replica not in self._present:
            return  # a late report
        load, shape, cost = self._loads[replica], self._shape, self._shape.cost
        running = load.num_running
        step_s = cost.base_s + (cost.row_s + cost.logits_s) * running + cost.read_s * load.read_tokens
        share = bounded = _share(step_s, shape.tpot_s)
        if shape.keeps_tpot:
            free = PROMPT_STEP_S / (step_s + PROMPT_STEP_S)
            if running and not load.num_latency:
                share = free
            lost = 1 - bounded / free
            self._mixed[replica] = MIXED * shape.tpot_s * lost / (1 + load.num_latency)
        left = 1 - min(load.prompts, share)  # of its time, by prompts
        if not running:
            share = 1.0
        queue_s = load.queue_s / share
        head_s = queue_s / load.num_waiting if load.num_waiting else 0.0
        room_s = 0.0
        excess = running + load.num_waiting + 1 - shape.max_running
        used = load.used_tokens / (FULL * shape.kv_tokens)
        if running and (excess > 0 or used > 1):
            turns = max(excess, (running + load.num_waiting) * (1 - 1 / used) if used > 1 else 0.0)
            room_s = turns * self._output * step_s / running
        self._ready[replica] = load.since + queue_s + room_s
        self._floor[replica] = queue_s - head_s + room_s
        self._token_s[replica] = cost.row_s / share
        self._step_s[replica] = step_s
        latency = running * load.num_latency / max(1, load.num_latency + load.num_throughput)
        others = latency + THROUGHPUT * (running - latency)
        self._sum_others += others - load.others
        self._others[replica] = load.others = others
        fill = min(1.0, max(load.cached_tokens, load.used_tokens) / shape.kv_tokens)
        delayed = THROUGHPUT * running if shape.keeps_tpot else others
        self._others_token_s[replica] = cost.row_s * (delayed / left + REUSE * fill)
        is_over = step_s + cost.row_s > shape.tpot_s
        if is_over:
            self._over.add(replica)
            self._over_s[replica] = (others + 1) * step_s
        elif replica in self._over:
            self._over.remove(replica)
            self._over_s[replica] = 0.0
        if shape.latency_tokens < math.inf:
            above = 1 - shape.latency_tokens / max(load.throughput_tokens, shape.latency_tokens)
            self._stall[replica] = 0.0 if load.num_latency else load.num_throughput * above * step_s
            is_closed = load.num_latency and load.used_tokens > shape.latency_tokens
            self._closed_s[replica] = self._output * step_s if is_closed else 0.0


def _to_compute(n: int, held: int, num_popular: int, count: int, num_common: int) -> tuple[int, int]:
    """The tokens that ``count`` requests of ``n`` tokens compute if ``held`` are held, and the number of
    these that no other request shares. The other arguments are as in ``Loads.terms``."""
    missing = n - held
    lasting = min(missing, n - num_popular)
    if count > 1:
        lasting += (count - 1) * min(lasting, n - max(num_common, num_popular))
        missing += (count - 1) * min(missing, n - num_common)
    return missing, lasting


def _share(step_s: float, bound_s: float) -> float:
    """The part of a step that prompts have, next to decoding that takes ``step_s``."""
    longest_s = max(min(max(MAX_STRETCH * step_s, MIN_STEP_S), bound_s), MIN_STRETCH * step_s)
    return 1 - step_s / longest_s
