"""A batch in the making: which rows of which requests the next step computes."""

from __future__ import annotations

from dataclasses import dataclass

from agentflow.server.core.batch_builder import Work
from agentflow.server.core.request import Request


@dataclass(slots=True)
class Draft:
    """``work``: how many tokens of each request; ``branches``: how many nodes of each select's tree.
    ``num_rows``: of both together; ``limit``: rows that it may have."""

    work: list[Work]
    branches: list[Work]
    num_rows: int
    limit: int

    def add(self, request: Request, num_rows: int) -> None:
        """The request's next rows: of its tokens first, then of its tree."""
        num_nodes = max(0, num_rows - (request.num_tokens - request.num_computed))
        self.num_rows += num_rows
        if num_nodes < num_rows:
            self.work.append((request, num_rows - num_nodes))
        if num_nodes:
            self.branches.append((request, num_nodes))
