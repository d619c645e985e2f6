"""Calls in which the model writes nothing, such as embeddings: one request, and one object as its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio

from agentflow.backends.apis.answers.answer import CHARS_PER_TOKEN
from agentflow.backends.apis.http.rate_limits import Demand
from agentflow.backends.apis.http.transport import ApiTransport
from agentflow.backends.apis.prices import Billing
from agentflow.errors import AgentflowError, ProtocolError, ServerLost
from agentflow.protocol.events import Usage

T = TypeVar("T")


async def post_charged(
    transport: ApiTransport,
    billing: Billing,
    path: str,
    body: bytes,
    read: Callable[[Any], tuple[T, Usage]],
    count: Callable[[Usage], None],
) -> tuple[T, Usage]:
    """Sends a request and charges it.

    Args:
        transport: Sends the request.
        billing: The costs of the model's calls.
        path: Below the base URL.
        body: A JSON object.
        read: Reads the answer, with its usage. ``ProtocolError`` if it has another form.
        count: Receives the usage with its cost, and an estimate if the answer was lost.

    Returns:
        The result of ``read``, with the cost.
    """
    await billing.until_ready(len(body), 0)
    with billing.charged(len(body), 0) as charged:
        try:
            result, usage = read(await transport.post(path, body, demand=Demand(len(body))))
        except (ProtocolError, ServerLost, anyio.get_cancelled_exc_class()):  # it may have been computed
            count(charged(Usage(len(body) // CHARS_PER_TOKEN)))
            raise
        except AgentflowError:
            charged(Usage())
            raise
        usage = charged(usage)
    count(usage)
    return result, usage
