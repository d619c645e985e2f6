"""The figures of an engine that a tenant may see."""

from __future__ import annotations

from typing import Any, Final

from agentflow.engine.messages import EngineStats
from agentflow.engine.tenant import Tenant
from agentflow.protocol.events import Stats, Usage

_SHOWN_TO_ALL: Final = {"model", "prompt_tokens", "cached_tokens", "generated_tokens", "rerendered_tokens"}
_OF_APIS: Final = {
    "cost",
    "saved_calls",
    "saved_tokens",
    "failed_speculations",
    "endpoints",
    "hedged_calls",
}
_HIDDEN: Final[dict[str, Any]] = dict.fromkeys(set(Stats.__struct_fields__) - _SHOWN_TO_ALL - _OF_APIS)
"""None for the counters that cover all tenants."""


class TenantStats:
    """Counts the finished requests of one tenant on one model, because the tenant may not see the engine's
    figures."""

    def __init__(self, tenant: Tenant, model: str) -> None:
        self._tenant = tenant
        self._model = model
        self._finished = Usage()
        self.rerendered_tokens = 0
        """The tokens that a template rendered again, counted when a request needs them or their state
        closes."""

    def count(self, usage: Usage) -> None:
        """Counts a finished request."""
        self._finished += usage

    def visible(self, stats: EngineStats | None) -> Stats:
        """Returns the engine's figures. A tenant that may not see them gets only the tokens of its finished
        requests, and None for the rest. ``stats``: the engine's; None only for such a tenant."""
        if stats is None or not self._tenant.sees_metrics:
            return Stats(
                self._model,
                **_HIDDEN,
                prompt_tokens=self._finished.prompt_tokens,
                cached_tokens=self._finished.cached_tokens,
                generated_tokens=self._finished.output_tokens,
                rerendered_tokens=self.rerendered_tokens,
            )
        found = {name: getattr(stats, name) for name in Stats.__struct_fields__ if hasattr(stats, name)}
        return Stats(**found, rerendered_tokens=self.rerendered_tokens)
