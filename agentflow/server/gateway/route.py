"""Runs the gateway: checks its targets, listens, and shuts down cleanly.

``route`` runs until a signal; ``running_gateway`` runs within a scope.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import anyio

from agentflow.engine.machine.resources import collect_garbage_rarely
from agentflow.errors import BadArgument, ServerUnreachable
from agentflow.runtime.task_group import open_task_group
from agentflow.server.config.limits import ServerLimits
from agentflow.server.gateway.defaults import DEFAULT_PORT, DRAIN_S
from agentflow.server.gateway.gateway import Gateway
from agentflow.server.gateway.target import logger
from agentflow.server.gateway.websocket_proxy import MAX_MESSAGE_BYTES
from agentflow.server.http.acceptor import with_descriptors
from agentflow.server.serve import DEFAULT_HOST, HttpServer, Signals, http_config, listen, listening_url


@asynccontextmanager
async def running_gateway(
    gateway: Gateway,
    *,
    host: str = DEFAULT_HOST,
    port: int = 0,
    limits: ServerLimits | None = None,
) -> AsyncIterator[str]:
    """Serves while the scope lasts, without signal handlers, and closes the gateway. Yields the address. For
    asyncio.

    Args:
        gateway: The application.
        host: The address to listen on.
        port: The port to listen on; 0: any free port.
        limits: The limits of its connections.

    Raises:
        PortInUse: The port is in use.
        BadArgument: A target answers, but does not have OpenAI's API.
        ServerUnreachable: No target answers.
    """
    limits = limits or ServerLimits()
    with contextlib.closing(listen(host, port)) as listener:
        async with aclosing(gateway):
            await _check_targets(gateway)
            config = http_config(gateway, limits, None, max_message_bytes=MAX_MESSAGE_BYTES)
            server = HttpServer(config, limits, listener)
            async with open_task_group() as group:
                group.start_soon(server.run_shielded)
                group.start_soon(gateway.watch)
                try:
                    yield listening_url(listener, "http")
                finally:
                    gateway.is_draining = True
                    await server.end()
                    group.cancel_scope.cancel()


async def _check_targets(gateway: Gateway) -> None:
    for target, error in (await gateway.check_all(is_first=True)).items():
        text = f"{target.base} is not a server with OpenAI's API ({error}): give the address of one with --to"
        raise BadArgument(text, param="to")
    down = [target for target in gateway.targets if target.why_down]
    if len(down) == len(gateway.targets):
        shown = ", ".join(f"{target.base} {target.why_down}" for target in down)
        raise ServerUnreachable(f"no server answers: {shown}")
    for target in down:
        logger.warning("%s %s: it gets requests when it answers", target.base, target.why_down)


def route(
    gateway: Gateway,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    drain_s: float = DRAIN_S,
) -> None:
    """Serves until SIGINT or SIGTERM. Then new requests are rejected, and running ones may continue for
    ``drain_s`` seconds. A second signal stops the gateway immediately. Raises the errors of
    ``running_gateway``."""
    limits = with_descriptors(ServerLimits())

    async def main() -> None:
        with anyio.CancelScope() as scope, Signals(scope) as signals:
            async with running_gateway(gateway, host=host, port=port, limits=limits) as url:
                collect_garbage_rarely()
                shown = ", ".join(target.base for target in gateway.targets)
                logger.info("routes to %s", shown)
                print(f"agentflow routes {url} to {shown}", flush=True)
                await signals.until_stop()
                gateway.is_draining = True
                with anyio.move_on_after(drain_s) as draining:
                    await gateway.until_idle()
                if draining.cancelled_caught:
                    logger.warning("requests still run after %g s and are cancelled", drain_s)

    anyio.run(main, backend="asyncio")  # uvicorn's event loop
