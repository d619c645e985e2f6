"""Whether the server lives, and whether it can take requests."""

from __future__ import annotations

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse

from agentflow.server.http_refusal import ENDING
from agentflow.server.service import Service
from agentflow.server.tenant import NOBODY_ELSE

# An engine answers between two steps, and a step may be a long prefill.
STATS_TIMEOUT_S = 5.0


async def live(request: Request) -> JSONResponse:
    """It answers."""
    return JSONResponse({"status": "live"})


async def ready(request: Request) -> JSONResponse:
    """Every engine answers, and there is room for a session."""
    service: Service | None = request.app.state.service
    if service is None or service.is_draining:
        return unready(ENDING)
    for model in service.models:
        try:
            with anyio.fail_after(STATS_TIMEOUT_S):
                await model.generator(NOBODY_ELSE).stats()
        except TimeoutError:
            return unready(f"the engine of {model.name} has not answered for {STATS_TIMEOUT_S} s")
        except Exception as error:  # whatever it is: the engine does not answer as it should
            return unready(f"the engine of {model.name} does not answer: {error}")
    if len(service.sessions) >= service.limits.max_sessions:
        return unready(f"{len(service.sessions)} sessions are open, which is the limit")
    names = [model.name for model in service.models]
    return JSONResponse({"status": "ready", "models": names, "sessions": len(service.sessions)})


def unready(reason: str) -> JSONResponse:
    """503, and why."""
    return JSONResponse(
        {"status": "unready", "reason": reason}, status_code=503, headers={"retry-after": "1"}
    )
