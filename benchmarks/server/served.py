"""A server in this process with its engine in another, as ``agentflow serve`` has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agentflow.engine.options import EngineOptions
from agentflow.server.models.models import EngineModel
from agentflow.server.models.open_models import open_models
from agentflow.server.serve import RunningServer, running_server

MODEL = "smollm2-135m"


@asynccontextmanager
async def served(
    *, max_wait_s: float | None = None, **options: Any
) -> AsyncIterator[tuple[RunningServer, EngineModel]]:
    """Runs the server while the scope is open. ``max_wait_s``: it rejects requests that would wait longer.
    ``options``: of the engine."""
    engine = EngineOptions(MODEL, dtype="bfloat16", device="cpu", threads=2, **options)
    async with running_server(lambda: open_models({MODEL: engine}, max_wait_s=max_wait_s)) as server:
        [model] = server.service.models
        assert isinstance(model, EngineModel)
        yield server, model


def port_of(server: RunningServer) -> int:
    """Returns the port of the server."""
    return int(server.url.rpartition(":")[2])
