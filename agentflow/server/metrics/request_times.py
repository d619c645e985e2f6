"""Measures requests: the time in the queue, to the first token, and per token after it.

The times are measured in the server's process, so that they include restarts of the engine, as clients
experience them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from agentflow.engine.messages import BucketCounts, Failed, Finished, FromEngine, Progress, Started
from agentflow.engine.request import Submit

WAIT_BOUNDS_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TPOT_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
# The limit of tenants with their own label, which uses memory here and in Prometheus. The others share one.
MAX_TENANTS = 100
MAX_TENANT_CHARS = 64
NO_TENANT = "default"
OTHER_TENANTS = "other"


@dataclass(slots=True)
class PendingRequest:
    """An unfinished request."""

    sent_s: float
    tenant: str
    generates: bool
    embeds: bool
    is_started: bool = False
    first_s: float | None = None


@dataclass(slots=True)
class TokenUse:
    """Tokens of a tenant's finished requests. ``cached``: prompt tokens that were in the cache."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class RequestTimes:
    """A ``RequestObserver``. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttft = BucketCounts.empty(WAIT_BOUNDS_S)
        self.tpot = BucketCounts.empty(TPOT_BOUNDS_S)
        self.queue_wait: dict[str, BucketCounts] = {}
        self.tokens: dict[str, TokenUse] = {}
        self.missed_tokens: Counter[str] = Counter()
        """The tokens of prompts that were not cached, by ``Finished.miss_reason``."""
        self.num_embeddings = 0
        """The number of finished embedding requests, one for each text."""
        self.embedding_tokens = 0
        self._clock = clock
        self._pending: dict[int, PendingRequest] = {}

    def sent(self, submit: Submit) -> None:
        """Starts timing a request, unless no client sent its prompt."""
        if submit.origin.is_extra:
            return
        self._pending[submit.request_id] = PendingRequest(
            self._clock(),
            submit.origin.tenant,
            generates=submit.params is not None and not submit.score_from,
            embeds=submit.embeds,
        )

    def received(self, messages: Sequence[FromEngine]) -> None:
        """Records starts, first tokens and ends. All messages of a step have the same time."""
        now_s = self._clock()
        for message in messages:
            match message:
                case Progress():
                    pending = self._pending.get(message.request_id)
                    if pending is not None and pending.first_s is None:
                        self._has_first_token(pending, now_s)
                case Started():
                    for request_id in message.request_ids:
                        self._has_started(self._pending.get(request_id), now_s)
                case Finished():
                    pending = self._pending.pop(message.request_id, None)
                    if pending is not None:
                        self._count_tokens(pending, message)
                        self._has_finished(pending, now_s, message.output_tokens)
                case Failed():
                    self._pending.pop(message.request_id, None)

    def forget_pending(self) -> None:
        """Forgets unfinished requests, because the next engine may reuse their ids."""
        self._pending.clear()

    def _has_started(self, pending: PendingRequest | None, now_s: float) -> None:
        if pending is None or pending.is_started:  # after a restart it starts again: the first wait counts
            return
        pending.is_started = True
        tenant = self._label(pending.tenant)
        counts = self.queue_wait.get(tenant)
        if counts is None:
            counts = self.queue_wait[tenant] = BucketCounts.empty(WAIT_BOUNDS_S)
        counts.count(WAIT_BOUNDS_S, now_s - pending.sent_s)

    def _count_tokens(self, pending: PendingRequest, end: Finished) -> None:
        use = self.tokens.setdefault(self._label(pending.tenant), TokenUse())
        use.prompt += end.prompt_tokens
        use.cached += end.cached_tokens
        use.output += end.output_tokens
        if end.miss_reason:
            self.missed_tokens[end.miss_reason] += end.prompt_tokens - end.cached_tokens
        if pending.embeds:
            self.num_embeddings += 1
            self.embedding_tokens += end.prompt_tokens

    def _has_first_token(self, pending: PendingRequest, now_s: float) -> None:
        pending.first_s = now_s
        self.ttft.count(WAIT_BOUNDS_S, now_s - pending.sent_s)

    def _has_finished(self, pending: PendingRequest, now_s: float, output_tokens: int) -> None:
        if not pending.generates:
            return
        if pending.first_s is None:  # it ended with its first token
            self._has_first_token(pending, now_s)
        elif output_tokens > 1:
            self.tpot.count(TPOT_BOUNDS_S, (now_s - pending.first_s) / (output_tokens - 1))

    def _label(self, tenant: str) -> str:
        return tenant_label(tenant, self.queue_wait.keys())


def tenant_label(tenant: str, known: Set[str]) -> str:
    """The label of a tenant. ``known``: the labels in use."""
    label = tenant[:MAX_TENANT_CHARS].encode("utf-8", "replace").decode() or NO_TENANT
    return label if label in known or len(known - {OTHER_TENANTS}) < MAX_TENANTS else OTHER_TENANTS
