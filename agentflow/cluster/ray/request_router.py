"""A request router for Ray Serve: agentflow's router, for any servers.

Deployments of ``ray.serve.llm`` (vLLM, SGLang) and others whose requests have a prompt can use it::

    request_router_config=RequestRouterConfig(
        request_router_class="agentflow.cluster.ray.request_router.PrefixTreeRouter",
        request_router_kwargs={"cache_tokens": 200_000},
    )

It places a request by the cost of ``router``: the tokens that a hit saves, the queue and the batch of each
replica, the memory, and the replica of the program's latest request. A replica's cache is estimated from
the prompts that it was sent, with eviction (``sent_cache``). Prompts are token ids, or runs of UTF-8 bytes
(``text_router``).

Ray tells a router when a request ends, and not when its answer begins. So a request counts as started when
the prompts before it and its own would be computed at the configured speed. Each process with a handle of the
deployment has a router, which knows the requests that this handle sends; it knows the number of the other
requests from the lengths of queues that Ray collects.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from agentflow.cluster.routing.load import LEARNED_PART, EngineShape, RoutedRequest
from agentflow.cluster.routing.prefix_tree import ReplicaNumber
from agentflow.cluster.routing.router import Router
from agentflow.cluster.routing.sent_cache import SentCache
from agentflow.cluster.routing.text_router import MAX_RUN_BYTES, text_run
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun, token_run
from agentflow.engine.simulator.cost_model import CostModel

PROGRAM_HEADERS = (
    "x-agentflow-program",
    "x-dynamo-parent-session-id",
    "x-dynamo-session-id",
    "x-session-id",
)
"""Headers whose value is a program. Its requests prefer one replica."""
EVENT_LOST_S = 3600.0
"""A request counts as ended if Ray has not reported its end for this time."""
MAX_DEPTH = 32
_PROMPTS = ("messages", "prompt", "prompt_token_ids", "input_ids", "text", "input")


class PrefixTreeRouter(RequestRouter):
    """Sends requests to the replica where they cost the least time, for themselves and for other requests."""

    def initialize_state(  # type: ignore[override]
        self,
        *,
        prompt_tokens_per_s: float = 10_000.0,
        step_s: float = 0.02,
        max_running: int = 256,
        cache_tokens: int = 400_000,
        adapter_load_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Called by Ray Serve with ``request_router_kwargs``.

        Args:
            prompt_tokens_per_s: The rate at which a replica computes prompts.
            step_s: The time of a step that decodes, in seconds.
            max_running: The number of requests in one batch.
            cache_tokens: The size of a replica's prefix cache.
            adapter_load_s: The time to load a multiplexed model on a replica that does not have it, in
                seconds.
            clock: Returns the time in seconds.
        """
        cost = CostModel(base_s=step_s, row_s=1 / prompt_tokens_per_s, logits_s=0.0, read_s=0.0, pair_s=0.0)
        self._places = Router(EngineShape(cost, max_running, cache_tokens))
        self._mean_output = 64.0  # tokens
        self._token_s, self._step_s = 1 / prompt_tokens_per_s, step_s
        self._cache_tokens, self._adapter_load_s = cache_tokens, adapter_load_s
        self._clock = clock
        self._numbers: dict[ReplicaID, ReplicaNumber] = {}
        self._ids: dict[ReplicaNumber, ReplicaID] = {}
        self._caches: dict[ReplicaNumber, SentCache] = {}
        self._epochs = itertools.count()
        self._call_numbers = itertools.count()
        self._chosen: dict[str, RoutedRequest] = {}  # not sent yet, by Ray's id of the request
        self._sent: dict[str, list[RoutedRequest]] = {}  # several if replicas rejected it
        self._sent_at: dict[RoutedRequest, float] = {}
        self._num_sent: Counter[ReplicaNumber] = Counter()
        self._prompts_end_at: dict[ReplicaNumber, float] = {}
        self._slowness: dict[ReplicaNumber, float] = {}
        # When a call starts, or is given up: the time, the call's number, and Ray's id. Not the call, because
        # prompts are large and an event outlives its call by up to EVENT_LOST_S.
        self._events: list[tuple[float, int, str]] = []

    # Replicas.

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve with all replicas when they change."""
        super().update_replicas(replicas)
        for replica_id in [one for one in self._numbers if one not in self._replicas]:
            self._lose(replica_id)
        # In any order: of replicas without requests, routers must not all prefer the same one.
        for replica_id in random.sample([*self._replicas], len(self._replicas)):
            if replica_id not in self._numbers:
                number = next(number for number in itertools.count() if number not in self._ids)
                self._numbers[replica_id], self._ids[number] = number, replica_id
                self._caches[number] = SentCache(number, "", self._cache_tokens, next(self._epochs))
                self._prompts_end_at[number] = 0.0
                self._places.add(number)
        self._place_adapters()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve."""
        super().on_replica_actor_died(replica_id)
        if replica_id in self._numbers:
            self._lose(replica_id)

    def _lose(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id)
        for request_id, call in [
            *self._chosen.items(),
            *((request_id, call) for request_id, calls in self._sent.items() for call in calls),
        ]:
            if call.replica == number:
                self._end(request_id, call, 0)
        self._places.lose(number)
        del self._ids[number], self._caches[number], self._prompts_end_at[number]

    def _place_adapters(self) -> None:
        """Adds the multiplexed models that replicas do not have to their cost."""
        present = {self._numbers[name]: one.multiplexed_model_ids for name, one in self._replicas.items()}
        adapters = {adapter for on_replica in present.values() for adapter in on_replica}
        self._places.loads.set_adapters(
            {
                adapter: {
                    number: self._adapter_load_s
                    for number, on_replica in present.items()
                    if adapter not in on_replica
                }
                for adapter in adapters
            }
        )

    # Requests.

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Ray Serve for a request, again after a while if no replica accepts it. Returns the
        replica that costs least, then the others."""
        known = [one for one in candidate_replicas if one.replica_id in self._numbers]
        if pending_request is None or not known:
            return [known]
        request_id, now_s = pending_request.metadata.internal_request_id, self._clock()
        self._advance(now_s)
        self._drop(request_id)
        call = self._new_call(pending_request)
        free = self.select_available_replicas(known) or known
        self._weigh_others(known)
        self._place(call, {self._numbers[one.replica_id] for one in free}, now_s)
        self._chosen[request_id] = call
        best = self._replicas[self._ids[call.replica]]
        return [[best], [one for one in free if one is not best]]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The replica that Ray sends the request to: the first of the chosen ones that accepts."""
        request_id = pending_request.metadata.internal_request_id
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except BaseException:
            self._drop(request_id)
            raise
        number, call = self._numbers.get(replica.replica_id), self._chosen.get(request_id)
        if number is None or call is None:
            self._drop(request_id)
            return replica
        now_s = self._clock()
        if call.replica != number:
            self._drop(request_id)
            call = self._new_call(pending_request)
            self._place(call, {number}, now_s)
        self._chosen.pop(request_id, None)
        self._sent.setdefault(request_id, []).append(call)
        self._sent_at[call] = now_s
        self._num_sent[number] += 1
        missing_s = (call.num_tokens - call.num_hit) * self._token_s
        self._prompts_end_at[number] = max(self._prompts_end_at[number], now_s) + missing_s
        self._plan(self._prompts_end_at[number], request_id, call)
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray Serve when a request has ended on a replica, or was rejected there."""
        number = self._numbers.get(replica_id)
        for call in self._sent.get(internal_request_id, ()):
            if call.replica == number:
                now_s = self._clock()
                if not call.has_started:
                    self._start(call, now_s)
                num_output = max(1, int((now_s - self._sent_at[call]) / self._step_s))
                self._mean_output += LEARNED_PART * (num_output - self._mean_output)
                self._end(internal_request_id, call, num_output)
                return

    def _new_call(self, request: PendingRequest) -> RoutedRequest:
        adapter = request.metadata.multiplexed_model_id
        arguments = [*request.args, *request.kwargs.values()]
        limit = output_limit(arguments)
        return RoutedRequest(
            next(self._call_numbers),
            adapter,
            prompt_run(arguments),
            output_tokens=limit if limit < self._mean_output else 0,
            adapter=adapter,
            program=find_program(arguments) or request.metadata.session_id or None,
        )

    def _place(self, call: RoutedRequest, allowed: set[ReplicaNumber], now_s: float) -> None:
        call.barred = [number for number in self._ids if number not in allowed]
        self._places.place([call], now_s)

    def _weigh_others(self, replicas: Iterable[RunningReplica]) -> None:
        """Requests that this router did not send make a replica slower for each request. Ray's lengths of
        queues are late by a request."""
        for one in replicas:
            number = self._numbers[one.replica_id]
            own = self._num_sent[number]
            length = (self.replica_queue_len_cache.get(one.replica_id) or 0) - 1
            factor = max(1.0, (length + 1) / (own + 1))
            if factor != self._slowness.get(number, 1.0):
                self._slowness[number] = factor
                self._places.loads.set_slowness(number, factor)

    # Time.

    def _plan(self, at_s: float, request_id: str, call: RoutedRequest) -> None:
        heapq.heappush(self._events, (at_s, call.id, request_id))

    def _advance(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s:
            _, number, request_id = heapq.heappop(self._events)
            call = next((one for one in self._sent.get(request_id, ()) if one.id == number), None)
            if call is None:
                continue
            if call.has_started:
                self._end(request_id, call, 0)
            else:
                self._start(call, now_s)
                self._plan(self._sent_at[call] + EVENT_LOST_S, request_id, call)

    def _start(self, call: RoutedRequest, now_s: float) -> None:
        """Its prompt is in the cache of its replica."""
        self._places.started(call, now_s)
        update = self._caches[call.replica].sent(call.key, call.run)
        if update is not None:
            self._places.receive(update)

    def _drop(self, request_id: str) -> None:
        call = self._chosen.pop(request_id, None)
        if call is not None:
            self._places.ended(call, 0, self._clock())

    def _end(self, request_id: str, call: RoutedRequest, num_output: int) -> None:
        if self._chosen.get(request_id) is call:
            del self._chosen[request_id]
        elif self._sent_at.pop(call, None) is not None:
            self._num_sent[call.replica] -= 1
            calls = self._sent[request_id]
            calls.remove(call)
            if not calls:
                del self._sent[request_id]
        self._places.ended(call, num_output, self._clock())


def prompt_run(arguments: Sequence[object]) -> TokenRun:
    """The prompt among the arguments of a request: token ids, or text with the roles and tools of a chat. An
    empty text if there is none.

    >>> prompt_run([{"prompt": [1, 2]}]) == prompt_run([{"prompt_token_ids": [1, 2]}])
    True
    >>> prompt_run([{"prompt": "hello!!"}])
    b'hello!!\\x00'
    """
    for argument in arguments:
        for name in _PROMPTS:
            value = _field(argument, name)
            if not value:
                continue
            if isinstance(value, list) and all(type(one) is int for one in value):
                ids = [one & 0x7FFFFFFF for one in value[: MAX_RUN_BYTES // TOKEN_BYTES]]
                return token_run(np.array(ids, dtype=np.int32))
            tools = _field(argument, "tools") if name == "messages" else None
            text = bytearray()
            _collect([tools, value] if tools else value, text, 0)
            return text_run(bytes(text))
    return text_run(b"")


def _collect(value: object, text: bytearray, depth: int) -> None:
    """Adds the texts of a JSON value, or of objects with fields, in order, up to the length of a run."""
    if len(text) >= MAX_RUN_BYTES or depth > MAX_DEPTH:
        return
    if isinstance(value, str):
        text += value.encode("utf-8", "surrogatepass") + b"\0"
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if one is not None:
                text += str(name).encode("utf-8", "surrogatepass") + b"="
                _collect(one, text, depth + 1)
    elif isinstance(value, Iterable):
        for one in value:
            _collect(one, text, depth + 1)
    elif hasattr(value, "model_dump"):
        _collect(value.model_dump(exclude_none=True), text, depth + 1)
    elif value is not None:
        text += repr(value).encode() + b"\0"


def output_limit(arguments: Sequence[object]) -> int:
    """The most tokens that the request may generate; 0: it has no limit."""
    for argument in arguments:
        for name in ("max_completion_tokens", "max_tokens", "max_new_tokens"):
            value = _field(argument, name)
            if type(value) is int and value > 0:
                return value
    return 0


def find_program(arguments: Sequence[object]) -> str:
    """The program in a header among the arguments; empty: there is none."""
    for argument in arguments:
        headers = _field(argument, "headers")
        if isinstance(headers, Mapping):
            by_name = {str(name).lower(): str(value) for name, value in headers.items()}
            for name in PROGRAM_HEADERS:
                if by_name.get(name):
                    return by_name[name]
    return ""


def _field(argument: object, name: str) -> Any:
    if isinstance(argument, Mapping):
        return argument.get(name)
    return getattr(argument, name, None)
