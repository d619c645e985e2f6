"""Places the requests that wait, for all models of a server together, in one turn of the event loop.

A program's requests for different models become ready in the same turn, and so do the members of a task group
that name different models. They are placed in one order over all models (``routing.placement``), each on a
replica of its model, and see each other's work on the GPUs that the models share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio

from agentflow.cluster.routing.devices import SharedDevices
from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.placement import place_together
from agentflow.cluster.routing.router import RoutingPolicy
from agentflow.engine.process.request_journal import Unfinished

MAX_PLACED = 64
"""Requests that are placed in one turn of the event loop, of all models."""
MAX_PLACED_TOKENS = 131_072
"""The most tokens of these requests, unless one of a model alone has more. To read and write them takes 3 ms
or more."""


class PlacedSet(Protocol):
    """The replicas of one model (``ReplicaSet``)."""

    @property
    def router(self) -> RoutingPolicy:
        """Places the requests."""

    @property
    def can_place(self) -> bool:
        """Whether requests wait, and a replica may have them."""

    def take(self, max_requests: int, max_tokens: int) -> Sequence[tuple[Unfinished, RoutedRequest]]:
        """Removes and returns the requests that have waited longest."""

    def send_placed(self, calls: Sequence[tuple[Unfinished, RoutedRequest]]) -> None:
        """Sends requests to the replicas on which they were placed."""


class PlacingTurn:
    """The replicas of all models. ``devices``: the devices that their engines share."""

    def __init__(self) -> None:
        self.devices = SharedDevices()
        self.sets: list[PlacedSet] = []

    def place(self) -> None:
        """Places requests of each model, as many as one turn of the event loop may."""
        ready = [one for one in self.sets if one.can_place]
        if not ready:
            return
        limits = max(1, MAX_PLACED // len(ready)), MAX_PLACED_TOKENS // len(ready)
        taken = [(one, one.take(*limits)) for one in ready]
        place_together(
            [(one.router, [call for _, call in calls]) for one, calls in taken], anyio.current_time()
        )
        for one, calls in taken:
            one.send_placed(calls)
