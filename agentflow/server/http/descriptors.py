"""File descriptors: as many as a server's connections need, or as many connections as there are
descriptors."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

from agentflow.server.config.limits import ServerLimits

logger = logging.getLogger(__name__)

# Beside connections: engines and compilers with their pipes, files, and what a restarted engine needs.
RESERVED = 256
# Connections over the limit, while they are answered that there are too many.
REFUSED_CONNECTIONS = 64


def most_connections(limits: ServerLimits) -> int:
    """How many connections may be open at once: websockets, as many of HTTP, and some that are being
    refused."""
    return 2 * limits.max_connections + REFUSED_CONNECTIONS


def with_descriptors(limits: ServerLimits) -> ServerLimits:
    """Raises this process's soft limit of open files as far as ``limits`` need and the hard limit allows.
    Where that is not enough, gives limits with as many connections as there are descriptors, and logs a
    warning."""
    if sys.platform == "win32":
        return limits
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = most_connections(limits) + RESERVED
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
        except (OSError, ValueError) as error:  # some systems allow less than the hard limit says
            logger.warning("the limit of %d open files cannot be raised to %d: %s", soft, allowed, error)
    if soft >= needed:
        return limits
    reserved = min(RESERVED, soft // 2)
    most = max(1, (soft - reserved - REFUSED_CONNECTIONS) // 2)
    logger.warning(
        "this process may have %d files open: it takes %d connections of each kind at once instead of %d "
        "(max_connections); raise the limit with `ulimit -Hn`",
        soft,
        most,
        limits.max_connections,
    )
    per_address = limits.max_connections_per_address
    if per_address < 2 * limits.max_connections:  # else one address may have all
        per_address = min(per_address, most)
    return replace(limits, max_connections=most, max_connections_per_address=per_address)
