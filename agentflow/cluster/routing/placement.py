"""One placement of requests for several models, which came together.

As in Algorithm 1 of "Parrot" (``router``): in topological order over all models, a task group as a whole. The
members of a group that run on different models are one group for each model, as a replica has one model. Each
is placed by the router of its model. The routers know each other's work on the devices that they share
(``devices``), so the cost of a request includes the requests that were placed before it, of any model.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agentflow.cluster.routing.load import RoutedRequest
from agentflow.cluster.routing.router import RoutingPolicy, units

logger = logging.getLogger(__name__)


def place_together(waiting: Sequence[tuple[RoutingPolicy, Sequence[RoutedRequest]]], now_s: float) -> None:
    """Sets the ``replica`` of requests that came together.

    Args:
        waiting: The router of each model, with its requests in the order of their arrival. A request that
            cannot be placed keeps its ``replica``, and others are placed nevertheless.
        now_s: The time.
    """
    found = [(unit[0].rank, router, unit) for router, calls in waiting if calls for unit in units(calls)]
    if len(waiting) > 1:
        found.sort(key=lambda one: one[0])
    for _, router, unit in found:
        try:
            router.place(unit, now_s)
        except Exception:  # a fault of one request, or of a router, must not affect others
            logger.exception("cannot place %d requests by their costs", len(unit))
