"""The prefixes of a conversation that a client asks to keep in the cache, and their lifetimes.

``cache_control`` is the mark of Anthropic's API, which clients also send to other APIs, and
``prompt_cache_breakpoint`` is OpenAI's. Marks are advice, so an invalid mark is ignored. Only the longest
prefix with each lifetime matters, because the cache has no part of a prefix without the parts before it. So a
request has at most one prefix for each lifetime, however many marks a client sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agentflow.server.compatible.fields import Unread

SECONDS: Final = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0}
"""The lifetimes of both APIs, in seconds."""
CACHE_CONTROL_TTL: Final = "5m"
"""The default of ``cache_control``."""
BREAKPOINT_TTL: Final = "30m"
"""The default of ``prompt_cache_breakpoint``."""


class _Mark(msgspec.Struct):
    type: str | None = None
    mode: str | None = None
    ttl: str | None = None


def seconds_of_control(given: Unread) -> float | None:
    """The lifetime of a ``cache_control``, or None without one."""
    mark = _read(given)
    return (
        SECONDS.get(mark.ttl or CACHE_CONTROL_TTL) if mark is not None and mark.type == "ephemeral" else None
    )


def seconds_of_breakpoint(given: Unread) -> float | None:
    """The lifetime of a ``prompt_cache_breakpoint``, or None without one."""
    mark = _read(given)
    return SECONDS.get(mark.ttl or BREAKPOINT_TTL) if mark is not None and mark.mode == "explicit" else None


def _read(given: Unread) -> _Mark | None:
    if given is None:
        return None
    try:
        return msgspec.json.decode(given, type=_Mark | None)
    except msgspec.DecodeError:
        return None


@dataclass
class KeptBeginnings:
    """The prefixes that the marks of one conversation keep, as ``CompletionRequest.kept``."""

    _messages: dict[float, int] = field(default_factory=dict)  # the length of the longest prefix, by lifetime

    def add(self, num_messages: int, seconds: float | None) -> None:
        """Adds a mark after the first ``num_messages`` messages. ``seconds`` None: there is no mark."""
        if seconds is not None:
            self._messages[seconds] = max(num_messages, self._messages.get(seconds, 0))

    @property
    def found(self) -> Sequence[tuple[int, float]]:
        """The number of messages and the seconds of each prefix, unless a longer prefix lives as long."""
        kept: list[tuple[int, float]] = []
        for seconds in sorted(self._messages, reverse=True):
            if not kept or self._messages[seconds] > kept[-1][0]:
                kept.append((self._messages[seconds], seconds))
        return kept
