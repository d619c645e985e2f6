"""Measures the calls to a model behind an API, with the tokens, costs and errors that it reports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from time import monotonic

from agentflow.protocol.events import Usage
from agentflow.server.metrics.request_times import PendingRequest, RequestTimes, TokenUse, tenant_label


class ApiCallTimes(RequestTimes):
    """A ``CallObserver``. Calls are not queued, so ``queue_wait`` stays empty."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(clock)
        self.cost: defaultdict[str, float] = defaultdict(float)
        """US dollars by tenant, of models whose price is known."""
        self.errors: Counter[str] = Counter()
        """Failed calls by the code of their error; ``cancelled``: they were cancelled."""

    @property
    def num_running(self) -> int:
        """The number of calls in progress."""
        return len(self._pending)

    @property
    def all_tokens(self) -> TokenUse:
        """The tokens of all tenants."""
        total = TokenUse()
        for use in self.tokens.values():
            total.prompt += use.prompt
            total.cached += use.cached
            total.output += use.output
        return total

    def call_begun(self, call_id: int, tenant: str, *, generates: bool = True) -> None:
        """Starts timing a call."""
        self._pending[call_id] = PendingRequest(
            self._clock(), tenant, generates=generates, embeds=not generates
        )

    def call_has_text(self, call_id: int) -> None:
        """Records the first text of a call."""
        pending = self._pending.get(call_id)
        if pending is not None and pending.first_s is None:
            self._has_first_token(pending, self._clock())

    def call_ended(self, call_id: int, usage: Usage) -> None:
        """Records the end of a call."""
        pending = self._pending.pop(call_id, None)
        if pending is None:
            return
        self.charged(pending.tenant, usage)
        self._has_finished(pending, self._clock(), usage.output_tokens)

    def call_failed(self, call_id: int, code: str) -> None:
        """Records a failure."""
        if self._pending.pop(call_id, None) is not None:
            self.errors[code] += 1

    def charged(self, tenant: str, usage: Usage) -> None:
        """Counts tokens and costs."""
        label = self._label(tenant)
        use = self.tokens.setdefault(label, TokenUse())
        use.prompt += usage.prompt_tokens
        use.cached += usage.cached_tokens
        use.output += usage.output_tokens
        if usage.cost:
            self.cost[label] += usage.cost

    def _label(self, tenant: str) -> str:
        return tenant_label(tenant, self.tokens.keys())
