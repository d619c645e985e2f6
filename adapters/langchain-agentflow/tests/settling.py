"""Waits in a model's own loop until something holds there: for what a test cannot await."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel
from langchain_agentflow import ChatAgentflow

import agentflow as af


def until(model: ChatAgentflow, holds: Callable[[], bool]) -> None:
    """Blocks until then, for half a minute at most."""

    async def wait(flow: af.Session) -> None:
        with anyio.fail_after(30):
            while not holds():
                await anyio.lowlevel.checkpoint()

    model.connection().shared.run(wait)
