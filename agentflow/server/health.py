"""Whether the server lives, and whether it can take requests.

Keys that may see the metrics are also answered which models there are, and what is wrong with one.
"""

from __future__ import annotations

from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import JSONResponse

from agentflow.errors import NotAuthorized, RateLimited
from agentflow.server.http.call import address_of
from agentflow.server.http.errors import ENDING
from agentflow.server.service import Service
from agentflow.server.tenants.keys import Tenants
from agentflow.server.tenants.tenant import NOBODY_ELSE

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
    shows_all = _may_see_all(request)
    for model in service.models:
        try:
            with anyio.fail_after(STATS_TIMEOUT_S):
                await model.generator(NOBODY_ELSE).stats()
        except Exception as error:  # whatever it is: the engine does not answer as it should
            is_late = isinstance(error, TimeoutError)
            why = f"has not answered for {STATS_TIMEOUT_S} s" if is_late else f"does not answer: {error}"
            return unready(f"the engine of {model.name} {why}" if shows_all else "an engine does not answer")
    num_sessions = len(service.sessions)
    if num_sessions >= service.limits.max_sessions:
        return unready(
            f"{num_sessions} sessions are open, which is the limit"
            if shows_all
            else "as many sessions are open as may be"
        )
    answer: dict[str, Any] = {"status": "ready"}
    if shows_all:
        answer |= {"models": [model.name for model in service.models], "sessions": num_sessions}
    return JSONResponse(answer)


def _may_see_all(request: Request) -> bool:
    """Whether the request comes with a key for the metrics, or none is needed."""
    tenants: Tenants = request.app.state.tenants
    try:
        return tenants.of_request(request.headers, address_of(request.scope)).sees_metrics
    except (NotAuthorized, RateLimited):
        return False


def unready(reason: str) -> JSONResponse:
    """503, and why."""
    return JSONResponse(
        {"status": "unready", "reason": reason}, status_code=503, headers={"retry-after": "1"}
    )
