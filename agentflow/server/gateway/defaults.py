"""The settings of the gateway and their defaults."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT = 8420
CACHE_TOKENS = 131_072
"""The assumed size of a target's cache, if neither the operator nor its metrics give it."""
DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """The limits of the gateway.

    - ``first_byte_s``: the time until an answer begins.
    - ``stall_s``: the time between two parts of an answer.
    - ``body_timeout_s``: the time for a part of a client's body to arrive.
    - ``body_bytes``: a larger body is forwarded while it arrives, and cannot be sent again.
    - ``bodies_bytes``: bodies beyond this sum are treated in the same way. Bodies of at most
      ``small_body_bytes`` are not counted, and always kept.
    - ``check_s``: the interval of health checks.
    """

    first_byte_s: float = 600.0
    stall_s: float = 300.0
    body_timeout_s: float = 60.0
    body_bytes: int = 16_000_000
    bodies_bytes: int = 512_000_000
    small_body_bytes: int = 32_768
    check_s: float = 5.0
