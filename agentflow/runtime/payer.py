"""The payer of calls to APIs, for a generator that serves several clients.

A server sets the payer of each call; tasks started by the call have the same payer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol, TypeAlias

from agentflow.protocol.events import Usage

Settle: TypeAlias = Callable[[float | None], None]
"""Called when a call has ended, with its cost; None: the cost is unknown, because the answer was lost."""


class Payer(Protocol):
    """Pays for calls. Amounts are US dollars."""

    async def until_ready(self, highest: float) -> None:
        """Called immediately before ``reserve`` of the same cost.

        Raises:
            Overloaded: The payer's account cannot be reached.
        """

    def reserve(self, highest: float | None) -> Settle:
        """Called before a call is sent.

        Args:
            highest: The highest cost that the call can have; None: its price is unknown.

        Raises:
            RateLimited: The cost exceeds the payer's current balance.
            NotSupported: The payer does not pay for calls of unknown price.
        """

    def waste(self, usage: Usage) -> None:
        """Counts tokens of a call that are not in the usage of any value. The call's cost includes them."""


PAYER: ContextVar[Payer | None] = ContextVar("payer", default=None)
"""The payer of the calls that the current task makes; None: calls are not charged."""
