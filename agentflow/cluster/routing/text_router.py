"""Places requests on servers that send no reports, by the text of prompts.

The router has no tokenizer of theirs. It takes four bytes of UTF-8 for a token, which is about the length of
one in English, so that tree, cost and task groups (``router``) work on text unchanged: a run of tokens is a
run of bytes. The servers report nothing. Their caches are estimated from the prompts that they were sent
(``sent_cache``), and their speed from the times of their answers (``learned_cost``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentflow.cluster.routing.learned_cost import LearnedCost, mean_cost
from agentflow.cluster.routing.load import EngineShape, RoutedRequest
from agentflow.cluster.routing.prefix_tree import ReplicaNumber
from agentflow.cluster.routing.router import Router
from agentflow.cluster.routing.sent_cache import SentCache
from agentflow.engine.cache.token_run import TOKEN_BYTES, TokenRun

MAX_RUN_BYTES = 512 * 1024
"""The beginning of a prompt that is compared. Its digests take about three milliseconds."""
MAX_RUNNING = 256
"""Requests in one batch of a server, as vLLM has it by default."""
LEARNED_S = 1.0
"""The router learns the times of the servers this often."""
EVEN = 1.3
"""Servers whose times differ by less than this factor are treated alike."""
NUM_KNOWN = 8
"""A server is taken for one like the others until it has answered this often."""
KNOWN_S = 60.0
"""After this time without an answer, half of the difference to the others is forgotten: it may be over."""
_LEARNED_PART = 0.05  # of the mean request, by the latest one


def text_run(text: bytes) -> TokenRun:
    """UTF-8 text as a run.

    >>> text_run(b"hello"), text_run(b"")
    (b'hello   ', b'    ')
    """
    text = text[:MAX_RUN_BYTES]
    return text.ljust(max(1, -(-len(text) // TOKEN_BYTES)) * TOKEN_BYTES)


@dataclass(slots=True)
class _Sent:
    """A request in progress."""

    at_s: float
    num_units: int  # to compute before its first token, the queue included


class TextRouter:
    """Places the requests for one model on numbered servers.

    Args:
        cache_tokens: The size of each server's cache, by the server's number. Calls bar the servers that do
            not answer.
    """

    def __init__(self, cache_tokens: Mapping[ReplicaNumber, int]) -> None:
        servers = list(cache_tokens)
        self._cache_tokens = dict(cache_tokens)
        self._costs = {server: LearnedCost() for server in servers}
        self._shape = EngineShape(mean_cost([LearnedCost().costs()]), MAX_RUNNING, _mean(cache_tokens))
        self.router = Router(self._shape)
        self._epochs = dict.fromkeys(servers, 0)
        self._caches: dict[ReplicaNumber, SentCache] = {}
        self._num_answers = dict.fromkeys(servers, 0)
        self._answered_at_s = dict.fromkeys(servers, 0.0)
        self._waiting_units = dict.fromkeys(servers, 0)
        self._sent: dict[RoutedRequest, _Sent] = {}
        self._mean_units, self._mean_output = 256.0, 64.0
        self._learned_at_s = 0.0
        for server in servers:
            self.router.add(server)
            self._caches[server] = self._new_cache(server)

    def place(self, calls: Sequence[RoutedRequest], now_s: float) -> None:
        """Sets the ``replica`` and ``num_hit`` of requests that came together. No request may bar all
        servers, and the members of a task group bar the same servers."""
        self.router.place(calls, now_s)
        for call in calls:
            missing = call.num_tokens - call.num_hit
            self._waiting_units[call.replica] += missing
            self._sent[call] = _Sent(now_s, self._waiting_units[call.replica])

    def started(self, call: RoutedRequest, now_s: float) -> None:
        """The first bytes of the answer came."""
        sent = self._sent[call]
        self._costs[call.replica].observe(sent.num_units, 0, now_s - sent.at_s)
        self._computed(call)
        self.router.started(call, now_s)

    def ended(self, call: RoutedRequest, num_output: int | None, now_s: float) -> None:
        """The answer is complete, with about this many tokens; None: it is not complete."""
        sent, missing = self._sent.pop(call), call.num_tokens - call.num_hit
        if num_output is not None:
            self._costs[call.replica].observe(sent.num_units, num_output, now_s - sent.at_s)
            self._num_answers[call.replica] += 1
            self._answered_at_s[call.replica] = now_s
            self._mean_units += _LEARNED_PART * (missing - self._mean_units)
            self._mean_output += _LEARNED_PART * (num_output - self._mean_output)
        if not call.has_started:
            if num_output is not None:
                self._computed(call)
            else:
                self._waiting_units[call.replica] -= missing
        self.router.ended(call, num_output or 0, now_s)
        if now_s - self._learned_at_s >= LEARNED_S:
            self._learned_at_s = now_s
            self._learn(now_s)

    def forget(self, server: ReplicaNumber, cache_tokens: int | None = None) -> None:
        """The server's process was lost, and its cache with it. ``cache_tokens``: the size of the new one, if
        it is known."""
        if cache_tokens is not None and cache_tokens != self._cache_tokens[server]:
            self._cache_tokens[server] = cache_tokens
            self._shape = replace(self._shape, kv_tokens=_mean(self._cache_tokens))
            self.router.loads.set_shape(self._shape)
        self.router.forget(server)
        self._epochs[server] += 1
        self._caches[server] = self._new_cache(server)

    def _new_cache(self, server: ReplicaNumber) -> SentCache:
        return SentCache(server, "", self._cache_tokens[server], self._epochs[server])

    def _computed(self, call: RoutedRequest) -> None:
        self._waiting_units[call.replica] -= call.num_tokens - call.num_hit
        update = self._caches[call.replica].sent(call.key, call.run)
        if update is not None:
            self.router.receive(update)

    def _learn(self, now_s: float) -> None:
        """Reports the times of the servers to the router."""
        known = {
            server: self._costs[server].costs()
            for server, count in self._num_answers.items()
            if count >= NUM_KNOWN
        }
        if not known:
            return
        cost = mean_cost(list(known.values()))
        self._shape = replace(self._shape, cost=cost)
        self.router.loads.set_shape(self._shape)
        mean_s = cost.row_s * self._mean_units + cost.base_s * self._mean_output
        for server, learned in known.items():
            factor = (learned.unit_s * self._mean_units + learned.output_s * self._mean_output) / mean_s
            factor **= 0.5 ** ((now_s - self._answered_at_s[server]) / KNOWN_S)
            self.router.loads.set_slowness(server, 1.0 if 1 / EVEN < factor < EVEN else factor)


def _mean(cache_tokens: Mapping[ReplicaNumber, int]) -> int:
    return sum(cache_tokens.values()) // len(cache_tokens)
