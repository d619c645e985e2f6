"""A step in the making: how many rows of which requests it computes, and the time that is left for more."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from agentflow.engine.request import Request
from agentflow.engine.scheduling.batch_builder import Work


@dataclass(slots=True)
class Draft:
    """``rows``: of each request, of its tokens first, then of its select's tree. ``limit``: rows that the
    step may have. ``num_decode``: rows of requests that decode. ``spare_s``: the time that prompts may
    add."""

    limit: int
    rows: dict[Request, int] = field(default_factory=dict)
    num_rows: int = 0
    num_decode: int = 0
    spare_s: float = math.inf

    @property
    def num_free(self) -> int:
        """Rows that the step may still have."""
        return self.limit - self.num_rows

    def add(self, request: Request, num_rows: int) -> None:
        """So many more rows of the request."""
        self.rows[request] = self.rows.get(request, 0) + num_rows
        self.num_rows += num_rows

    def left_of(self, request: Request) -> int:
        """Rows of the request that the step does not have yet."""
        return request.num_to_compute - self.rows.get(request, 0)

    def parts(self) -> tuple[list[Work], list[Work]]:
        """How many tokens of each request, those with one row first, and how many nodes of each select."""
        work: list[Work] = []
        branches: list[Work] = []
        for request, num_rows in self.rows.items():
            num_nodes = max(0, num_rows - (request.num_tokens - request.num_computed))
            if num_nodes < num_rows:
                work.append((request, num_rows - num_nodes))
            if num_nodes:
                branches.append((request, num_nodes))
        work.sort(key=_is_chunk)  # stable
        return work, branches


def _is_chunk(item: Work) -> bool:
    return item[1] > 1
